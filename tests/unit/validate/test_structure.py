from __future__ import annotations

import json
from typing import Any

import pytest

from batchsql.declare.returns import parse_returns
from batchsql.types import Completion, FinishReason, Outcome
from batchsql.validate.structure import MAX_RAW_BYTES, AnswerValidator, Verdict


def validator(fragment: Any, **more: Any) -> AnswerValidator:
    returns, mistakes = parse_returns({"v": fragment, **more})
    assert mistakes == []
    return AnswerValidator(returns)


def completion(text: str | None, reason: FinishReason | None = FinishReason.STOP) -> Completion:
    return Completion("k", text, reason)


def check(fragment: Any, text: str) -> Verdict:
    return validator(fragment).check(completion(text))


INTEGER = {"type": "integer"}
NUMBER = {"type": "number"}
TEXT = {"type": "string"}
DATE = {"type": "string", "format": "date"}
TIME = {"type": "string", "format": "date-time"}


@pytest.mark.parametrize(
    ("fragment", "value", "canonical"),
    [
        (INTEGER, "3", "3"),
        (INTEGER, "3.0", "3"),
        (INTEGER, "1e3", "1000"),
        (INTEGER, "-9223372036854775808", "-9223372036854775808"),
        (NUMBER, "3", "3"),
        (NUMBER, "0.10", "0.1"),
        (NUMBER, "12345678901234567890123", "1.2345678901234568e+22"),
        (TEXT, '"a\\u00e9\\n"', '"aé\\n"'),
        (DATE, '"2024-02-29"', '"2024-02-29"'),
        (TIME, '"2026-01-01T00:30:00+01:00"', '"2025-12-31T23:30:00Z"'),
        (TIME, '"2026-01-01t00:30:00.5z"', '"2026-01-01T00:30:00.500000Z"'),
        (TIME, '"2026-01-01T00:30:00.1234567-00:30"', '"2026-01-01T01:00:00.123456Z"'),
        ({"type": ["integer", "null"]}, "null", "null"),
        ({"enum": ["a", None]}, "null", "null"),
        ({"enum": [1, 2]}, "2.0", "2"),
        ({"type": "array", "items": INTEGER}, "[1.0, 2]", "[1,2]"),
        (
            {"type": "object", "properties": {"a": INTEGER, "b": DATE}, "required": ["a"]},
            '{"a": 1.0}',
            '{"a":1}',
        ),
    ],
)
def test_answer_is_stored_in_canonical_form(fragment: Any, value: str, canonical: str) -> None:
    verdict = check(fragment, f' {{ "v" : {value} }}\n')
    assert verdict == Verdict(Outcome.OK, f'{{"v":{canonical}}}')


