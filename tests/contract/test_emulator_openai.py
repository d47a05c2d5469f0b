"""The rehearsal server as OpenAI's own SDK sees it, over a real socket."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import jsonschema_rs
import openai
import pytest
from openai.types import Batch

from batchsql.emulate import Durations, Emulator, OpenAILimits, Rule

MODEL = "gpt-5-mini"
SNAPSHOT = "gpt-5-mini-2025-08-07"
URL = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "category": {"enum": ["billing", "bug", "other"]},
        "urgency": {"type": "integer", "minimum": 1, "maximum": 5},
        "summary": {"type": ["string", "null"], "maxLength": 40},
    },
    "required": ["category", "urgency", "summary"],
    "additionalProperties": False,
}
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "labels", "strict": True, "schema": SCHEMA},
}


def body(text: str = "hello", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "response_format": FORMAT, **more}


def line(custom_id: str, content: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    content = body(f"row {custom_id}") if content is None else content
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": content, **more}


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    with Emulator() as started:
        yield started


def sdk(emulator: Emulator, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=emulator.openai_base_url,
        api_key="rehearsal",
        max_retries=0,
        timeout=20,
        **options,
    )


@pytest.fixture
def client(emulator: Emulator) -> Iterator[openai.OpenAI]:
    with sdk(emulator) as made:
        yield made


def ask(client: openai.OpenAI, text: str = "hello", **more: Any) -> Any:
    return client.chat.completions.create(**body(text, **more))


def upload(client: openai.OpenAI, lines: Sequence[Any]) -> str:
    text = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
    return client.files.create(file=("in.jsonl", text.encode()), purpose="batch").id


def submit(client: openai.OpenAI, lines: Sequence[Any], **more: Any) -> Batch:
    return client.batches.create(
        input_file_id=upload(client, lines), endpoint=URL, completion_window="24h", **more
    )


def read(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    content = client.files.content(file_id).content
    return [json.loads(each) for each in content.split(b"\n") if each]


def ids(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    return [each["custom_id"] for each in lines]


# --- chat completions -----------------------------------------------------------------------------


def test_answer_fits_the_schema_and_names_the_snapshot(client: openai.OpenAI) -> None:
    reply = ask(client)
    choice = reply.choices[0]
    jsonschema_rs.validate(SCHEMA, json.loads(choice.message.content))
    assert choice.finish_reason == "stop"
    assert choice.message.refusal is None
    assert reply.model == SNAPSHOT
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens_details.cached_tokens == 0


def test_same_request_gets_the_same_answer_and_is_billed_each_time(
    emulator: Emulator, client: openai.OpenAI
) -> None:
    first, second, other = ask(client), ask(client), ask(client, "something else")
    assert first.choices[0].message == second.choices[0].message
    assert first.choices[0].message != other.choices[0].message
    assert sorted(emulator.bill.by_body.values()) == [1, 2]
    assert list(emulator.bill.paid_twice.values()) == [2]


def test_answer_without_a_format_is_text_and_in_json_mode_json(client: openai.OpenAI) -> None:
    text = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "say something"}]
    )
    assert text.choices[0].message.content
    in_json = ask(client, "in JSON please", response_format={"type": "json_object"})
    assert isinstance(json.loads(in_json.choices[0].message.content), dict)


def test_repeated_long_prefix_is_reported_as_cached(client: openai.OpenAI) -> None:
    prefix = "The rules are as follows. " * 300
    first, second = (ask(client, f"{prefix}{row}").usage for row in ("first row", "second row"))
    assert first.prompt_tokens_details.cached_tokens == 0
    assert 1024 <= second.prompt_tokens_details.cached_tokens <= second.prompt_tokens
    assert second.prompt_tokens_details.cached_tokens % 128 == 0


def test_answer_is_cut_at_max_tokens(client: openai.OpenAI) -> None:
    reply = ask(client, max_completion_tokens=2)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 2
    with pytest.raises(json.JSONDecodeError):
        json.loads(reply.choices[0].message.content)


def schema_with(**changes: Any) -> dict[str, Any]:
    schema = {**SCHEMA, **changes}
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


def nested(levels: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        inner = {
            "type": "object", "properties": {"a": inner}, "required": ["a"],
            "additionalProperties": False,
        }  # fmt: skip
    return inner


def one_property(schema: Any) -> dict[str, Any]:
    return schema_with(properties={"a": schema}, required=["a"])


@pytest.mark.parametrize(
    ("changes", "status", "code", "told"),
    [
        ({"model": "gpt-nope"}, 404, "model_not_found", "does not exist"),
        ({"messages": []}, 400, "empty_array", "messages"),
        ({"messages": [{"role": "boss", "content": "x"}]}, 400, "invalid_value", "boss"),
        ({"messages": [{"role": "user", "content": None}]}, 400, "invalid_type", "content"),
        ({"extra_body": {"colour": "red"}}, 400, "unknown_parameter", "colour"),
        ({"max_tokens": 10}, 400, "unsupported_parameter", "max_completion_tokens"),
        ({"max_completion_tokens": 0}, 400, "integer_below_min_value", "at least 1"),
        ({"temperature": 0.2}, 400, "unsupported_value", "temperature"),
        ({"model": "gpt-4o-mini", "temperature": 3}, 400, "decimal_above_max_value", "temperature"),
        ({"response_format": {"type": "xml"}}, 400, "invalid_value", "response_format"),
        ({"response_format": {"type": "json_object"}}, 400, None, "the word 'json'"),
        (
            {"response_format": {**FORMAT, "json_schema": {"name": "a b", "schema": SCHEMA}}},
            400, "invalid_value", "a b",
        ),
        (
            {"response_format": schema_with(required=["category"])},
            400, "invalid_schema", "Missing 'urgency'",
        ),
        (
            {"response_format": schema_with(additionalProperties=True)},
            400, "invalid_schema", "additionalProperties",
        ),
        ({"response_format": schema_with(type="array")}, 400, "invalid_schema", "object"),
        ({"response_format": schema_with(anyOf=[])}, 400, "invalid_schema", "anyOf"),
        (
            {"response_format": one_property({"allOf": [{"type": "string"}]})},
            400, "invalid_schema", "'allOf' is not permitted",
        ),
        (
            {"response_format": one_property({"type": "array"})},
            400, "invalid_schema", "missing items",
        ),
        (
            {"response_format": one_property({"type": "string", "format": "uri"})},
            400, "invalid_schema", "uri",
        ),
        ({"response_format": one_property({})}, 400, "invalid_schema", "'type' key"),
        ({"response_format": one_property(nested(10))}, 400, "invalid_schema", "levels"),
        (
            {"response_format": one_property({"enum": [str(n) for n in range(1001)]})},
            400, "invalid_schema", "enum values",
        ),
    ],
)  # fmt: skip
def test_bad_request_is_refused_as_openai_would_and_not_billed(
    emulator: Emulator, client: openai.OpenAI, changes: dict[str, Any], status: int,
    code: str | None, told: str,
) -> None:  # fmt: skip
    with pytest.raises(openai.APIStatusError) as raised:
        ask(client, **changes)
    assert raised.value.status_code == status
    assert raised.value.code == code
    assert told in raised.value.message
    assert emulator.bill.charges == []


def test_schema_at_the_limits_is_accepted(client: openai.OpenAI) -> None:
    ask(client, response_format=one_property(nested(9)))
    ask(client, response_format=one_property({"enum": [str(n) for n in range(1000)]}))


def test_prompt_longer_than_the_window_is_refused() -> None:
    with (
        Emulator(openai=OpenAILimits(context_tokens=50)) as emulator,
        pytest.raises(openai.BadRequestError) as raised,
    ):
        ask(sdk(emulator), "long " * 200)
    assert raised.value.code == "context_length_exceeded"


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Basic abc", "rehearsal"])
def test_request_without_a_bearer_key_is_refused(
    emulator: Emulator, authorization: str | None
) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    reply = httpx2.get(f"{emulator.openai_base_url}/batches", headers=headers)
    assert reply.status_code == 401
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_unknown_path_and_broken_json_are_told_in_openais_shape(emulator: Emulator) -> None:
    headers = {"authorization": "Bearer x"}
    lost = httpx2.post(f"{emulator.openai_base_url}/nowhere", headers=headers)
    broken = httpx2.post(
        f"{emulator.openai_base_url}/chat/completions", headers=headers, content=b"{"
    )
    assert (lost.status_code, broken.status_code) == (404, 400)
    for reply in (lost, broken):
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


# --- misbehaviour of single requests --------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "error", "status"),
    [
        (Rule(behaviour="rate_limit", retry_after=7), openai.RateLimitError, 429),
        (Rule(behaviour="no_credit"), openai.RateLimitError, 429),
        (Rule(behaviour="bad_key"), openai.AuthenticationError, 401),
        (Rule(behaviour="server_error"), openai.InternalServerError, 500),
        (Rule(behaviour="unavailable"), openai.InternalServerError, 503),
        (Rule(behaviour="overloaded"), openai.InternalServerError, 529),
        (Rule(behaviour="bad_gateway"), openai.InternalServerError, 502),
        (Rule(behaviour="rejected", status=422), openai.UnprocessableEntityError, 422),
        (Rule(behaviour="too_long"), openai.BadRequestError, 400),
    ],
    ids=lambda value: value.behaviour.value if isinstance(value, Rule) else None,
)
def test_error_on_demand_is_not_billed_and_the_next_request_is_answered(
    emulator: Emulator, client: openai.OpenAI, rule: Rule, error: type[openai.APIStatusError],
    status: int,
) -> None:  # fmt: skip
    emulator.misbehave(rule.model_copy(update={"count": 1}))
    with pytest.raises(error) as raised:
        ask(client)
    assert raised.value.status_code == status
    expected = None if rule.retry_after is None else f"{rule.retry_after:g}"
    assert raised.value.response.headers.get("retry-after") == expected
    assert emulator.bill.charges == []
    assert ask(client).choices[0].finish_reason == "stop"


def test_redirect_leads_to_another_origin_of_the_same_server(
    emulator: Emulator, client: openai.OpenAI
) -> None:
    emulator.misbehave(Rule(behaviour="redirect"))
    headers = {"authorization": "Bearer secret"}
    url = f"{emulator.openai_base_url}/batches"
    reply = httpx2.get(url, headers=headers)
    assert reply.status_code == 307
    assert reply.headers["location"] == url.replace("127.0.0.1", "localhost")
    assert httpx2.get(reply.headers["location"], headers=headers).status_code == 200


@pytest.mark.parametrize(("behaviour", "billed"), [("drop", 0), ("lost_reply", 1)])
def test_dropped_connection_is_billed_only_where_the_request_was_answered(
    emulator: Emulator, client: openai.OpenAI, behaviour: str, billed: int
) -> None:
    emulator.misbehave(Rule(behaviour=behaviour, count=1))
    with pytest.raises(openai.APIConnectionError):
        ask(client)
    assert len(emulator.bill.charges) == billed
    ask(client)
    assert len(emulator.bill.charges) == billed + 1


@pytest.mark.parametrize(
    ("behaviour", "finish", "content"),
    [
        ("refusal", "stop", lambda message: message.content is None and message.refusal),
        ("length", "length", lambda message: message.content),
        ("content_filter", "content_filter", lambda message: message.content == ""),
        ("empty", "stop", lambda message: message.content == ""),
        ("invalid_json", "stop", lambda message: message.content.startswith("Sure!")),
        ("wrong_shape", "stop", lambda message: "unexpected" in message.content),
    ],
)
def test_useless_answer_on_demand_is_billed(
    emulator: Emulator, client: openai.OpenAI, behaviour: str, finish: str,
    content: Callable[[Any], object],
) -> None:  # fmt: skip
    emulator.misbehave(Rule(behaviour=behaviour))
    choice = ask(client).choices[0]
    assert choice.finish_reason == finish
    assert content(choice.message)
    assert len(emulator.bill.charges) == 1


def test_rule_meets_what_it_names_and_no_more(emulator: Emulator, client: openai.OpenAI) -> None:
    emulator.misbehave(
        Rule(behaviour="refusal", text='"quoted" é', skip=1, count=1),
        Rule(behaviour="server_error", endpoint="openai.batches.*"),
    )
    texts = ['"quoted" é 1', "plain", '"quoted" é 2', '"quoted" é 3']
    assert [ask(client, text).choices[0].message.refusal is not None for text in texts] == [
        False, False, True, False,
    ]  # fmt: skip
    with pytest.raises(openai.InternalServerError):
        client.batches.list()
    emulator.behave()
    assert client.batches.list().data == []


def test_slow_reply_is_held_until_released(emulator: Emulator, client: openai.OpenAI) -> None:
    emulator.misbehave(Rule(behaviour="slow", count=1))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, client)
        emulator.wait_held()
        assert not waiting.done()
        assert len(emulator.bill.charges) == 1  # the answer exists, whoever hears of it
        emulator.release()
        assert waiting.result(timeout=10).choices[0].finish_reason == "stop"


def test_stopping_lets_go_of_held_replies(emulator: Emulator, client: openai.OpenAI) -> None:
    emulator.misbehave(Rule(behaviour="slow"))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, client)
        emulator.wait_held()
        emulator.stop()
        assert waiting.exception(timeout=10) is None or isinstance(
            waiting.exception(), openai.APIConnectionError
        )


def test_more_requests_at_once_than_the_limit_get_429() -> None:
    limits = OpenAILimits(concurrent_requests=2)
    with Emulator(openai=limits, rules=[Rule(behaviour="slow")]) as emulator:
        client = sdk(emulator)
        with ThreadPoolExecutor(2) as pool:
            first = [pool.submit(ask, client, f"row {n}") for n in range(2)]
            emulator.wait_held(2)
            with pytest.raises(openai.RateLimitError) as raised:
                ask(client, "one too many")
            assert raised.value.response.headers["retry-after"] == "1"
            emulator.behave()
            emulator.release()
            assert all(each.result(timeout=10) for each in first)
        assert ask(client, "now there is room")


# --- files ----------------------------------------------------------------------------------------


def test_file_is_kept_as_it_was_sent(client: openai.OpenAI) -> None:
    content = '{"a": "é\u2028"}\n'.encode()
    made = client.files.create(
        file=("rows.jsonl", content), purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )  # fmt: skip
    assert (made.bytes, made.filename, made.purpose) == (len(content), "rows.jsonl", "batch")
    assert made.expires_at == made.created_at + 3600
    assert client.files.retrieve(made.id).id == made.id
    assert client.files.content(made.id).content == content
    assert [each.id for each in client.files.list()] == [made.id]
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(made.id)


@pytest.mark.parametrize(
    ("name", "options", "status"),
    [
        ("rows.txt", {}, 400),
        ("rows.jsonl", {"expires_after": {"anchor": "created_at", "seconds": 60}}, 400),
        ("rows.jsonl", {"expires_after": {"anchor": "used_at", "seconds": 3600}}, 400),
        ("big.jsonl", {}, 413),
    ],
)
def test_bad_upload_is_refused(name: str, options: Any, status: int) -> None:
    with Emulator(openai=OpenAILimits(batch_bytes=100)) as emulator:
        content = b"x" * (101 if name.startswith("big") else 10)
        with pytest.raises(openai.APIStatusError) as raised:
            sdk(emulator).files.create(file=(name, content), purpose="batch", **options)
    assert raised.value.status_code == status


def test_files_are_gone_when_they_expire(emulator: Emulator, client: openai.OpenAI) -> None:
    batch = submit(client, [line("a")])
    emulator.finish()
    output = client.batches.retrieve(batch.id).output_file_id
    assert read(client, output)
    emulator.advance(30 * 24 * 3600)
    with pytest.raises(openai.NotFoundError):
        client.files.content(output)


# --- batches --------------------------------------------------------------------------------------


def test_batch_goes_through_its_states(emulator: Emulator, client: openai.OpenAI) -> None:
    batch = submit(client, [line(f"r{n}") for n in range(4)], metadata={"shard": "s1"})
    assert (batch.status, batch.metadata, batch.output_file_id) == (
        "validating", {"shard": "s1"}, None,
    )  # fmt: skip
    assert batch.expires_at == batch.created_at + 24 * 3600
    seen = []
    for stage, fraction in (("in_progress", 0.5), ("finalizing", 0.0), ("completed", 0.0)):
        emulator.advance(stage=stage, fraction=fraction)
        batch = client.batches.retrieve(batch.id)
        counts = batch.request_counts
        seen.append((batch.status, counts.total, counts.completed, counts.failed))
    assert seen == [("in_progress", 4, 2, 0), ("finalizing", 4, 4, 0), ("completed", 4, 4, 0)]
    assert batch.model == SNAPSHOT
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert batch.error_file_id is None
    lines = read(client, batch.output_file_id)
    assert ids(lines) == ["r0", "r1", "r2", "r3"]
    for each in lines:
        assert (each["response"]["status_code"], each["error"]) == (200, None)
        content = each["response"]["body"]["choices"][0]["message"]["content"]
        jsonschema_rs.validate(SCHEMA, json.loads(content))
    usages = [each["response"]["body"]["usage"] for each in lines]
    assert batch.usage.input_tokens == sum(each["prompt_tokens"] for each in usages)
    assert batch.usage.output_tokens == sum(each["completion_tokens"] for each in usages)
    assert emulator.bill.by_custom_id == dict.fromkeys(["r0", "r1", "r2", "r3"], 1)


def test_batch_moves_with_the_clock() -> None:
    durations = Durations(validating=10, processing=100, finalizing=10)
    with Emulator(durations=durations, speed=2) as emulator:
        client = sdk(emulator)
        batch = submit(client, [line("a"), line("b")])
        statuses = []
        for seconds in (0, 6, 50, 5):
            emulator.advance(seconds)
            statuses.append(client.batches.retrieve(batch.id).status)
    assert statuses == ["validating", "in_progress", "finalizing", "completed"]


def test_instant_batch_is_created_unfinished_and_found_completed() -> None:
    with Emulator(speed=float("inf")) as emulator:
        client = sdk(emulator)
        batch = submit(client, [line("a")])
        assert (batch.status, batch.completed_at) == ("validating", None)
        batch = client.batches.retrieve(batch.id)
        assert batch.status == "completed"
        assert ids(read(client, batch.output_file_id)) == ["a"]


def test_batch_and_online_agree_on_the_answer_and_the_bill_sees_both(
    emulator: Emulator, client: openai.OpenAI
) -> None:
    batch = submit(client, [line("a", body("same"))])
    emulator.finish()
    output = read(client, client.batches.retrieve(batch.id).output_file_id)
    online = ask(client, "same")
    message = output[0]["response"]["body"]["choices"][0]["message"]
    assert message["content"] == online.choices[0].message.content
    assert [each.route for each in emulator.bill.charges] == ["batch", "online"]
    assert list(emulator.bill.paid_twice.values()) == [2]


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        (["{not json"], "invalid_json_line", 1),
        ([line("a"), "[1]"], "invalid_json_line", 2),
        ([line("a"), "", line("b")], "invalid_json_line", 2),
        ([line("a"), line("a")], "duplicate_custom_id", 2),
        ([line("a"), {"custom_id": "b"}], "missing_required_parameter", 2),
        ([line("a", method="GET")], "invalid_method", 1),
        ([line("a", url="/v1/responses")], "url_mismatch", 1),
        ([line("a"), line("b", body("x", model="gpt-5"))], "mismatched_model", 2),
        ([line("a", body("x", model="gpt-nope"))], "model_not_found", 1),
        ([], "empty_file", None),
        ([line(str(n)) for n in range(4)], "too_many_tasks", None),
    ],
)
def test_bad_file_is_accepted_and_fails_the_batch_later(
    lines: Sequence[Any], code: str, number: int | None
) -> None:
    with Emulator(openai=OpenAILimits(batch_requests=3)) as emulator:
        client = sdk(emulator)
        batch = submit(client, lines)
        assert batch.status == "validating"
        emulator.finish()
        batch = client.batches.retrieve(batch.id)
        assert batch.status == "failed"
        assert batch.failed_at is not None
        assert [(each.code, each.line) for each in batch.errors.data] == [(code, number)]
        assert (batch.output_file_id, batch.error_file_id) == (None, None)
        assert emulator.bill.charges == []


@pytest.mark.parametrize(
    "changes",
    [
        {"input_file_id": "file-nope"},
        {"completion_window": "48h"},
        {"endpoint": "/v1/nope"},
        {"metadata": {f"k{n}": "v" for n in range(17)}},
        {"metadata": {"k" * 65: "v"}},
        {"metadata": {"k": "v" * 513}},
        {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
        {"extra_body": {"priority": "high"}},
    ],
    ids=str,
)
def test_bad_creation_makes_no_batch(client: openai.OpenAI, changes: dict[str, Any]) -> None:
    good = {"input_file_id": upload(client, [line("a")]), "endpoint": URL,
            "completion_window": "24h"}  # fmt: skip
    with pytest.raises(openai.APIStatusError) as raised:
        client.batches.create(**{**good, **changes})
    assert raised.value.status_code in (400, 404)
    assert client.batches.list().data == []


def test_line_rejected_by_the_endpoint_is_in_the_error_file_and_not_billed(
    emulator: Emulator, client: openai.OpenAI
) -> None:
    batch = submit(client, [line("good"), line("bad", body("x", temperature=0))])
    emulator.finish()
    batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.request_counts.failed) == ("completed", 1)
    assert ids(read(client, batch.output_file_id)) == ["good"]
    [failure] = read(client, batch.error_file_id)
    assert (failure["custom_id"], failure["error"]) == ("bad", None)
    assert failure["response"]["status_code"] == 400
    assert "temperature" in failure["response"]["body"]["error"]["message"]
    assert list(emulator.bill.by_custom_id) == ["good"]


def test_pages_hold_every_batch_once_newest_first(client: openai.OpenAI) -> None:
    file_id = upload(client, [line("a")])
    made = [
        client.batches.create(input_file_id=file_id, endpoint=URL, completion_window="24h").id
        for _ in range(5)
    ]
    first = client.batches.list(limit=2)
    assert [each.id for each in first.data] == [made[4], made[3]]
    assert first.has_more
    assert [each.id for each in client.batches.list(limit=2)] == made[::-1]
    last = client.batches.list(limit=2, after=made[1])
    assert ([each.id for each in last.data], last.has_more) == ([made[0]], False)
    for wrong in ({"limit": 0}, {"limit": 101}, {"after": "batch_nope"}):
        with pytest.raises(openai.BadRequestError):
            client.batches.list(**wrong)
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_nope")


def test_cancelled_batch_keeps_and_bills_what_was_finished(
    emulator: Emulator, client: openai.OpenAI
) -> None:
    batch = submit(client, [line(f"r{n}") for n in range(4)])
    emulator.advance(stage="in_progress", fraction=0.5)
    assert client.batches.cancel(batch.id).status == "cancelling"
    emulator.finish()
    batch = client.batches.retrieve(batch.id)
    assert batch.status == "cancelled"
    assert batch.cancelling_at <= batch.cancelled_at
    assert ids(read(client, batch.output_file_id)) == ["r0", "r1"]
    rest = read(client, batch.error_file_id)
    assert [(each["response"], each["error"]["code"]) for each in rest] == [
        (None, "batch_cancelled")
    ] * 2
    assert sorted(emulator.bill.by_custom_id) == ["r0", "r1"]
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_batch_cancelled_before_it_began_has_no_files(
    emulator: Emulator, client: openai.OpenAI
) -> None:
    batch = submit(client, [line("a")])
    client.batches.cancel(batch.id)
    emulator.finish()
    batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("cancelled", None, None)
    assert emulator.bill.charges == []


# --- misbehaviour of batches ----------------------------------------------------------------------


@pytest.mark.parametrize(("fraction", "finished"), [(0.5, ["r0", "r1"]), (0.0, [])])
def test_expired_batch_keeps_and_bills_what_was_finished(
    emulator: Emulator, client: openai.OpenAI, fraction: float, finished: list[str]
) -> None:
    emulator.misbehave(Rule(behaviour="expire", fraction=fraction))
    batch = submit(client, [line(f"r{n}") for n in range(4)])
    emulator.advance(3600)
    assert client.batches.retrieve(batch.id).status == "in_progress"
    emulator.advance(23 * 3600)
    batch = client.batches.retrieve(batch.id)
    assert batch.status == "expired"
    assert batch.expired_at is not None
    assert ids(read(client, batch.output_file_id) if finished else []) == finished
    assert (batch.output_file_id is None) == (not finished)
    rest = read(client, batch.error_file_id)
    assert {each["error"]["code"] for each in rest} == {"batch_expired"}
    assert len(rest) == 4 - len(finished)
    assert sorted(emulator.bill.by_custom_id) == finished


def test_lost_creation_reply_leaves_a_batch_that_metadata_finds(
    emulator: Emulator, client: openai.OpenAI
) -> None:
    emulator.misbehave(Rule(behaviour="slow", endpoint="openai.batches.create", count=1))
    file_id = upload(client, [line("a")])
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).batches.create(
            input_file_id=file_id, endpoint=URL, completion_window="24h", metadata={"shard": "s7"}
        )
    [batch] = client.batches.list()
    assert batch.metadata == {"shard": "s7"}
    emulator.finish()
    assert client.batches.retrieve(batch.id).status == "completed"


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (Rule(behaviour="fail_validation", code="invalid_json_line"), "invalid_json_line"),
        (Rule(behaviour="queue_full"), "token_limit_exceeded"),
    ],
)
def test_batch_fails_after_creation_on_demand(
    emulator: Emulator, client: openai.OpenAI, rule: Rule, code: str
) -> None:
    emulator.misbehave(rule.model_copy(update={"count": 1}))
    first, second = submit(client, [line("a")]), submit(client, [line("b")])
    emulator.finish()
    failed = client.batches.retrieve(first.id)
    assert (failed.status, failed.errors.data[0].code) == ("failed", code)
    assert client.batches.retrieve(second.id).status == "completed"
    assert list(emulator.bill.by_custom_id) == ["b"]


def test_queue_is_full_until_a_batch_ends() -> None:
    with Emulator(openai=OpenAILimits(enqueued_tokens=200)) as emulator:
        client = sdk(emulator)
        first, second = submit(client, [line("a")]), submit(client, [line("b")])
        emulator.advance(stage="in_progress")
        statuses = [client.batches.retrieve(each.id).status for each in (first, second)]
        assert statuses == ["in_progress", "failed"]
        error = client.batches.retrieve(second.id).errors.data[0]
        assert error.code == "token_limit_exceeded"
        emulator.finish()
        third = submit(client, [line("c")])
        emulator.finish()
        assert client.batches.retrieve(third.id).status == "completed"


def test_results_come_out_of_order_missing_and_twice_on_demand(
    emulator: Emulator, client: openai.OpenAI
) -> None:
    emulator.misbehave(
        Rule(behaviour="shuffle"),
        Rule(behaviour="missing", custom_id="r3"),
        Rule(behaviour="duplicate", custom_id="r5"),
    )
    batch = submit(client, [line(f"r{n}") for n in range(20)])
    emulator.finish()
    got = ids(read(client, client.batches.retrieve(batch.id).output_file_id))
    expected = sorted([*(f"r{n}" for n in range(20) if n != 3), "r5"])
    assert sorted(got) == expected
    assert got != sorted(got, key=lambda each: int(each[1:]))
    assert emulator.bill.by_custom_id == {f"r{n}": 1 for n in range(20)}


def test_batch_has_only_an_error_file_on_demand(emulator: Emulator, client: openai.OpenAI) -> None:
    emulator.misbehave(Rule(behaviour="errors_only"))
    batch = submit(client, [line("a"), line("b")])
    emulator.finish()
    batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.output_file_id) == ("completed", None)
    assert batch.request_counts.failed == 2
    assert [each["response"]["status_code"] for each in read(client, batch.error_file_id)] == [
        400, 400,
    ]  # fmt: skip
    assert emulator.bill.charges == []


def test_output_file_holds_an_error_line_on_demand(
    emulator: Emulator, client: openai.OpenAI
) -> None:
    emulator.misbehave(Rule(behaviour="error_in_output", custom_id="b", status=429))
    batch = submit(client, [line("a"), line("b")])
    emulator.finish()
    lines = read(client, client.batches.retrieve(batch.id).output_file_id)
    assert [each["response"]["status_code"] for each in lines] == [200, 429]
    assert lines[1]["error"] is None
    assert list(emulator.bill.by_custom_id) == ["a"]


def test_useless_answers_of_a_batch_are_success_lines_and_billed(
    emulator: Emulator, client: openai.OpenAI
) -> None:
    behaviours = ["refusal", "length", "content_filter", "empty", "invalid_json"]
    emulator.misbehave(*(Rule(behaviour=each, custom_id=each) for each in behaviours))
    batch = submit(client, [line(each) for each in behaviours])
    emulator.finish()
    batch = client.batches.retrieve(batch.id)
    assert batch.request_counts.completed == 5
    assert ids(read(client, batch.output_file_id)) == behaviours
    assert len(emulator.bill.charges) == 5


def test_download_breaks_off_and_is_whole_the_next_time(
    emulator: Emulator, client: openai.OpenAI
) -> None:
    batch = submit(client, [line(f"r{n}") for n in range(20)])
    emulator.finish()
    output = client.batches.retrieve(batch.id).output_file_id
    emulator.misbehave(
        Rule(behaviour="truncate", endpoint="openai.files.content", fraction=0.4, count=1)
    )
    received = b""
    with (
        pytest.raises((httpx2.RemoteProtocolError, openai.APIConnectionError)),
        client.files.with_streaming_response.content(output) as reply,
    ):
        for piece in reply.iter_bytes():
            received += piece
    whole = client.files.content(output).content
    assert received == whole[: int(len(whole) * 0.4)]
    assert len(whole.split(b"\n")) == 21


def test_cancelling_never_ends_on_demand(emulator: Emulator, client: openai.OpenAI) -> None:
    emulator.misbehave(Rule(behaviour="cancel_hangs"))
    batch = submit(client, [line("a")])
    client.batches.cancel(batch.id)
    emulator.advance(23 * 3600)
    assert client.batches.retrieve(batch.id).status == "cancelling"
    emulator.advance(3600)
    assert client.batches.retrieve(batch.id).status == "expired"


# --- the emulator's own controls ------------------------------------------------------------------


def test_controls_work_over_http(emulator: Emulator, client: openai.OpenAI) -> None:
    batch = submit(client, [line("a")])
    root = f"{emulator.url}/_emulate"
    added = httpx2.post(f"{root}/rules", json=[{"behaviour": "refusal", "text": "row a"}])
    assert added.json() == {"added": 1}
    moved = httpx2.post(f"{root}/advance", json={"stage": "end"}).json()
    assert moved == [{"id": batch.id, "phase": "done", "share": 1.0}]
    bill = httpx2.get(f"{root}/bill?charges").json()
    assert (bill["billed"], bill["by_finish"], bill["paid_twice"]) == (1, {"refusal": 1}, {})
    assert bill["charges"][0]["custom_id"] == "a"
    assert bill["calls"] == {"openai.files.create": 1, "openai.batches.create": 1}
    assert httpx2.delete(f"{root}/rules").status_code == 200
    assert ask(client, "row a").choices[0].message.refusal is None


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("advance", {"stage": "nowhere"}),
        ("advance", {"hours": 1}),
        ("advance", {"seconds": -1}),
        ("rules", [{"behaviour": "explode"}]),
        ("rules", {"behaviour": "drop"}),
    ],
)
def test_controls_refuse_what_they_do_not_know(
    emulator: Emulator, path: str, content: object
) -> None:
    reply = httpx2.post(f"{emulator.url}/_emulate/{path}", json=content)
    assert reply.status_code == 400
    assert reply.json()["error"]


def test_calls_are_recorded_with_their_key(emulator: Emulator, client: openai.OpenAI) -> None:
    client.batches.list()
    [call] = emulator.calls
    assert (call.operation, call.method, call.path, call.status) == (
        "openai.batches.list", "GET", "/openai/v1/batches", 200,
    )  # fmt: skip
    assert call.authorization == "Bearer rehearsal"


def test_many_clients_at_once_are_each_billed_once(emulator: Emulator) -> None:
    client, barrier = sdk(emulator), threading.Barrier(8)

    def work(number: int) -> None:
        barrier.wait(timeout=30)
        for row in range(10):
            ask(client, f"row {number} {row}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert sorted(emulator.bill.by_prompt.values()) == [1] * 80
