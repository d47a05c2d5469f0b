"""Anthropic's message batches through its own SDK, against the rehearsal server."""

from __future__ import annotations

import json
import re
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from batchsql.backends import anthropic, anthropic_batch, anthropic_wire, registry
from batchsql.backends.anthropic_wire import LIMITS
from batchsql.backends.batch import (
    BatchBackend,
    BatchFault,
    BatchGoneError,
    BatchState,
    Finding,
    MaybeCreatedError,
    NotCreatedError,
    ProviderBusyError,
    ShardLabel,
    custom_id,
    read_clock,
)
from batchsql.emulate import AnthropicLimits, Emulator, Rule
from batchsql.errors import BackendError, SpecError, SystemicError
from batchsql.types import Call, Completion, FinishReason, Message, ModelRef, Outcome, Request, Role

pytest.importorskip("anthropic")

KEY = "sk-test-0123456789abcdef"
OWN_KEY = "sk-own-key-of-this-machine"
MODEL = ModelRef("anthropic", "claude-haiku-4-5")
SHARD, OTHER = str(uuid.UUID(int=1 << 100)), str(uuid.UUID(int=2 << 100))
CALL = Call(
    MODEL,
    {},
    {
        "type": "object",
        "properties": {"label": {"enum": ["bug", "billing"]}},
        "required": ["label"],
        "additionalProperties": False,
    },
    50,
)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_API_KEY", KEY)
    monkeypatch.setenv("ANTHROPIC_API_KEY", OWN_KEY)


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    with Emulator() as started:
        yield started


def open_backend(base_url: str, **options: Any) -> BatchBackend:
    engine = {"base_url": base_url, "api_key_env": "TEST_API_KEY", **options}
    backend = registry.open_batch_backend(MODEL, engine, Path())
    assert backend is not None
    return backend


@pytest.fixture
def backend(emulator: Emulator) -> Iterator[BatchBackend]:
    opened = open_backend(emulator.anthropic_base_url)
    yield opened
    opened.close()


def ask(number: int, text: str | None = None) -> Request:
    message = Message(Role.USER, text or f"row {number}")
    return Request(f"{number:032x}", (Message(Role.SYSTEM, "Label it."), message))


class Desk:
    """One shard on its way through a backend."""

    def __init__(self, backend: BatchBackend, folder: Path, call: Call = CALL) -> None:
        self.backend, self.folder, self.call = backend, folder, call
        self.seconds = LIMITS.create_seconds

    def label(self, requests: int = 4, shard_id: str = SHARD, **more: Any) -> ShardLabel:
        now = datetime.now(timezone.utc)
        times = {"created_after": now - timedelta(minutes=1), "created_before": now}
        return ShardLabel(shard_id, requests, **{**times, **more})

    def create(
        self, requests: int | list[Request] = 4, shard_id: str = SHARD, end: bytes = b"\n"
    ) -> str:
        asked = [ask(n) for n in range(requests)] if isinstance(requests, int) else requests
        encode = self.backend.encoder(self.call)
        lines = self.folder / "lines.jsonl"
        ids = [custom_id(request.request_key, shard_id) for request in asked]
        each = [encode(name, request) for name, request in zip(ids, asked, strict=True)]
        lines.write_bytes(b"\n".join(each) + end)
        label = self.label(len(asked), shard_id)
        uploaded = self.backend.upload(label, lines, self.call)
        until = read_clock() + self.seconds
        created = self.backend.create(label, lines, uploaded, self.call, until)
        return created.provider_batch_id

    def fetch(self, batch_id: str) -> list[Completion]:
        lines = self.backend.fetch(batch_id, self.folder, self.call)
        return [line.completion for line in lines]


@pytest.fixture
def desk(backend: BatchBackend, tmp_path: Path) -> Desk:
    return Desk(backend, tmp_path)


@contextmanager
def raises(kind: type[BackendError], match: str | None = None) -> Iterator[Any]:
    """Expect an error, and no key in it or in what a traceback shows with it."""
    with pytest.raises(kind, match=match) as caught:
        yield caught
    error: BaseException | None = caught.value
    while error is not None:
        assert KEY not in f"{error!r} {error}"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def operations(emulator: Emulator) -> list[str]:
    return [call.operation.removeprefix("anthropic.batches.") for call in emulator.calls]


# --- the whole life -------------------------------------------------------------------------------


