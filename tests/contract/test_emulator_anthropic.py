"""The rehearsal server as Anthropic's own SDK sees it, over a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import anthropic
import httpx2
import jsonschema_rs
import pytest
from anthropic.types.messages import MessageBatch

from batchsql.emulate import AnthropicLimits, Emulator, Rule

MODEL = "claude-haiku-4-5"
SNAPSHOT = "claude-haiku-4-5-20251001"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "category": {"enum": ["billing", "bug", "other"]},
        "urgency": {"type": "integer", "minimum": 1, "maximum": 5},
        "summary": {"type": "string", "maxLength": 40},
    },
    "required": ["category", "urgency", "summary"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "schema": anthropic.transform_schema(SCHEMA)}


def params(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "max_tokens": 200,
        "messages": [{"role": "user", "content": text}],
        "output_config": {"format": FORMAT},
        **more,
    }


def entry(custom_id: str, content: Mapping[str, Any] | None = None) -> Any:
    content = params(f"row {custom_id}") if content is None else content
    return {"custom_id": custom_id, "params": content}


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    with Emulator() as started:
        yield started


def sdk(emulator: Emulator) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=emulator.anthropic_base_url, api_key="rehearsal", max_retries=0, timeout=20
    )


@pytest.fixture
def client(emulator: Emulator) -> Iterator[anthropic.Anthropic]:
    with sdk(emulator) as made:
        yield made


def ask(client: anthropic.Anthropic, text: str = "hello", **more: Any) -> Any:
    return client.messages.create(**params(text, **more))


def submit(client: anthropic.Anthropic, names: Sequence[str]) -> MessageBatch:
    return client.messages.batches.create(requests=[entry(name) for name in names])


def results(client: anthropic.Anthropic, batch: MessageBatch) -> list[Any]:
    return list(client.messages.batches.results(batch.id))


def kinds(client: anthropic.Anthropic, batch: MessageBatch) -> dict[str, str]:
    return {each.custom_id: each.result.type for each in results(client, batch)}


def counts(batch: MessageBatch) -> dict[str, int]:
    return {name: count for name, count in batch.request_counts.to_dict().items() if count}


# --- messages -------------------------------------------------------------------------------------


def test_answer_fits_the_schema_with_the_bounds_that_the_description_tells(
    client: anthropic.Anthropic,
) -> None:
    for row in range(20):
        reply = ask(client, f"row {row}")
        jsonschema_rs.validate(SCHEMA, json.loads(reply.content[0].text))
    assert (reply.stop_reason, reply.model) == ("end_turn", SNAPSHOT)
    assert reply.usage.input_tokens > 0
    assert reply.usage.output_tokens > 0


def test_same_request_gets_the_same_answer_and_is_billed_each_time(
    emulator: Emulator, client: anthropic.Anthropic
) -> None:
    first, second = ask(client), ask(client)
    assert first.content == second.content
    assert list(emulator.bill.by_body.values()) == [2]


def test_answer_without_a_format_is_text(client: anthropic.Anthropic) -> None:
    reply = client.messages.create(
        model=MODEL, max_tokens=100, messages=[{"role": "user", "content": "say something"}]
    )
    assert reply.content[0].text


@pytest.mark.parametrize(("ttl", "minutes"), [("5m", 6), ("1h", 61)])
def test_marked_prefix_is_written_to_the_cache_then_read_until_it_expires(
    emulator: Emulator, client: anthropic.Anthropic, ttl: str, minutes: int
) -> None:
    control = {"type": "ephemeral", "ttl": ttl}
    system = [{"type": "text", "text": "The rules. " * 600, "cache_control": control}]
    first, second = (ask(client, row, system=system).usage for row in ("row 1", "row 2"))
    written = first.cache_creation_input_tokens
    assert written >= 1024
    assert first.cache_read_input_tokens == 0
    by_ttl = {"5m": first.cache_creation.ephemeral_5m_input_tokens,
              "1h": first.cache_creation.ephemeral_1h_input_tokens}  # fmt: skip
    assert by_ttl == {**dict.fromkeys(by_ttl, 0), ttl: written}
    assert (second.cache_read_input_tokens, second.cache_creation_input_tokens) == (written, 0)
    assert second.input_tokens < 20
    emulator.advance(minutes * 60)
    assert ask(client, "row 3", system=system).usage.cache_creation_input_tokens == written


def test_longest_prefix_that_is_still_cached_is_read(
    emulator: Emulator, client: anthropic.Anthropic
) -> None:
    system = [
        {"type": "text", "text": "The rules. " * 600,
         "cache_control": {"type": "ephemeral", "ttl": ttl}}
        for ttl in ("1h", "5m")
    ]  # fmt: skip
    first = ask(client, "row 1", system=system).usage
    halves = first.cache_creation
    assert halves.ephemeral_5m_input_tokens == halves.ephemeral_1h_input_tokens > 1024
    emulator.advance(6 * 60)
    second = ask(client, "row 2", system=system).usage
    assert second.cache_read_input_tokens == halves.ephemeral_1h_input_tokens
    assert second.cache_creation_input_tokens == halves.ephemeral_5m_input_tokens


def test_unmarked_or_short_prefix_is_not_cached(client: anthropic.Anthropic) -> None:
    control = {"type": "ephemeral"}
    short = [{"type": "text", "text": "short", "cache_control": control}]
    for system in ("The rules. " * 600, short):
        for _ in range(2):
            usage = ask(client, system=system).usage
            assert usage.cache_creation_input_tokens == usage.cache_read_input_tokens == 0


def test_answer_is_cut_at_max_tokens(client: anthropic.Anthropic) -> None:
    reply = ask(client, max_tokens=2)
    assert (reply.stop_reason, reply.usage.output_tokens) == ("max_tokens", 2)


def with_schema(schema: Any) -> dict[str, Any]:
    return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}


def one_property(schema: Any, **more: Any) -> dict[str, Any]:
    return with_schema(
        {"type": "object", "properties": {"a": schema}, "required": ["a"],
         "additionalProperties": False, **more}
    )  # fmt: skip


def many(count: int, schema: Any, required: bool) -> dict[str, Any]:
    names = [f"p{n}" for n in range(count)]
    return with_schema(
        {"type": "object", "properties": dict.fromkeys(names, schema),
         "required": names if required else [], "additionalProperties": False}
    )  # fmt: skip


UNION = {"anyOf": [{"type": "string"}, {"type": "null"}]}
NODE = {
    "type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "status", "kind", "told"),
    [
        ({"model": "claude-nope"}, 404, "not_found_error", "claude-nope"),
        ({"messages": []}, 400, "invalid_request_error", "at least one message"),
        ({"messages": [{"role": "system", "content": "x"}]}, 400, None, "role"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 400, None, "first message"),
        ({"messages": [{"role": "user", "content": ""}]}, 400, None, "non-empty"),
        ({"system": [{"type": "text", "text": " "}]}, 400, None, "non-whitespace"),
        ({"max_tokens": -1}, 400, None, "max_tokens"),
        ({"extra_body": {"response_format": {}}}, 400, None, "Extra inputs"),
        ({"extra_body": {"temperature": 1.5}}, 400, None, "temperature"),
        (
            {"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}] * 5},
            400, None, "maximum of 4",
        ),
        (
            {"system": [{"type": "text", "text": "x",
                         "cache_control": {"type": "ephemeral", "ttl": "2h"}}]},
            400, None, "ttl",
        ),
        (
            {"system": [{"type": "text", "text": "x",
                         "cache_control": {"type": "ephemeral", "minutes": 5}}]},
            400, None, "minutes",
        ),
        (
            {"system": [{"type": "text", "text": "x",
                         "cache_control": {"type": "ephemeral", "ttl": ttl}}
                        for ttl in ("5m", "1h")]},
            400, None, "must not come after",
        ),
        (with_schema(SCHEMA), 400, None, "maximum, minimum are not supported"),
        (one_property({"type": "string", "maxLength": 3}), 400, None, "maxLength"),
        (one_property({"type": "array", "items": {"type": "string"}, "minItems": 2}), 400, None,
         "minItems"),
        (one_property({"type": "string"}, additionalProperties=True), 400, None,
         "additionalProperties"),
        (one_property({"$ref": "#/$defs/node"}, **{"$defs": {"node": NODE}}), 400, None,
         "Recursive"),
        (one_property({"oneOf": [{"type": "string"}]}), 400, None, "oneOf"),
        (one_property({"type": "string", "format": "colour"}), 400, None, "colour"),
        (many(25, {"type": "string"}, required=False), 400, None, "optional"),
        (many(17, UNION, required=True), 400, None, "union"),
    ],
)  # fmt: skip
def test_bad_request_is_refused_as_anthropic_would_and_not_billed(
    emulator: Emulator, client: anthropic.Anthropic, changes: dict[str, Any], status: int,
    kind: str | None, told: str,
) -> None:  # fmt: skip
    with pytest.raises(anthropic.APIStatusError) as raised:
        ask(client, **changes)
    assert raised.value.status_code == status
    assert raised.value.type == (kind or "invalid_request_error")
    assert told in raised.value.message
    assert emulator.bill.charges == []


def test_schema_at_the_limits_is_accepted(client: anthropic.Anthropic) -> None:
    ask(client, **many(24, {"type": "string"}, required=False))
    ask(client, **many(16, UNION, required=True))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"anthropic-version": "2026-10-21"}, 401),
        ({"anthropic-version": "2026-10-21", "authorization": "Bearer"}, 401),
        ({"authorization": "Bearer x"}, 400),
        ({"authorization": "Bearer x", "anthropic-version": "2026-10-21"}, 200),
        ({"x-api-key": "x", "anthropic-version": "2023-06-01"}, 200),
    ],
)
def test_headers_are_demanded(emulator: Emulator, headers: dict[str, str], status: int) -> None:
    reply = httpx2.get(f"{emulator.anthropic_base_url}/v1/messages/batches", headers=headers)
    assert reply.status_code == status


# --- misbehaviour of single requests --------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "error", "kind"),
    [
        ("rate_limit", anthropic.RateLimitError, "rate_limit_error"),
        ("overloaded", anthropic.OverloadedError, "overloaded_error"),
        ("server_error", anthropic.InternalServerError, "api_error"),
        ("unavailable", anthropic.ServiceUnavailableError, "api_error"),
        ("bad_key", anthropic.AuthenticationError, "authentication_error"),
        ("no_credit", anthropic.PaymentRequiredError, "billing_error"),
        ("rejected", anthropic.BadRequestError, "invalid_request_error"),
        ("too_long", anthropic.BadRequestError, "invalid_request_error"),
    ],
)
def test_error_on_demand_is_not_billed_and_the_next_request_is_answered(
    emulator: Emulator, client: anthropic.Anthropic, behaviour: str,
    error: type[anthropic.APIStatusError], kind: str,
) -> None:  # fmt: skip
    emulator.misbehave(Rule(behaviour=behaviour, count=1))
    with pytest.raises(error) as raised:
        ask(client)
    assert raised.value.type == kind
    assert emulator.bill.charges == []
    assert ask(client).stop_reason == "end_turn"


def test_retry_after_is_sent(emulator: Emulator, client: anthropic.Anthropic) -> None:
    emulator.misbehave(Rule(behaviour="rate_limit", retry_after=0.5))
    with pytest.raises(anthropic.RateLimitError) as raised:
        ask(client)
    assert raised.value.response.headers["retry-after"] == "0.5"


@pytest.mark.parametrize(("behaviour", "billed"), [("drop", 0), ("lost_reply", 1)])
def test_dropped_connection_is_billed_only_where_the_request_was_answered(
    emulator: Emulator, client: anthropic.Anthropic, behaviour: str, billed: int
) -> None:
    emulator.misbehave(Rule(behaviour=behaviour))
    with pytest.raises(anthropic.APIConnectionError):
        ask(client)
    assert len(emulator.bill.charges) == billed


@pytest.mark.parametrize(
    ("behaviour", "stop_reason", "starts"),
    [
        ("refusal", "refusal", "I'm sorry"),
        ("content_filter", "refusal", None),
        ("length", "max_tokens", "{"),
        ("empty", "end_turn", None),
        ("invalid_json", "end_turn", "Sure!"),
        ("wrong_shape", "end_turn", '{"unexpected"'),
    ],
)
def test_useless_answer_on_demand_is_billed(
    emulator: Emulator, client: anthropic.Anthropic, behaviour: str, stop_reason: str,
    starts: str | None,
) -> None:  # fmt: skip
    emulator.misbehave(Rule(behaviour=behaviour))
    reply = ask(client)
    assert reply.stop_reason == stop_reason
    assert (reply.stop_details is not None) == (stop_reason == "refusal")
    assert reply.content[0].text.startswith(starts) if starts else reply.content == []
    assert len(emulator.bill.charges) == 1


# --- batches --------------------------------------------------------------------------------------


def test_batch_tells_no_progress_until_it_ends(
    emulator: Emulator, client: anthropic.Anthropic
) -> None:
    batch = submit(client, ["a", "b"])
    assert batch.expires_at - batch.created_at == timedelta(hours=24)
    emulator.advance(stage="in_progress", fraction=0.5)
    batch = client.messages.batches.retrieve(batch.id)
    assert (batch.processing_status, counts(batch)) == ("in_progress", {"processing": 2})
    assert (batch.results_url, batch.ended_at) == (None, None)
    with pytest.raises(anthropic.AnthropicError):
        client.messages.batches.results(batch.id)
    emulator.finish()
    batch = client.messages.batches.retrieve(batch.id)
    assert (batch.processing_status, counts(batch)) == ("ended", {"succeeded": 2})
    assert batch.ended_at is not None
    assert batch.created_at <= batch.ended_at <= batch.expires_at
    for each in results(client, batch):
        assert each.result.message.usage.service_tier == "batch"
        jsonschema_rs.validate(SCHEMA, json.loads(each.result.message.content[0].text))
    assert emulator.bill.by_custom_id == {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("requests", "told"),
    [
        ([], "at least 1 item"),
        ([entry("a b")], "String should match pattern"),
        ([entry("x" * 65)], "String should match pattern"),
        ([entry("good"), entry("é")], "requests.1.custom_id"),
        ([entry("a"), entry("a")], "unique"),
        ([{"custom_id": "a"}], "params: Field required"),
        ([{**entry("a"), "method": "POST"}], "Extra inputs"),
        ([entry(str(n)) for n in range(4)], "at most 3 items"),
    ],
)
def test_bad_creation_makes_no_batch(requests: Any, told: str) -> None:
    with Emulator(anthropic=AnthropicLimits(batch_requests=3)) as emulator:
        client = sdk(emulator)
        with pytest.raises(anthropic.BadRequestError) as raised:
            client.messages.batches.create(requests=requests)
        assert told in raised.value.message
        assert client.messages.batches.list().data == []


def test_too_large_batch_is_refused_with_413() -> None:
    with (
        Emulator(anthropic=AnthropicLimits(batch_bytes=500)) as emulator,
        pytest.raises(anthropic.ContentTooLargeError),
    ):
        submit(sdk(emulator), ["a", "b", "c"])


def test_queue_full_refuses_the_creation_until_a_batch_ends() -> None:
    with Emulator(anthropic=AnthropicLimits(queued_requests=2)) as emulator:
        client = sdk(emulator)
        submit(client, ["a", "b"])
        with pytest.raises(anthropic.RateLimitError):
            submit(client, ["c"])
        emulator.finish()
        submit(client, ["c"])


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0},
        {"stream": True},
        {"speed": "fast"},
        {"model": "claude-nope"},
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ],
    ids=str,
)
def test_bad_params_are_found_only_while_processing(
    emulator: Emulator, client: anthropic.Anthropic, bad: dict[str, Any]
) -> None:
    batch = client.messages.batches.create(
        requests=[entry("good"), entry("bad", params("x", **bad))]
    )
    emulator.finish()
    batch = client.messages.batches.retrieve(batch.id)
    assert counts(batch) == {"succeeded": 1, "errored": 1}
    failed = next(each for each in results(client, batch) if each.custom_id == "bad").result
    assert failed.error.type == "error"
    assert failed.error.error.type in ("invalid_request_error", "not_found_error")
    assert failed.error.error.message
    assert list(emulator.bill.by_custom_id) == ["good"]


def test_pages_hold_every_batch_once_newest_first(client: anthropic.Anthropic) -> None:
    batches = client.messages.batches
    made = [submit(client, [f"r{n}"]).id for n in range(5)]
    first = batches.list(limit=2)
    assert [each.id for each in first.data] == [made[4], made[3]]
    assert (first.has_more, first.first_id, first.last_id) == (True, made[4], made[3])
    assert [each.id for each in batches.list(limit=2)] == made[::-1]
    newer = batches.list(limit=2, before_id=made[1])
    assert [each.id for each in newer.data] == [made[3], made[2]]
    assert newer.has_more
    for wrong in ({"limit": 0}, {"limit": 1001}, {"after_id": "msgbatch_nope"}):
        with pytest.raises(anthropic.BadRequestError):
            batches.list(**wrong)
    with pytest.raises(anthropic.NotFoundError):
        batches.retrieve("msgbatch_nope")


def test_canceled_batch_keeps_and_bills_what_was_finished(
    emulator: Emulator, client: anthropic.Anthropic
) -> None:
    batch = submit(client, ["a", "b", "c", "d"])
    emulator.advance(stage="in_progress", fraction=0.5)
    assert client.messages.batches.cancel(batch.id).processing_status == "canceling"
    emulator.finish()
    batch = client.messages.batches.retrieve(batch.id)
    assert batch.processing_status == "ended"
    assert batch.cancel_initiated_at is not None
    assert counts(batch) == {"succeeded": 2, "canceled": 2}
    assert kinds(client, batch) == {
        "a": "succeeded", "b": "succeeded", "c": "canceled", "d": "canceled",
    }  # fmt: skip
    assert sorted(emulator.bill.by_custom_id) == ["a", "b"]
    with pytest.raises(anthropic.BadRequestError):
        client.messages.batches.cancel(batch.id)


def test_batch_is_deleted_only_after_its_end(
    emulator: Emulator, client: anthropic.Anthropic
) -> None:
    batch = submit(client, ["a"])
    with pytest.raises(anthropic.BadRequestError):
        client.messages.batches.delete(batch.id)
    emulator.finish()
    assert client.messages.batches.delete(batch.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(batch.id)


def test_results_vanish_29_days_after_creation(
    emulator: Emulator, client: anthropic.Anthropic
) -> None:
    batch = submit(client, ["a"])
    emulator.finish()
    url = client.messages.batches.retrieve(batch.id).results_url
    assert url is not None
    emulator.advance(29 * 24 * 3600)
    batch = client.messages.batches.retrieve(batch.id)
    assert (batch.results_url, batch.archived_at) == (None, batch.created_at + timedelta(days=29))
    headers = {"authorization": "Bearer x", "anthropic-version": "2026-10-21"}
    assert httpx2.get(url, headers=headers).status_code == 404


# --- misbehaviour of batches ----------------------------------------------------------------------


def test_expired_batch_keeps_and_bills_what_was_finished(
    emulator: Emulator, client: anthropic.Anthropic
) -> None:
    emulator.misbehave(Rule(behaviour="expire", fraction=0.5))
    batch = submit(client, ["a", "b"])
    emulator.advance(24 * 3600)
    batch = client.messages.batches.retrieve(batch.id)
    assert counts(batch) == {"succeeded": 1, "expired": 1}
    assert kinds(client, batch) == {"a": "succeeded", "b": "expired"}
    assert list(emulator.bill.by_custom_id) == ["a"]


def test_lost_creation_reply_leaves_a_batch_that_the_list_shows(
    emulator: Emulator, client: anthropic.Anthropic
) -> None:
    emulator.misbehave(Rule(behaviour="slow", endpoint="anthropic.batches.create", count=1))
    with pytest.raises(anthropic.APITimeoutError):
        submit(client.with_options(timeout=0.3), ["a", "b"])
    [batch] = client.messages.batches.list()
    assert counts(batch) == {"processing": 2}
    emulator.finish()
    assert kinds(client, batch) == {"a": "succeeded", "b": "succeeded"}


def test_results_come_out_of_order_missing_and_twice_on_demand(
    emulator: Emulator, client: anthropic.Anthropic
) -> None:
    emulator.misbehave(
        Rule(behaviour="shuffle"),
        Rule(behaviour="missing", text="row r3"),
        Rule(behaviour="duplicate", custom_id="r5"),
        Rule(behaviour="rejected", custom_id="r7", status=500),
        Rule(behaviour="error_in_output", custom_id="r8"),
    )
    names = [f"r{n}" for n in range(10)]
    batch = submit(client, names)
    emulator.finish()
    got = results(client, batch)
    order = [each.custom_id for each in got]
    assert sorted(order) == sorted([*(name for name in names if name != "r3"), "r5"])
    assert order != sorted(order)
    failed = {each.custom_id: each.result.error.error.type for each in got
              if each.result.type == "errored"}  # fmt: skip
    assert failed == {"r7": "api_error", "r8": "invalid_request_error"}
    assert emulator.bill.by_custom_id == {name: 1 for name in names if name not in ("r7", "r8")}


def test_every_request_fails_on_demand(emulator: Emulator, client: anthropic.Anthropic) -> None:
    emulator.misbehave(Rule(behaviour="errors_only"))
    batch = submit(client, ["a", "b"])
    emulator.finish()
    assert set(kinds(client, batch).values()) == {"errored"}
    assert emulator.bill.charges == []


def test_download_breaks_off_and_is_whole_the_next_time(
    emulator: Emulator, client: anthropic.Anthropic
) -> None:
    batch = submit(client, [f"r{n}" for n in range(20)])
    emulator.finish()
    emulator.misbehave(Rule(behaviour="truncate", endpoint="anthropic.batches.results", count=1))
    with pytest.raises((httpx2.RemoteProtocolError, json.JSONDecodeError)):
        results(client, batch)
    assert len(results(client, batch)) == 20


def test_canceling_never_ends_on_demand(emulator: Emulator, client: anthropic.Anthropic) -> None:
    emulator.misbehave(Rule(behaviour="cancel_hangs"))
    batch = submit(client, ["a"])
    client.messages.batches.cancel(batch.id)
    emulator.advance(23 * 3600)
    assert client.messages.batches.retrieve(batch.id).processing_status == "canceling"
    emulator.advance(3600)
    assert kinds(client, batch) == {"a": "expired"}


def test_slow_reply_is_held_until_released(emulator: Emulator, client: anthropic.Anthropic) -> None:
    emulator.misbehave(Rule(behaviour="slow", count=1))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, client)
        emulator.wait_held()
        assert not waiting.done()
        emulator.release()
        assert waiting.result(timeout=10).stop_reason == "end_turn"


def test_results_url_of_another_origin_is_served_and_shows_what_was_sent_there(
    emulator: Emulator, client: anthropic.Anthropic
) -> None:
    emulator.misbehave(Rule(behaviour="foreign_url"))
    batch = submit(client, ["a"])
    emulator.finish()
    url = client.messages.batches.retrieve(batch.id).results_url
    assert url is not None
    assert url.startswith("http://localhost:")
    assert httpx2.get(url.partition("?")[0]).status_code == 401
    assert httpx2.get(url).status_code == 200
    call = emulator.calls[-1]
    assert (call.operation, call.authorization) == ("anthropic.batches.results", None)