@pytest.mark.parametrize(
    ("fragment", "text", "part"),
    [
        (INTEGER, '{"v": 9223372036854775808}', "v: does not fit a 64-bit integer"),
        (INTEGER, '{"v": -1e30}', "v: does not fit a 64-bit integer"),
        (INTEGER, '{"v": 3.5}', "v: does not match type"),
        (INTEGER, '{"v": true}', "v: does not match type"),
        ({"type": "integer", "maximum": 5}, '{"v": 7}', "v: does not match maximum 5; got 7"),
        (NUMBER, '{"v": NaN}', "not JSON"),
        (NUMBER, '{"v": Infinity}', "not JSON"),
        (NUMBER, '{"v": 1e400}', "not JSON"),
        (TEXT, '{"v": "a\\u0000b"}', "v: contains a NUL"),
        (TEXT, '{"v": "\\ud800"}', "not JSON"),
        (TEXT, '{"v": "\udc80"}', "JSON"),
        (TEXT, '{"v": "a\0"}', "not JSON"),
        (DATE, '{"v": "2024-02-31"}', "v: does not match format"),
        (DATE, '{"v": "0000-01-01"}', "v: "),
        (TIME, '{"v": "2024-02-01"}', "v: does not match format"),
        (TIME, '{"v": "0001-01-01T00:00:00+01:00"}', "v: is no time of the years"),
        (TIME, '{"v": "2016-12-31T23:59:60Z"}', "v: "),
        ({"enum": ["a"]}, '{"v": "b"}', 'v: does not match enum ["a"]; got b'),
        ({"enum": ["a", None]}, '{"v": "b"}', 'v: does not match enum ["a"]; got b'),
        (TEXT, "{}", "v: it is missing"),
        (TEXT, '{"v": "a", "w": 1}', "w: it is not in the schema; got 1"),
        (TEXT, '{"v": "a", "v": "b"}', "v: the key stands there twice"),
        (
            {"type": "array", "items": {"type": "object", "properties": {"a": TEXT}}},
            '{"v": [{"a": "b", "a": "c"}]}',
            "a: the key stands there twice",
        ),
        (TEXT, "[1]", "no JSON object"),
        (TEXT, '{"v": "a"} and more', "not JSON"),
        (TEXT, 'Sure: ```json\n{"v": "a"}\n```', "not JSON"),
        (TEXT, '{"v":' + "[" * 100_000, "JSON"),
        (TEXT, '{"v":' + "[" * 1000 + "]" * 1000 + "}", ""),
        (TEXT, '{"v": "' + "a" * 1_000_000 + '"}', "more than 1000000 bytes"),
        (TEXT, '{"v": "' + "é" * 600_000 + '"}', "more than 1000000 bytes"),
        (
            {"type": "array", "items": {"type": "object", "properties": {"a": TEXT}}},
            '{"v": [{"a": "\\u0000"}]}',
            "v.0.a: contains a NUL",
        ),
        (TEXT, "", "empty"),
        (TEXT, " \n", "empty"),
    ],
)
def test_bad_answer_is_invalid_and_says_why(fragment: Any, text: str, part: str) -> None:
    verdict = check(fragment, text)
    assert verdict.outcome is Outcome.INVALID
    assert verdict.answer is None
    assert part in (verdict.error or "")
    assert len(verdict.error or "") < 500
    assert (verdict.error or "").isprintable()
    if text:
        assert (verdict.raw or "").isascii()
        assert len(verdict.raw or "") <= MAX_RAW_BYTES
        assert isinstance(json.loads(verdict.raw or ""), str)


@pytest.mark.parametrize("fence", ["```json\n{}\n```", "```\n{}```", "\n ```JSON\r\n{}\r\n``` "])
def test_fence_around_the_whole_answer_is_taken_off(fence: str) -> None:
    assert check(TEXT, fence.replace("{}", '{"v": "a"}')).answer == '{"v":"a"}'


def test_keys_are_stored_in_the_order_of_the_schema() -> None:
    judge = validator(TEXT, why={"type": "string", "hidden": True})
    assert judge.check(completion('{"v":"a","why":"b"}')).answer == '{"why":"b","v":"a"}'


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (FinishReason.LENGTH, Outcome.TRUNCATED),
        (FinishReason.REFUSAL, Outcome.REFUSED),
        (FinishReason.CONTENT_FILTER, Outcome.FILTERED),
    ],
)
def test_finish_reason_decides_before_the_text(reason: FinishReason, outcome: Outcome) -> None:
    verdict = validator(TEXT).check(completion('{"v": "a"}', reason))
    assert (verdict.outcome, verdict.answer) == (outcome, None)
    assert json.loads(verdict.raw or "") == '{"v": "a"}'


def test_failure_of_the_backend_is_the_outcome() -> None:
    failed = Completion("k", None, None, failure=Outcome.TOO_LONG, error="6000 tokens\x1b[31m")
    verdict = validator(TEXT).check(failed)
    assert verdict == Verdict(Outcome.TOO_LONG, None, "6000 tokens\\u001b[31m", None)


def test_error_shows_no_escapes_and_little_of_the_value() -> None:
    verdict = check({"enum": ["a"]}, json.dumps({"v": "\x1b[2J\u202e" + "x" * 500}))
    assert "\x1b" not in (verdict.error or "")
    assert "\u202e" not in (verdict.error or "")
    assert 50 < (verdict.error or "").count("x") <= 100


def test_raw_is_cut_with_a_note_of_the_full_length() -> None:
    raw = check(TEXT, "\U0001f600" * 100_000).raw or ""
    assert len(raw) <= MAX_RAW_BYTES
    assert json.loads(raw).endswith("[cut: 100000 characters in all]")
    assert len(raw) > MAX_RAW_BYTES * 0.9