def test_batch_lives_from_creation_to_its_answers(emulator: Emulator, desk: Desk) -> None:
    batch_id = desk.create(4)
    status = desk.backend.poll(batch_id)
    assert (status.state, status.provider_state) == (BatchState.RUNNING, "in_progress")
    assert (status.total, status.ok, status.failed) == (4, None, None)
    emulator.finish()
    status = desk.backend.poll(batch_id)
    assert (status.state, status.provider_state) == (BatchState.COMPLETED, "ended")
    assert (status.total, status.ok, status.failed) == (4, 4, 0)
    assert status.results_until is not None
    left = status.results_until - datetime.now(timezone.utc)
    assert timedelta(days=28, hours=23) < left < timedelta(days=29)
    answers = desk.fetch(batch_id)
    assert [answer.request_key for answer in answers] == [f"{n:032x}" for n in range(4)]
    for answer in answers:
        assert answer.text is not None
        assert json.loads(answer.text)["label"] in ("bug", "billing")
        assert answer.finish_reason is FinishReason.STOP
        assert answer.model_reported == "claude-haiku-4-5-20251001"
        assert answer.usage.input_tokens > 0 and answer.usage.output_tokens > 0
    desk.backend.discard(batch_id, None)
    assert len(desk.fetch(batch_id)) == 4
    assert {charge.route for charge in emulator.bill.charges} == {"batch"}
    assert not emulator.bill.paid_twice


@pytest.mark.parametrize("end", [b"\n", b""])
@pytest.mark.parametrize("chunk_bytes", [7, 1 << 18])
def test_lines_arrive_as_they_were_encoded(
    emulator: Emulator, desk: Desk, monkeypatch: pytest.MonkeyPatch, end: bytes, chunk_bytes: int
) -> None:
    monkeypatch.setattr(anthropic_wire, "_CHUNK_BYTES", chunk_bytes)
    texts = ["a\nb", "c,\r\nd", 'e"} {', "f\u2028g"]
    desk.create([ask(n, text) for n, text in enumerate(texts)], end=end)
    (batch,) = emulator._anthropic.batches()
    sent = [json.loads(each)["params"] for each in batch.requests]
    assert [params["messages"][0]["content"] for params in sent] == texts
    assert all(params["system"] == "Label it." for params in sent)
    fixed = anthropic.fixed_body(CALL)
    assert all(fixed.items() <= params.items() for params in sent)


def test_answers_come_back_in_any_order_twice_and_incomplete(
    emulator: Emulator, desk: Desk
) -> None:
    names = [custom_id(f"{n:032x}", SHARD) for n in range(30)]
    emulator.misbehave(
        Rule(behaviour="shuffle"),
        Rule(behaviour="missing", custom_id=names[3]),
        Rule(behaviour="duplicate", custom_id=names[5]),
    )
    batch_id = desk.create(30)
    emulator.finish()
    keys = [answer.request_key for answer in desk.fetch(batch_id)]
    expected = [int(name[:32], 16) for name in names if name != names[3]] + [5]
    assert sorted(int(key, 16) for key in keys) == sorted(expected)
    assert keys != sorted(keys)


def test_line_separators_within_an_answer_end_no_line(emulator: Emulator, tmp_path: Path) -> None:
    backend = open_backend(emulator.anthropic_base_url)
    enum = ["a\u2028b\u2029c\x85d"]
    schema = {**CALL.schema, "properties": {"label": {"enum": enum}}}
    desk = Desk(backend, tmp_path, replace(CALL, schema=schema))
    batch_id = desk.create(2)
    emulator.finish()
    answers = desk.fetch(batch_id)
    assert [json.loads(a.text or "")["label"] for a in answers] == enum * 2
    backend.close()


def test_finish_reasons_are_those_of_online_answers(emulator: Emulator, desk: Desk) -> None:
    emulator.misbehave(
        Rule(behaviour="refusal", custom_id=custom_id(f"{0:032x}", SHARD)),
        Rule(behaviour="length", custom_id=custom_id(f"{1:032x}", SHARD)),
        Rule(behaviour="too_long", custom_id=custom_id(f"{2:032x}", SHARD)),
    )
    batch_id = desk.create(4)
    emulator.finish()
    answers = desk.fetch(batch_id)
    reasons = [answer.finish_reason for answer in answers]
    assert reasons == [FinishReason.REFUSAL, FinishReason.LENGTH, None, FinishReason.STOP]
    assert answers[2].failure is Outcome.TOO_LONG


