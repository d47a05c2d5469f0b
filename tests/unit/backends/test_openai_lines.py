"""Result lines of OpenAI's batches, by table."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

import pytest

from batchsql.backends.openai_lines import parse_line, parse_moment
from batchsql.types import Completion, FinishReason, Outcome, Usage

KEY = "0123456789abcdef0123456789abcdef"
ID = f"{KEY}-{'a' * 24}"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"label": {"type": "string"}, "note": {"type": "string"}},
    "required": ["label"],
}


def body(content: Any = '{"label":"bug"}', reason: Any = "stop", **message: Any) -> dict[str, Any]:
    return {
        "model": "gpt-5-mini-2025-08-07",
        "choices": [{"finish_reason": reason, "message": {"content": content, **message}}],
        "usage": {
            "prompt_tokens": 100,
            "completion_tokens": 50,
            "prompt_tokens_details": {"cached_tokens": 80, "cache_write_tokens": 10},
            "completion_tokens_details": {"reasoning_tokens": 40},
        },
    }


def parse(response: Any, error: Any = None) -> Completion:
    line = {"id": "batch_req_1", "custom_id": ID, "response": response, "error": error}
    parsed = parse_line(json.dumps(line).encode(), SCHEMA)
    assert (parsed.custom_id, parsed.completion.request_key) == (ID, KEY)
    return parsed.completion


@pytest.mark.parametrize(
    ("reply", "text", "reason"),
    [
        (body(), '{"label":"bug"}', FinishReason.STOP),
        (body('{"label":"bug","note":null}'), '{"label":"bug"}', FinishReason.STOP),
        (body('{"la', "length"), '{"la', FinishReason.LENGTH),
        (body("", "content_filter"), "", FinishReason.CONTENT_FILTER),
        (body(None, refusal="I cannot."), "I cannot.", FinishReason.REFUSAL),
        (body(None), "", FinishReason.STOP),
        (body("a\u2028b\x00"), "a\u2028b\x00", FinishReason.STOP),
        (body("a\ud800b"), "a\ud800b", FinishReason.STOP),
    ],
)
def test_good_line_holds_the_answer(reply: Any, text: str, reason: FinishReason) -> None:
    completion = parse({"status_code": 200, "request_id": "r", "body": reply})
    assert (completion.text, completion.finish_reason, completion.failure) == (text, reason, None)
    assert completion.model_reported == "gpt-5-mini-2025-08-07"
    assert completion.usage == Usage(
        input_tokens=100,
        output_tokens=50,
        cached_tokens=80,
        cache_write_tokens=10,
        reasoning_tokens=40,
    )


def refused(status: Any, message: str = "no", **fields: Any) -> dict[str, Any]:
    return {"status_code": status, "body": {"error": {"message": message, **fields}}}


@pytest.mark.parametrize(
    ("response", "outcome", "said"),
    [
        (refused(400, "strange text"), Outcome.REJECTED, "status 400: strange text"),
        (refused(400, code="context_length_exceeded"), Outcome.TOO_LONG, "status 400"),
        (refused(400, code="content_filter"), Outcome.FILTERED, "status 400"),
        (refused(413), Outcome.TOO_LONG, "status 413"),
        (refused(429, "slower"), Outcome.TRANSIENT, "slower"),
        (refused(500, "boom"), Outcome.TRANSIENT, "boom"),
        (refused(401, "bad key"), Outcome.REJECTED, "every request is refused"),
        (refused(404, code="model_not_found"), Outcome.REJECTED, "every request is refused"),
        (refused(400, param="response_format.x"), Outcome.REJECTED, "every request is refused"),
        (refused(429, code="insufficient_quota"), Outcome.TRANSIENT, "every request is refused"),
        (refused(307), Outcome.REJECTED, "every request is refused"),
        (refused(None), Outcome.TRANSIENT, "no status"),
        (refused("400"), Outcome.TRANSIENT, "no status"),
        ({"status_code": 400, "body": None}, Outcome.REJECTED, "no reason given"),
        ({"status_code": 502, "body": "<html>"}, Outcome.TRANSIENT, "<html>"),
        ({"status_code": 200, "body": None}, Outcome.TRANSIENT, "no answer of this API"),
        ({"status_code": 200, "body": {"choices": []}}, Outcome.TRANSIENT, "no answer"),
        ({"status_code": 200, "body": body("x", ["stop"])}, Outcome.REJECTED, "unknown reason"),
        ({"status_code": 200, "body": body(["x"])}, Outcome.REJECTED, "unknown reason"),
    ],
)
def test_refused_line_says_why(response: Any, outcome: Outcome, said: str) -> None:
    completion = parse(response)
    assert (completion.text, completion.finish_reason) == (None, None)
    assert completion.failure is outcome
    assert said in (completion.error or "")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ({"code": "batch_expired", "message": "late"}, "expired in the batch, not billed"),
        ({"code": "batch_cancelled", "message": "x"}, "cancelled in the batch, not billed"),
        ({"code": "odd", "message": "why"}, "not run in the batch: odd (why)"),
        ("just words", "just words"),
        (None, "no reason given"),
    ],
)
def test_line_that_was_not_run_may_be_tried_again(error: Any, said: str) -> None:
    completion = parse(None, error)
    assert completion.failure is Outcome.TRANSIENT
    assert said in (completion.error or "")
    assert completion.usage == Usage()


@pytest.mark.parametrize(
    "line",
    [b"{", b"[]", b"null", b"{}", b'{"custom_id": 7}', b"\xff\xfe", b"[" * 100_000],
    ids=lambda line: repr(line[:20]),
)
def test_unreadable_line_has_no_id(line: bytes) -> None:
    parsed = parse_line(line, SCHEMA)
    assert (parsed.custom_id, parsed.completion.request_key) == ("", "")
    assert parsed.completion.failure is Outcome.TRANSIENT


def test_count_that_no_column_holds_is_left_out() -> None:
    reply = {**body(), "usage": {"prompt_tokens": 1 << 63, "completion_tokens": 7}}
    usage = parse({"status_code": 200, "request_id": "r", "body": reply}).usage
    assert usage == Usage(output_tokens=7)


@pytest.mark.parametrize(
    "error", ['{"message":"bad \\ud800"}', "[" * 300 + "]" * 300, "[" * 1_000 + "]" * 1_000]
)
def test_no_error_of_a_line_breaks_the_others_off(error: str) -> None:
    response = f'{{"status_code":400,"body":{{"error":{error}}}}}'
    parsed = parse_line(f'{{"custom_id":"{ID}","response":{response}}}'.encode(), SCHEMA)
    assert parsed.completion.request_key == KEY
    assert parsed.completion.failure is not None and parsed.completion.error


def test_foreign_id_has_no_request_key() -> None:
    response = {"status_code": 200, "body": body()}
    line = {"custom_id": "request-1", "response": response, "error": None}
    parsed = parse_line(json.dumps(line).encode(), SCHEMA)
    assert (parsed.custom_id, parsed.completion.request_key) == ("request-1", "")


@pytest.mark.parametrize(
    ("value", "moment"),
    [
        (1_764_417_600, datetime(2025, 11, 29, 12, tzinfo=timezone.utc)),
        ("2025-11-29T12:00:00Z", datetime(2025, 11, 29, 12, tzinfo=timezone.utc)),
        ("2025-11-29T12:00:00", datetime(2025, 11, 29, 12, tzinfo=timezone.utc)),
        (None, None),
        ("soon", None),
        (10**30, None),
    ],
)
def test_moment_is_read_in_either_form(value: Any, moment: datetime | None) -> None:
    assert parse_moment(value) == moment