# --- creating -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "fault"),
    [
        ("rate_limit", BatchFault.TRANSIENT),
        ("overloaded", BatchFault.TRANSIENT),
        ("queue_full", BatchFault.QUEUE_FULL),
    ],
)
def test_creation_that_is_refused_for_now_made_no_batch(
    emulator: Emulator, desk: Desk, behaviour: str, fault: BatchFault
) -> None:
    emulator.misbehave(Rule(behaviour=behaviour, retry_after=7))
    with raises(NotCreatedError) as caught:
        desk.create()
    assert caught.value.fault is fault
    assert caught.value.retry_after_seconds == (7 if fault is BatchFault.TRANSIENT else None)
    assert operations(emulator) == ["create"]


@pytest.mark.parametrize(
    "behaviour",
    ["server_error", "unavailable", "bad_gateway", "drop", "lost_reply", "truncate"],
)
def test_creation_that_fails_openly_is_not_repeated(
    emulator: Emulator, desk: Desk, behaviour: str
) -> None:
    emulator.misbehave(Rule(behaviour=behaviour))
    with raises(MaybeCreatedError):
        desk.create()
    assert operations(emulator) == ["create"]


@pytest.mark.parametrize("behaviour", ["bad_key", "no_credit", "redirect"])
def test_creation_that_no_batch_survives_is_systemic(
    emulator: Emulator, desk: Desk, behaviour: str
) -> None:
    emulator.misbehave(Rule(behaviour=behaviour))
    with raises(SystemicError, match="anthropic/claude-haiku-4-5"):
        desk.create()
    assert operations(emulator) == ["create"]
    assert not emulator._anthropic.batches()


@pytest.mark.parametrize("limits", [{"batch_bytes": 100}, {"batch_requests": 3}])
def test_batch_above_a_limit_is_too_large(limits: dict[str, int], tmp_path: Path) -> None:
    with Emulator(anthropic=AnthropicLimits(**limits)) as emulator:
        backend = open_backend(emulator.anthropic_base_url)
        with raises(NotCreatedError) as caught:
            Desk(backend, tmp_path).create(4)
        backend.close()
    assert caught.value.fault is BatchFault.TOO_LARGE


def test_batch_that_the_api_calls_malformed_is_systemic(desk: Desk) -> None:
    with raises(SystemicError, match="every batch is refused with status 400: requests"):
        desk.create([ask(1), ask(1)])


def test_unreachable_server_has_no_batch(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listens
        backend = open_backend(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with raises(NotCreatedError) as caught:
            Desk(backend, tmp_path).create()
        backend.close()
    assert caught.value.fault is BatchFault.TRANSIENT


@pytest.mark.parametrize("seconds", [-1.0, LIMITS.create_seconds / 2 - 1])
def test_creation_without_time_is_not_begun(emulator: Emulator, desk: Desk, seconds: float) -> None:
    desk.seconds = seconds
    with raises(NotCreatedError) as caught:
        desk.create()
    assert caught.value.fault is BatchFault.TRANSIENT
    assert operations(emulator) == []


def test_upload_that_runs_out_of_time_sends_no_more(
    emulator: Emulator, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anthropic_wire, "_CHUNK_BYTES", 100)
    times = iter([0.0, 0.0, 1e12])  # the process sleeps after two pieces
    monkeypatch.setattr(anthropic_wire, "read_clock", lambda: next(times))
    with raises(NotCreatedError, match="time"):
        desk.create()
    assert not emulator._anthropic.batches()


# --- finding --------------------------------------------------------------------------------------


def test_batch_whose_reply_came_too_late_is_found_once_it_has_ended(
    emulator: Emulator, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = replace(LIMITS, create_seconds=1.0)
    monkeypatch.setattr(anthropic_batch, "LIMITS", short)
    desk.seconds = 0.8
    emulator.misbehave(Rule(behaviour="slow", count=1))
    with raises(MaybeCreatedError, match="in the time that was left"):
        desk.create(4)
    emulator.release()
    finding = desk.backend.find(desk.label(4))
    (batch,) = emulator._anthropic.batches()
    assert (finding.provider_batch_id, finding.is_sure) == (None, False)
    assert finding.reason is not None and batch.id in finding.reason
    emulator.finish()
    assert desk.backend.find(desk.label(4)) == Finding(batch.id)
    assert operations(emulator).count("create") == 1


def test_nothing_is_found_for_sure_where_nothing_was_created(desk: Desk) -> None:
    assert desk.backend.find(desk.label()) == Finding(is_sure=True)


def test_foreign_batch_of_the_same_size_and_time_is_told_apart_by_its_results(
    emulator: Emulator, desk: Desk
) -> None:
    foreign = desk.create(4, OTHER)
    assert not desk.backend.find(desk.label(4)).is_sure
    assert desk.backend.find(desk.label(4, not_ours=frozenset({foreign}))).is_sure
    assert desk.backend.find(desk.label(5)).is_sure
    emulator.finish()
    assert desk.backend.find(desk.label(4)) == Finding(is_sure=True)
    assert desk.backend.find(desk.label(4, OTHER)) == Finding(foreign)


def test_own_batch_is_found_beside_one_that_is_open(emulator: Emulator, desk: Desk) -> None:
    ours = desk.create(4)
    emulator.finish()
    desk.create(4, OTHER)
    assert desk.backend.find(desk.label(4)) == Finding(ours)


def test_batches_of_another_time_are_no_candidates(emulator: Emulator, desk: Desk) -> None:
    desk.create(4, OTHER)
    now = datetime.now(timezone.utc)
    hour = timedelta(hours=1)
    assert desk.backend.find(desk.label(created_after=now + hour, created_before=None)).is_sure
    assert desk.backend.find(desk.label(created_after=None, created_before=now - hour)).is_sure
    near = timedelta(minutes=14)  # the clocks may differ
    label = desk.label(created_after=now + near, created_before=now + near)
    assert not desk.backend.find(label).is_sure


def test_search_goes_through_all_pages(
    emulator: Emulator, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anthropic_batch, "_PAGE", 2)
    ours = desk.create(4)
    ids = [ours, *(desk.create(n, OTHER) for n in (1, 2, 3, 5))]
    emulator.finish()
    assert desk.backend.find(desk.label(4)) == Finding(ours)
    day_ago = datetime.now(timezone.utc) - timedelta(days=1)
    listed = list(desk.backend.list_batches(day_ago))
    assert [each.provider_batch_id for each in listed] == ids[::-1]
    assert all(each.status.state is BatchState.COMPLETED for each in listed)
    assert not list(desk.backend.list_batches(datetime.now(timezone.utc) + timedelta(days=1)))


def test_search_cannot_decide_while_results_cannot_be_read(emulator: Emulator, desk: Desk) -> None:
    desk.create(4)
    emulator.finish()
    emulator.misbehave(Rule(behaviour="server_error", endpoint="*.results"))
    with raises(ProviderBusyError):
        desk.backend.find(desk.label(4))


# --- the ends of a batch --------------------------------------------------------------------------


def test_expired_batch_gives_what_it_had_and_bills_no_more(emulator: Emulator, desk: Desk) -> None:
    emulator.misbehave(Rule(behaviour="expire", fraction=0.5))
    batch_id = desk.create(4)
    emulator.finish()
    status = desk.backend.poll(batch_id)
    assert (status.state, status.total, status.ok) == (BatchState.EXPIRED, 4, 2)
    answers = desk.fetch(batch_id)
    assert [answer.failure for answer in answers] == [None] * 2 + [Outcome.TRANSIENT] * 2
    assert "not billed" in (answers[3].error or "")
    assert len(emulator.bill.charges) == 2


def test_cancelled_batch_gives_what_it_had(emulator: Emulator, desk: Desk) -> None:
    batch_id = desk.create(4)
    emulator.advance(stage="in_progress", fraction=0.5)
    desk.backend.cancel(batch_id)
    assert desk.backend.poll(batch_id).state is BatchState.CANCELLING
    desk.backend.cancel(batch_id)
    emulator.finish()
    assert desk.backend.poll(batch_id).state is BatchState.CANCELLED
    answers = desk.fetch(batch_id)
    assert [answer.failure for answer in answers] == [None] * 2 + [Outcome.TRANSIENT] * 2
    assert "not billed" in (answers[3].error or "")


def test_batch_that_was_cancelled_before_anything_ran_is_found(
    emulator: Emulator, desk: Desk
) -> None:
    batch_id = desk.create(4)
    desk.backend.cancel(batch_id)
    assert not desk.backend.find(desk.label(4)).is_sure
    emulator.finish()
    assert desk.backend.find(desk.label(4)) == Finding(batch_id)


def test_cancelling_leaves_a_batch_that_has_ended(emulator: Emulator, desk: Desk) -> None:
    batch_id = desk.create(4)
    emulator.finish()
    desk.backend.cancel(batch_id)
    assert desk.backend.poll(batch_id).state is BatchState.COMPLETED
    assert all(answer.failure is None for answer in desk.fetch(batch_id))


def test_cancelling_that_hangs_is_said_to_go_on(emulator: Emulator, desk: Desk) -> None:
    emulator.misbehave(Rule(behaviour="cancel_hangs"))
    batch_id = desk.create(4)
    desk.backend.cancel(batch_id)
    emulator.advance(3600)
    assert desk.backend.poll(batch_id).state is BatchState.CANCELLING
    emulator.advance(24 * 3600)
    assert desk.backend.poll(batch_id).state is BatchState.EXPIRED


def test_batch_that_is_unknown_or_deleted_is_gone(emulator: Emulator, desk: Desk) -> None:
    for call in (desk.backend.poll, desk.backend.cancel, desk.fetch):
        with raises(BatchGoneError):
            call("msgbatch_unknown/../x")
    batch_id = desk.create(4)
    emulator.finish()
    emulator.advance(29 * 24 * 3600)
    with raises(BatchGoneError):
        desk.fetch(batch_id)
    everywhen = desk.label(4, created_after=None, created_before=None)
    assert desk.backend.find(everywhen) == Finding(is_sure=True)


def test_results_before_the_end_are_asked_for_later(desk: Desk) -> None:
    batch_id = desk.create(4)
    with raises(ProviderBusyError):
        desk.fetch(batch_id)


def test_status_that_is_unknown_is_an_error(
    emulator: Emulator, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = desk.create(4)
    served = emulator._anthropic._document
    monkeypatch.setattr(
        emulator._anthropic, "_document", lambda *a: {**served(*a), "processing_status": "paused"}
    )
    with raises(BackendError, match="'paused'"):
        desk.backend.poll(batch_id)


# --- calls that fail ------------------------------------------------------------------------------


def each_call(desk: Desk, operation: str, batch_id: str) -> None:
    if operation == "list":
        desk.backend.find(desk.label(4))
    elif operation == "retrieve":
        desk.backend.poll(batch_id)
    elif operation == "cancel":
        desk.backend.cancel(batch_id)
    else:
        desk.fetch(batch_id)


@pytest.mark.parametrize("operation", ["list", "retrieve", "cancel", "results"])
def test_failing_call_is_busy_or_systemic_and_succeeds_later(
    emulator: Emulator, desk: Desk, operation: str
) -> None:
    batch_id = desk.create(4)
    if operation == "results":
        emulator.finish()
    endpoint = f"anthropic.batches.{operation}"
    busy = ["rate_limit", "server_error", "overloaded", "unavailable", "bad_gateway", "drop",
            "lost_reply", "truncate"]  # fmt: skip
    for behaviour in busy:
        emulator.misbehave(Rule(behaviour=behaviour, endpoint=endpoint, retry_after=7))
        with raises(ProviderBusyError) as caught:
            each_call(desk, operation, batch_id)
        has_time = behaviour in ("rate_limit", "server_error", "overloaded", "unavailable")
        assert caught.value.retry_after_seconds == (7 if has_time else None), behaviour
        emulator.behave()
    for behaviour in ("bad_key", "no_credit", "redirect"):
        emulator.misbehave(Rule(behaviour=behaviour, endpoint=endpoint))
        with raises(SystemicError):
            each_call(desk, operation, batch_id)
        emulator.behave()
    each_call(desk, operation, batch_id)


def test_reply_that_does_not_come_is_given_up(
    emulator: Emulator, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = desk.create(4)
    monkeypatch.setattr(anthropic_batch, "REPLY_SECONDS", 0.2)
    emulator.misbehave(Rule(behaviour="slow"))
    with raises(ProviderBusyError, match="within 0.2 s"):
        desk.backend.poll(batch_id)


def test_download_that_breaks_once_is_begun_again(emulator: Emulator, desk: Desk) -> None:
    batch_id = desk.create(4)
    emulator.finish()
    emulator.misbehave(Rule(behaviour="truncate", endpoint="*.results", count=1))
    assert len(desk.fetch(batch_id)) == 4
    assert operations(emulator).count("results") == 2


def test_results_whose_last_line_is_cut_are_not_taken_for_whole(
    emulator: Emulator, desk: Desk
) -> None:
    batch_id = desk.create(4)
    emulator.finish()
    (batch,) = emulator._anthropic.batches()
    batch.content = (batch.content or b"")[:-20]  # and its length says so
    with raises(ProviderBusyError, match="cut"):
        desk.fetch(batch_id)


# --- single lines ---------------------------------------------------------------------------------


def test_requests_that_the_api_refuses_are_rejected(emulator: Emulator, desk: Desk) -> None:
    emulator.misbehave(Rule(behaviour="errors_only"))
    batch_id = desk.create(4)
    emulator.finish()
    answers = desk.fetch(batch_id)
    assert {answer.failure for answer in answers} == {Outcome.REJECTED}
    assert desk.backend.poll(batch_id).failed == 4


def test_model_that_is_unknown_is_told_by_every_line(emulator: Emulator, tmp_path: Path) -> None:
    backend = open_backend(emulator.anthropic_base_url)
    desk = Desk(backend, tmp_path, replace(CALL, model=ModelRef("anthropic", "claude-none")))
    batch_id = desk.create(2)
    emulator.finish()
    for answer in desk.fetch(batch_id):
        assert answer.failure is Outcome.REJECTED
        assert (answer.error or "").startswith("every request is refused with status 404")
    backend.close()


@pytest.mark.parametrize(
    ("kind", "message", "outcome", "said"),
    [
        ("invalid_request_error", "messages.0: no", Outcome.REJECTED, "status 400"),
        ("invalid_request_error", "max_tokens: no", Outcome.REJECTED, "every request is refused"),
        ("invalid_request_error", "prompt is too long: 9", Outcome.TOO_LONG, "too long"),
        ("request_too_large", "no", Outcome.TOO_LONG, "no"),
        ("api_error", "no", Outcome.TRANSIENT, "no"),
        ("overloaded_error", "no", Outcome.TRANSIENT, "no"),
        ("rate_limit_error", "no", Outcome.TRANSIENT, "no"),
        ("timeout_error", "no", Outcome.TRANSIENT, "no"),
        ("authentication_error", "no", Outcome.REJECTED, "every request is refused"),
        ("billing_error", "no", Outcome.REJECTED, "every request is refused"),
        ("permission_error", "no", Outcome.REJECTED, "every request is refused"),
        ("new_error", f"see {KEY}", Outcome.TRANSIENT, "'new_error': see [key]"),
    ],
)
def test_error_of_a_line_is_classified_as_online(
    kind: str, message: str, outcome: Outcome, said: str
) -> None:
    error = {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}
    name = custom_id("f" * 32, SHARD)
    line = json.dumps({"custom_id": name, "result": {"type": "errored", "error": error}}).encode()
    parsed = anthropic_wire.parse_line(line, lambda text: text.replace(KEY, "[key]"))
    assert (parsed.custom_id, parsed.completion.request_key) == (name, "f" * 32)
    assert parsed.completion.failure is outcome
    assert said in (parsed.completion.error or "")


DEEP = b"[" * 1_000 + b"]" * 1_000
"""What orjson reads and Python's own json does not write."""


@pytest.mark.parametrize(
    ("line", "key", "failure"),
    [
        (b"<html>", "", Outcome.TRANSIENT),
        (b"[" * 100_000, "", Outcome.TRANSIENT),
        (b'{"custom_id": 5, "result": {"type": "expired"}}', "", Outcome.TRANSIENT),
        (b'{"custom_id": "theirs", "result": {"type": "expired"}}', "", Outcome.TRANSIENT),
        (b'{"custom_id": "%(id)b", "result": null}', "f" * 32, Outcome.TRANSIENT),
        (b'{"custom_id": "%(id)b", "result": {"type": "new"}}', "f" * 32, Outcome.REJECTED),
        (b'{"custom_id": "%(id)b", "result": {"type": ' + DEEP + b"}}", "f" * 32,
         Outcome.TRANSIENT),
    ],
    ids=lambda each: repr(each)[:40],
)  # fmt: skip
def test_line_that_cannot_be_read_is_a_failure_of_its_own(
    line: bytes, key: str, failure: Outcome
) -> None:
    name = custom_id("f" * 32, SHARD).encode()
    parsed = anthropic_wire.parse_line(line.replace(b"%(id)b", name), str)
    assert (parsed.completion.request_key, parsed.completion.failure) == (key, failure)


def test_half_of_a_surrogate_pair_spoils_no_line() -> None:
    message = {"content": [{"type": "text", "text": "a\ud83d"}], "stop_reason": "end_turn"}
    line = json.dumps({"custom_id": "x", "result": {"type": "succeeded", "message": message}})
    assert anthropic_wire.parse_line(line.encode(), str).completion.text == "a\ud83d"


# --- the prefix -----------------------------------------------------------------------------------

LONG = "The rules. " * 500
HOUR = {"type": "ephemeral", "ttl": "1h"}


def chat(*messages: tuple[Role, str]) -> Request:
    return Request("f" * 32, tuple(Message(role, text) for role, text in messages))


@pytest.mark.parametrize(
    ("messages", "prefix", "system", "first"),
    [
        (  # the usual case
            [(Role.SYSTEM, LONG), (Role.USER, "row")],
            1,
            [{"type": "text", "text": LONG, "cache_control": HOUR}],
            "row",
        ),
        ([(Role.SYSTEM, LONG), (Role.USER, "row")], 0, LONG, "row"),
        ([(Role.SYSTEM, "short"), (Role.USER, "row")], 1, "short", "row"),
        (  # an example follows the system text
            [(Role.SYSTEM, "s"), (Role.USER, LONG), (Role.ASSISTANT, "ok"), (Role.USER, "row")],
            2,
            "s",
            [{"type": "text", "text": LONG, "cache_control": HOUR}],
        ),
        (  # a system text that varies comes before all other messages
            [(Role.SYSTEM, LONG), (Role.USER, "example"), (Role.SYSTEM, "row"), (Role.USER, "row")],
            2,
            [
                {"type": "text", "text": LONG, "cache_control": HOUR},
                {"type": "text", "text": "\n\nrow"},
            ],
            "example",
        ),
    ],
)
def test_shared_prefix_is_marked_where_it_ends(
    backend: BatchBackend, messages: Any, prefix: int, system: Any, first: Any
) -> None:
    encode = backend.encoder(replace(CALL, prefix_messages=prefix))
    params = json.loads(encode("x", chat(*messages)))["params"]
    assert params["system"] == system
    assert params["messages"][0]["content"] == first


def test_marked_prefix_is_the_same_in_every_request(backend: BatchBackend) -> None:
    encode = backend.encoder(replace(CALL, prefix_messages=1))
    lines = [encode("x", chat((Role.SYSTEM, LONG), (Role.USER, f"row {n}"))) for n in range(3)]
    assert len({re.sub(rb"row \d", b"", line) for line in lines}) == 1


def test_cached_prefix_is_counted_by_kind(emulator: Emulator, tmp_path: Path) -> None:
    backend = open_backend(emulator.anthropic_base_url)
    desk = Desk(backend, tmp_path, replace(CALL, prefix_messages=1))
    rows = [chat((Role.SYSTEM, LONG), (Role.USER, f"row {n}")) for n in range(3)]
    asked = [replace(row, request_key=f"{n:032x}") for n, row in enumerate(rows)]
    batch_id = desk.create(asked)
    emulator.finish()
    first, *rest = (answer.usage for answer in desk.fetch(batch_id))
    assert first.cache_write_1h_tokens == first.cache_write_tokens >= 1024
    assert first.cached_tokens == 0
    for usage in rest:
        assert (usage.cached_tokens, usage.cache_write_tokens) == (first.cache_write_tokens, 0)
        assert usage.input_tokens == first.input_tokens > usage.cached_tokens
    backend.close()


def test_online_requests_mark_their_prefix_for_minutes(emulator: Emulator) -> None:
    engine = {"base_url": emulator.anthropic_base_url, "api_key_env": "TEST_API_KEY"}
    online = registry.open_backend(MODEL, {**engine, "max_concurrency": 1}, Path())
    call = replace(CALL, prefix_messages=1)
    rows = [chat((Role.SYSTEM, LONG), (Role.USER, f"row {n}")) for n in range(2)]
    found = [each for each in online.complete(iter(rows), call, threading.Event()) if each]
    first, second = (completion.usage for completion in found)
    assert (first.cache_write_1h_tokens, first.cached_tokens) == (0, 0)
    assert second.cached_tokens == first.cache_write_tokens >= 1024


# --- keys and places ------------------------------------------------------------------------------


def test_only_the_named_key_leaves(
    emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_CUSTOM_HEADERS", f"x-api-key: {OWN_KEY}")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", OWN_KEY)
    for name, sent in (("TEST_API_KEY", f"Bearer {KEY}"), ("none", None)):
        backend = open_backend(emulator.anthropic_base_url, api_key_env=name)
        desk = Desk(backend, tmp_path)
        if sent:
            desk.create()
        else:
            with raises(SystemicError, match="check the key"):
                desk.create()
        assert emulator.calls[-1].authorization == sent
        backend.close()
    with pytest.raises(SpecError, match=re.escape("engine.api_key_env")):
        registry.open_batch_backend(MODEL, {"base_url": emulator.anthropic_base_url}, Path())


def test_own_origin_gets_the_default_key(
    emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anthropic, "OWN_BASE_URL", emulator.anthropic_base_url)
    backend = registry.open_batch_backend(MODEL, {}, Path())
    assert backend is not None
    Desk(backend, tmp_path).create()
    assert emulator.calls[-1].authorization == f"Bearer {OWN_KEY}"
    assert backend.identity() == {}
    backend.close()


def test_results_at_another_origin_get_no_credentials(emulator: Emulator, desk: Desk) -> None:
    emulator.misbehave(Rule(behaviour="foreign_url"))
    batch_id = desk.create(4)
    emulator.finish()
    assert len(desk.fetch(batch_id)) == 4
    assert desk.backend.find(desk.label(4)) == Finding(batch_id)
    fetched = [call for call in emulator.calls if call.operation.endswith(".results")]
    assert [call.authorization for call in fetched] == [None, None]
    for behaviour in ("bad_key", "server_error", "drop"):
        emulator.misbehave(Rule(behaviour=behaviour, endpoint="*.results"))
        with raises(ProviderBusyError):
            desk.fetch(batch_id)
        emulator.behave()


@pytest.mark.parametrize("behaviour", ["bad_key", "drop"])
def test_results_that_another_origin_keeps_back_are_asked_for_at_our_own(
    emulator: Emulator, desk: Desk, behaviour: str
) -> None:
    emulator.misbehave(Rule(behaviour="foreign_url"))
    batch_id = desk.create(4)
    emulator.finish()
    emulator.misbehave(Rule(behaviour=behaviour, endpoint="*.results", count=1))
    assert len(desk.fetch(batch_id)) == 4
    fetched = [call for call in emulator.calls if call.operation.endswith(".results")]
    assert [call.authorization for call in fetched] == [None, f"Bearer {KEY}"]


def test_redirect_of_results_is_not_followed(emulator: Emulator, desk: Desk) -> None:
    batch_id = desk.create(4)
    emulator.finish()
    emulator.misbehave(Rule(behaviour="redirect", endpoint="*.results"))
    with raises(SystemicError, match="redirects"):
        desk.fetch(batch_id)
    assert operations(emulator).count("results") == 1


def test_key_that_a_server_repeats_is_in_no_error(tmp_path: Path) -> None:
    class Echo(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"] or 0))
            self.do_GET()

        def do_GET(self) -> None:
            status = int(self.path.split("/")[1])
            said = {"error": {"type": "x", "message": f"bad key {self.headers['authorization']}"}}
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            for status in (200, 400, 401, 404, 413, 429, 500):
                backend = open_backend(f"http://127.0.0.1:{server.server_port}/{status}")
                desk = Desk(backend, tmp_path)
                for operation in ("create", "retrieve", "list", "cancel"):
                    with raises(BackendError, match=None if status == 200 else r"\[key\]"):
                        if operation == "create":
                            desk.create()
                        else:
                            each_call(desk, operation, "x")
                backend.close()
        finally:
            server.shutdown()
            thread.join()


def test_account_tells_endpoints_and_keys_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    accounts = {open_backend("http://127.0.0.1:1").account, open_backend("http://h:1").account}
    monkeypatch.setenv("TEST_API_KEY", "another")
    accounts.add(open_backend("http://127.0.0.1:1").account)
    assert len(accounts) == 3
    assert not any(KEY[:8] in account for account in accounts)
    monkeypatch.delenv("TEST_API_KEY")
    with pytest.raises(SystemicError, match="TEST_API_KEY is not set"):
        _ = open_backend("http://127.0.0.1:1").account


def test_identity_and_version_are_those_of_the_online_backend() -> None:
    engine = {"base_url": "http://127.0.0.1:1", "api_key_env": "TEST_API_KEY"}
    online, batch = registry.open_backend(MODEL, engine, Path()), open_backend("http://127.0.0.1:1")
    assert batch.identity() == online.identity() == {"endpoint": "http://127.0.0.1:1"}
    assert batch.version == online.version
