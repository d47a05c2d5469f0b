"""OpenAI's batches through the real SDK, against the rehearsal server and an odd one."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from batchsql.backends import openai, openai_batch, openai_calls, registry
from batchsql.backends.batch import (
    BatchBackend,
    BatchFault,
    BatchGoneError,
    BatchLine,
    BatchState,
    Finding,
    MaybeCreatedError,
    NotCreatedError,
    ProviderBusyError,
    ShardLabel,
    custom_id,
    read_clock,
)
from batchsql.declare.returns import parse_returns
from batchsql.emulate import Emulator, OpenAILimits, Rule
from batchsql.errors import BackendError, SystemicError
from batchsql.types import Call, FinishReason, Message, ModelRef, Outcome, Request, Role
from batchsql.validate.structure import AnswerValidator

pytest.importorskip("openai")

KEY = "sk-test-0123456789abcdef"
OWN_KEY = "sk-own-key-of-this-machine"
MODEL = ModelRef("openai", "gpt-5-mini")
SHARD_ID = "6f1c2a34-9b0d-4e5f-8a7b-0123456789ab"
NOW = datetime(2026, 11, 29, 12, tzinfo=timezone.utc)
RETURNS, _ = parse_returns(
    {"label": {"enum": ["bug", "billing"]}, "note": {"type": "string", "required": False}}
)
CALL = Call(MODEL, {}, RETURNS.object_schema(), 500)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    monkeypatch.setattr(openai_batch, "_DOWNLOAD_PAUSE_SECONDS", 0.0)
    monkeypatch.setenv("TEST_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_API_KEY", OWN_KEY)
    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Secret: s")


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    with Emulator() as started:
        yield started


def opened(base_url: str, **options: Any) -> BatchBackend:
    engine = {"base_url": base_url, "api_key_env": "TEST_API_KEY", **options}
    assert registry.check_model(MODEL, {}, engine) == []
    backend = registry.open_batch_backend(MODEL, engine, Path())
    assert backend is not None
    return backend


@pytest.fixture
def backend(emulator: Emulator) -> Iterator[BatchBackend]:
    made = opened(emulator.openai_base_url)
    yield made
    made.close()


def label(emulator: Emulator | None = None, count: int = 10, **changes: Any) -> ShardLabel:
    """Return the label of a shard that is sent about now."""
    at = NOW if emulator is None else datetime.fromtimestamp(emulator.now(), timezone.utc)
    return dataclasses.replace(ShardLabel(SHARD_ID, count, at, at), **changes)


def in_a_minute() -> float:
    return read_clock() + 60


def write(folder: Path, backend: BatchBackend, count: int = 10, call: Call = CALL) -> Path:
    encode = backend.encoder(call)
    path = folder / "in.jsonl"
    with path.open("wb") as file:
        for number in range(count):
            messages = (Message(Role.SYSTEM, "Label it."), Message(Role.USER, f"row {number}"))
            request = Request(f"{number:032x}", messages)
            file.write(encode(custom_id(request.request_key, SHARD_ID), request) + b"\n")
    return path


def submit(
    emulator: Emulator, backend: BatchBackend, folder: Path, count: int = 10, call: Call = CALL
) -> str:
    lines = write(folder, backend, count, call)
    shard = label(emulator, count)
    uploaded = backend.upload(shard, lines, call)
    return backend.create(shard, lines, uploaded, call, in_a_minute()).provider_batch_id


def fetched(
    backend: BatchBackend, batch_id: str, folder: Path, call: Call = CALL
) -> list[BatchLine]:
    return list(backend.fetch(batch_id, folder, call))


def outcomes(lines: Sequence[BatchLine]) -> Counter[Outcome | None]:
    return Counter(line.completion.failure for line in lines)


def calls(emulator: Emulator, operation: str) -> int:
    return sum(call.operation == f"openai.{operation}" for call in emulator.calls)


# --- a batch's life -------------------------------------------------------------------------------


def test_batch_is_submitted_polled_and_fetched(
    emulator: Emulator, backend: BatchBackend, tmp_path: Path
) -> None:
    lines = write(tmp_path, backend, 25)
    shard = label(emulator, 25)
    uploaded = backend.upload(shard, lines, CALL)
    created = backend.create(shard, lines, uploaded, CALL, in_a_minute())
    batch_id = created.provider_batch_id
    assert backend.find(shard) == Finding(batch_id)
    validating = backend.poll(batch_id)
    assert (validating.state, validating.is_checked) == (BatchState.RUNNING, False)
    emulator.advance(stage="in_progress", fraction=0.4)
    running = backend.poll(batch_id)
    assert (running.state, running.total, running.ok, running.failed, running.is_checked) == (
        BatchState.RUNNING, 25, 10, 0, True,
    )  # fmt: skip
    with pytest.raises(ProviderBusyError, match="in_progress"):
        fetched(backend, batch_id, tmp_path)
    emulator.finish()
    done = backend.poll(batch_id)
    assert (done.state, done.ok, done.failed, done.error) == (BatchState.COMPLETED, 25, 0, None)
    found = fetched(backend, batch_id, tmp_path)
    assert sorted(line.custom_id for line in found) == sorted(
        custom_id(f"{number:032x}", SHARD_ID) for number in range(25)
    )
    for line in found:
        completion = line.completion
        assert line.custom_id.startswith(completion.request_key)
        assert AnswerValidator(RETURNS).check(completion).outcome is Outcome.OK
        assert completion.model_reported == "gpt-5-mini-2025-08-07"
        assert completion.usage.input_tokens > 0 and completion.usage.output_tokens > 0
    assert len(emulator.bill.charges) == 25
    assert not emulator.bill.paid_twice
    assert {call.authorization for call in emulator.calls} == {f"Bearer {KEY}"}


def test_line_holds_the_body_that_is_sent_online(backend: BatchBackend) -> None:
    messages = (Message(Role.SYSTEM, "Be brief."), Message(Role.USER, 'a "b"\n\u2028é'))
    call = Call(MODEL, {"reasoning_effort": "low"}, RETURNS.object_schema(), 77)
    line = backend.encoder(call)("an-id", Request("0" * 32, messages))
    assert b"\n" not in line
    assert json.loads(line) == {
        "custom_id": "an-id",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            **openai.fixed_body(call, is_compatible=False),
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": 'a "b"\n\u2028é'},
            ],
        },
    }


def test_own_origin_gets_the_default_key_and_an_expiry_for_the_input(
    emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai, "OWN_BASE_URL", emulator.openai_base_url)
    backend = registry.open_batch_backend(MODEL, {}, Path())
    assert backend is not None
    assert backend.identity() == {}
    submit(emulator, backend, tmp_path)
    assert {call.authorization for call in emulator.calls} == {f"Bearer {OWN_KEY}"}
    emulator.advance(7 * 24 * 3600 - 60)
    assert input_is_there(emulator)
    emulator.advance(120)
    assert not input_is_there(emulator)


def input_is_there(emulator: Emulator) -> bool:
    import openai as sdk

    with sdk.OpenAI(base_url=emulator.openai_base_url, api_key="x", max_retries=0) as client:
        for file in client.files.list(purpose="batch"):
            try:
                client.files.content(file.id)
            except sdk.NotFoundError:
                return False
            return True
    return False


def test_other_servers_are_not_asked_for_an_expiry(
    emulator: Emulator, backend: BatchBackend, tmp_path: Path
) -> None:
    submit(emulator, backend, tmp_path)
    emulator.advance(8 * 24 * 3600)
    assert input_is_there(emulator)


def test_discard_deletes_the_input_and_never_fails(
    emulator: Emulator, backend: BatchBackend, tmp_path: Path
) -> None:
    shard = label(emulator)
    uploaded = backend.upload(shard, write(tmp_path, backend), CALL)
    assert input_is_there(emulator)
    emulator.misbehave(Rule(behaviour="bad_key", count=1))
    backend.discard("batch_x", uploaded)
    backend.discard("batch_x", None)
    assert input_is_there(emulator)
    backend.discard("batch_x", uploaded)
    backend.discard("batch_x", uploaded)
    assert not input_is_there(emulator)


def test_results_until_is_the_month_after_creation_or_what_the_files_say(
    emulator: Emulator, backend: BatchBackend, tmp_path: Path
) -> None:
    began = datetime.fromtimestamp(int(emulator.now()), timezone.utc)
    batch_id = submit(emulator, backend, tmp_path)
    month = timedelta(days=30)
    until = backend.poll(batch_id).results_until
    assert until is not None and began + month <= until < began + month + timedelta(minutes=1)
    emulator.advance(5 * 3600)  # done by now; its files are younger than the batch
    later = backend.poll(batch_id).results_until
    assert later is not None and later >= until + timedelta(hours=5)


def test_text_with_line_separators_stays_in_its_line(
    emulator: Emulator, backend: BatchBackend, tmp_path: Path
) -> None:
    odd = "a\u2028b\u2029c\u0085d\x1ce"
    returns, _ = parse_returns({"label": {"enum": [odd]}})
    call = Call(MODEL, {}, returns.object_schema(), 500)
    batch_id = submit(emulator, backend, tmp_path, 3, call)
    emulator.finish()
    found = fetched(backend, batch_id, tmp_path, call)
    assert [json.loads(line.completion.text or "") for line in found] == [{"label": odd}] * 3


# --- creating it ----------------------------------------------------------------------------------


@pytest.mark.parametrize("behaviour", ["lost_reply", "truncate"])
def test_batch_whose_reply_was_lost_is_found_again(
    emulator: Emulator, backend: BatchBackend, tmp_path: Path, behaviour: str
) -> None:
    emulator.misbehave(Rule(behaviour=behaviour, endpoint="openai.batches.create"))
    with pytest.raises(MaybeCreatedError):
        submit(emulator, backend, tmp_path)
    assert calls(emulator, "batches.create") == 1
    batch_id = backend.find(label(emulator)).provider_batch_id
    assert batch_id is not None
    emulator.finish()
    assert outcomes(fetched(backend, batch_id, tmp_path)) == {None: 10}


def test_slow_creation_is_given_up_in_time_and_found_again(
    emulator: Emulator, backend: BatchBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = dataclasses.replace(openai_batch._LIMITS, create_seconds=1.0)
    monkeypatch.setattr(openai_batch, "_LIMITS", short)
    shard, lines = label(emulator), write(tmp_path, backend)
    uploaded = backend.upload(shard, lines, CALL)
    emulator.misbehave(Rule(behaviour="slow", endpoint="openai.batches.create"))
    must_end_by = read_clock() + 0.8
    with pytest.raises(MaybeCreatedError, match="no reply came in time"):
        backend.create(shard, lines, uploaded, CALL, must_end_by)
    assert 0 <= read_clock() - must_end_by < 0.5
    assert backend.find(shard).provider_batch_id is not None
    emulator.release()


@pytest.mark.parametrize("left_seconds", [-5.0, 29.0])
def test_creation_without_enough_time_is_not_begun(
    emulator: Emulator, backend: BatchBackend, tmp_path: Path, left_seconds: float
) -> None:
    shard, lines = label(emulator), write(tmp_path, backend)
    uploaded = backend.upload(shard, lines, CALL)
    with pytest.raises(NotCreatedError) as caught:
        backend.create(shard, lines, uploaded, CALL, read_clock() + left_seconds)
    assert caught.value.fault is BatchFault.TRANSIENT
    assert calls(emulator, "batches.create") == 0


def test_process_that_stood_still_while_connecting_sends_nothing_late(
    emulator: Emulator, backend: BatchBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard, lines = label(emulator), write(tmp_path, backend)
    uploaded = backend.upload(shard, lines, CALL)
    before, begun = read_clock(), []

    async def connecting(request: Any) -> None:
        begun.append(request)
        monkeypatch.setattr(openai_calls, "read_clock", lambda: before + 1000)
        await watch(request)

    watch = openai_calls._watch_start
    monkeypatch.setattr(openai_calls, "_watch_start", connecting)
    backend.close()  # so that the next client takes the hook
    with pytest.raises(NotCreatedError):
        backend.create(shard, lines, uploaded, CALL, before + 60)
    assert len(begun) == 1
    assert calls(emulator, "batches.create") == 0


def test_server_that_cannot_be_reached_has_no_batch(tmp_path: Path) -> None:
    with Emulator() as gone:
        url = gone.openai_base_url
    backend = opened(url)
    lines = write(tmp_path, backend)
    with pytest.raises(NotCreatedError) as caught:
        backend.create(label(), lines, "file-1", CALL, in_a_minute())
    assert caught.value.fault is BatchFault.TRANSIENT
    with pytest.raises(ProviderBusyError):
        backend.upload(label(), lines, CALL)
    with pytest.raises(ProviderBusyError):
        backend.find(label())


@pytest.mark.parametrize(
    ("rule", "error", "fault"),
    [
        (Rule(behaviour="rate_limit", retry_after=7), NotCreatedError, BatchFault.TRANSIENT),
        (Rule(behaviour="no_credit"), SystemicError, None),
        (Rule(behaviour="bad_key"), SystemicError, None),
        (Rule(behaviour="redirect"), SystemicError, None),
        (Rule(behaviour="server_error"), MaybeCreatedError, None),
        (Rule(behaviour="unavailable"), MaybeCreatedError, None),
        (Rule(behaviour="overloaded"), MaybeCreatedError, None),
        (Rule(behaviour="bad_gateway"), MaybeCreatedError, None),
        (Rule(behaviour="drop"), MaybeCreatedError, None),
    ],
    ids=lambda value: value.behaviour.value if isinstance(value, Rule) else None,
)
def test_refused_creation_is_sent_once_and_says_whether_there_may_be_a_batch(
    emulator: Emulator,
    backend: BatchBackend,
    tmp_path: Path,
    rule: Rule,
    error: type[BackendError],
    fault: BatchFault | None,
) -> None:
    emulator.misbehave(rule.model_copy(update={"endpoint": "openai.batches.create"}))
    with pytest.raises(error) as caught:
        submit(emulator, backend, tmp_path)
    if isinstance(caught.value, NotCreatedError):
        assert (caught.value.fault, caught.value.retry_after_seconds) == (fault, rule.retry_after)
    assert calls(emulator, "batches.create") == 1
    assert backend.find(label(emulator)) == Finding(is_sure=True)


def test_upload_is_repeated_but_waits_for_nobody_long(
    emulator: Emulator, backend: BatchBackend, tmp_path: Path
) -> None:
    lines, shard = write(tmp_path, backend), label(emulator)
    emulator.misbehave(Rule(behaviour="server_error", count=1), Rule(behaviour="drop", count=1))
    assert backend.upload(shard, lines, CALL)
    assert calls(emulator, "files.create") == 3
    emulator.misbehave(Rule(behaviour="rate_limit", retry_after=60))
    began = time.monotonic()
    with pytest.raises(ProviderBusyError) as caught:
        backend.upload(shard, lines, CALL)
    assert time.monotonic() - began < 5
    assert caught.value.retry_after_seconds == 60
    assert calls(emulator, "files.create") == 4


def test_upload_that_is_too_large_says_so(tmp_path: Path) -> None:
    with Emulator(openai=OpenAILimits(batch_bytes=1000)) as emulator:
        backend = opened(emulator.openai_base_url)
        with pytest.raises(NotCreatedError) as caught:
            backend.upload(label(), write(tmp_path, backend), CALL)
    assert caught.value.fault is BatchFault.TOO_LARGE


# --- calls that fail ------------------------------------------------------------------------------

FREE_CALLS: Mapping[str, tuple[str, Callable[[BatchBackend, str, Path], object]]] = {
    "upload": (
        "files.create",
        lambda backend, batch_id, folder: backend.upload(label(), folder / "in.jsonl", CALL),
    ),
    "find": ("batches.list", lambda backend, batch_id, folder: backend.find(label())),
    "list": (
        "batches.list",
        lambda backend, batch_id, folder: list(backend.list_batches(NOW - timedelta(days=9999))),
    ),
    "poll": ("batches.retrieve", lambda backend, batch_id, folder: backend.poll(batch_id)),
    "fetch": (
        "batches.retrieve",
        lambda backend, batch_id, folder: fetched(backend, batch_id, folder),
    ),
    "download": (
        "files.content",
        lambda backend, batch_id, folder: fetched(backend, batch_id, folder),
    ),
    "cancel": ("batches.cancel", lambda backend, batch_id, folder: backend.cancel(batch_id)),
}


@pytest.mark.parametrize("name", FREE_CALLS)
@pytest.mark.parametrize(
    ("behaviour", "error"),
    [
        ("rate_limit", ProviderBusyError),
        ("server_error", ProviderBusyError),
        ("unavailable", ProviderBusyError),
        ("bad_gateway", ProviderBusyError),
        ("drop", ProviderBusyError),
        ("truncate", ProviderBusyError),
        ("no_credit", SystemicError),
        ("bad_key", SystemicError),
        ("redirect", SystemicError),
    ],
)
def test_failing_call_says_whether_to_come_back_and_works_later(
    emulator: Emulator,
    backend: BatchBackend,
    tmp_path: Path,
    name: str,
    behaviour: str,
    error: type[BackendError],
) -> None:
    operation, begin = FREE_CALLS[name]
    batch_id = submit(emulator, backend, tmp_path)
    emulator.finish()
    emulator.misbehave(Rule(behaviour=behaviour, endpoint=f"openai.{operation}"))
    already = calls(emulator, operation)
    with pytest.raises(error) as caught:
        begin(backend, batch_id, tmp_path)
    assert type(caught.value) is error
    assert caught.value.__context__ is None
    if behaviour == "redirect":
        assert calls(emulator, operation) - already == 1
    emulator.behave()
    begin(backend, batch_id, tmp_path)


def test_download_that_breaks_once_is_begun_again(
    emulator: Emulator, backend: BatchBackend, tmp_path: Path
) -> None:
    batch_id = submit(emulator, backend, tmp_path)
    emulator.finish()
    emulator.misbehave(Rule(behaviour="truncate", endpoint="openai.files.content", count=2))
    assert outcomes(fetched(backend, batch_id, tmp_path)) == {None: 10}


def test_unknown_batch_is_gone_and_so_are_results_after_a_month(
    emulator: Emulator, backend: BatchBackend, tmp_path: Path
) -> None:
    for begin in (backend.poll, backend.cancel):
        with pytest.raises(BatchGoneError):
            begin("batch_nobody_knows")
    batch_id = submit(emulator, backend, tmp_path)
    emulator.finish()
    emulator.advance(31 * 24 * 3600)
    assert backend.poll(batch_id).state is BatchState.COMPLETED
    with pytest.raises(BatchGoneError):
        fetched(backend, batch_id, tmp_path)


# --- how it ends ----------------------------------------------------------------------------------


def test_expired_batch_gives_what_it_had(
    emulator: Emulator, backend: BatchBackend, tmp_path: Path
) -> None:
    emulator.misbehave(Rule(behaviour="expire", fraction=0.3))
    batch_id = submit(emulator, backend, tmp_path)
    emulator.advance(24 * 3600)
    assert backend.poll(batch_id).state is BatchState.EXPIRED
    found = fetched(backend, batch_id, tmp_path)
    assert outcomes(found) == {None: 3, Outcome.TRANSIENT: 7}
    assert len(emulator.bill.charges) == 3
    for line in found:
        if line.completion.failure is not None:
            assert (line.completion.error or "").startswith("expired in the batch, not billed")


def test_cancelled_batch_gives_what_it_had_and_can_be_cancelled_again(
    emulator: Emulator, backend: BatchBackend, tmp_path: Path
) -> None:
    batch_id = submit(emulator, backend, tmp_path)
    emulator.advance(stage="in_progress", fraction=0.5)
    backend.cancel(batch_id)
    assert backend.poll(batch_id).state is BatchState.CANCELLING
    emulator.finish()
    assert backend.poll(batch_id).state is BatchState.CANCELLED
    backend.cancel(batch_id)
    found = fetched(backend, batch_id, tmp_path)
    assert outcomes(found) == {None: 5, Outcome.TRANSIENT: 5}
    assert "cancelled in the batch, not billed" in str([line.completion.error for line in found])


@pytest.mark.parametrize(
    ("rule", "limits", "fault", "said"),
    [
        (Rule(behaviour="fail_validation"), {}, BatchFault.SYSTEMIC, "invalid_json_line, line 1: "),
        (
            Rule(behaviour="fail_validation", code="billing_hard_limit_reached"),
            {}, BatchFault.SYSTEMIC, "billing_hard_limit_reached",
        ),
        (Rule(behaviour="queue_full"), {}, BatchFault.QUEUE_FULL, "token_limit_exceeded"),
        (None, {"enqueued_tokens": 10}, BatchFault.QUEUE_FULL, "token_limit_exceeded"),
        (None, {"batch_requests": 9}, BatchFault.TOO_LARGE, "too_many_tasks"),
    ],
)  # fmt: skip
def test_batch_refused_as_a_whole_says_why(
    tmp_path: Path, rule: Rule | None, limits: dict[str, int], fault: BatchFault, said: str
) -> None:
    with Emulator(openai=OpenAILimits(**limits), rules=[rule] if rule else []) as emulator:
        backend = opened(emulator.openai_base_url)
        batch_id = submit(emulator, backend, tmp_path)
        emulator.finish()
        status = backend.poll(batch_id)
        assert (status.state, status.fault) == (BatchState.FAILED, fault)
        assert said in (status.error or "")
        assert fetched(backend, batch_id, tmp_path) == []
        assert emulator.bill.charges == []


def test_batch_with_an_error_file_only_is_read(
    emulator: Emulator, backend: BatchBackend, tmp_path: Path
) -> None:
    emulator.misbehave(Rule(behaviour="errors_only"))
    batch_id = submit(emulator, backend, tmp_path)
    emulator.finish()
    status = backend.poll(batch_id)
    assert (status.state, status.ok, status.failed) == (BatchState.COMPLETED, 0, 10)
    assert outcomes(fetched(backend, batch_id, tmp_path)) == {Outcome.REJECTED: 10}


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        (Rule(behaviour="refusal", count=4), {FinishReason.REFUSAL: 4, FinishReason.STOP: 6}),
        (Rule(behaviour="length", count=4), {FinishReason.LENGTH: 4, FinishReason.STOP: 6}),
        (
            Rule(behaviour="content_filter", count=4),
            {FinishReason.CONTENT_FILTER: 4, FinishReason.STOP: 6},
        ),
        (Rule(behaviour="empty", count=4), {FinishReason.STOP: 10}),
        (Rule(behaviour="rejected", count=4), {Outcome.REJECTED: 4, FinishReason.STOP: 6}),
        (Rule(behaviour="rejected", status=429), {Outcome.TRANSIENT: 10}),
        (Rule(behaviour="rejected", status=503), {Outcome.TRANSIENT: 10}),
        (Rule(behaviour="rejected", status=401), {Outcome.REJECTED: 10}),
        (Rule(behaviour="too_long", count=4), {Outcome.TOO_LONG: 4, FinishReason.STOP: 6}),
        (Rule(behaviour="error_in_output", count=4), {Outcome.REJECTED: 4, FinishReason.STOP: 6}),
        (Rule(behaviour="error_in_output", status=500), {Outcome.TRANSIENT: 10}),
        (Rule(behaviour="missing", count=4), {FinishReason.STOP: 6}),
        (Rule(behaviour="duplicate", count=4), {FinishReason.STOP: 14}),
        (Rule(behaviour="shuffle"), {FinishReason.STOP: 10}),
    ],
    ids=lambda value: f"{value.behaviour.value}-{value.status}" if isinstance(value, Rule) else "",
)
def test_lines_say_what_became_of_each_request(
    emulator: Emulator, backend: BatchBackend, tmp_path: Path, rule: Rule, found: Mapping[Any, int]
) -> None:
    emulator.misbehave(rule)
    batch_id = submit(emulator, backend, tmp_path)
    emulator.finish()
    lines = fetched(backend, batch_id, tmp_path)
    completions = [line.completion for line in lines]
    assert Counter(each.failure or each.finish_reason for each in completions) == found
    assert all((each.failure is None) == (each.text is not None) for each in completions)
    assert all((each.failure is None) == (each.error is None) for each in completions)
    assert all(line.custom_id[:32] == line.completion.request_key for line in lines)


# --- servers that do otherwise --------------------------------------------------------------------


class Host:
    """Gives the replies that are written down, by method and path, and keeps the headers it saw."""

    def __init__(self) -> None:
        self.replies: dict[str, tuple[int, Any]] = {}
        self.default: tuple[int, Any] = (404, {"error": {"message": "no", "type": "not_found"}})
        self.seen: list[tuple[str, Mapping[str, str]]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                name = f"{self.command} {self.path}"
                outer.seen.append((name, headers))
                status, body = outer.replies.get(name, outer.default)
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_DELETE = handle_any  # noqa: N815

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def host() -> Iterator[Host]:
    started = Host()
    yield started
    started.close()


def document(**changes: Any) -> dict[str, Any]:
    at = int(NOW.timestamp())
    return {
        "id": "batch_1",
        "object": "batch",
        "status": "in_progress",
        "created_at": at,
        **changes,
    }


def fault(message: str = "no", code: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"error": {"message": message, "type": "some_error", "code": code, **fields}}


@pytest.mark.parametrize(
    ("status", "body", "error", "expected"),
    [
        (429, fault(code="token_limit_exceeded"), NotCreatedError, BatchFault.QUEUE_FULL),
        (429, fault("Enqueued token limit reached"), NotCreatedError, BatchFault.QUEUE_FULL),
        (429, fault("Too many requests"), NotCreatedError, BatchFault.TRANSIENT),
        (409, fault(), NotCreatedError, BatchFault.TRANSIENT),
        (413, fault(), NotCreatedError, BatchFault.TOO_LARGE),
        (404, fault("No such File object: file-1"), NotCreatedError, BatchFault.TRANSIENT),
        (400, fault("bad window", param="completion_window"), SystemicError, None),
        (400, fault("limit", code="billing_hard_limit_reached"), SystemicError, None),
        (402, fault(), SystemicError, None),
        (403, fault(), SystemicError, None),
        (404, fault(), SystemicError, None),
        (408, fault(), MaybeCreatedError, None),
        (500, b"", MaybeCreatedError, None),
        (200, b"<html>", MaybeCreatedError, None),
        (200, b"", MaybeCreatedError, None),
        (200, [], MaybeCreatedError, None),
        (200, {"status": "validating"}, MaybeCreatedError, None),
    ],
)
def test_reply_to_a_creation_decides_what_is_known(
    host: Host,
    tmp_path: Path,
    status: int,
    body: Any,
    error: type[BackendError],
    expected: BatchFault | None,
) -> None:
    host.replies["POST /v1/batches"] = (status, body)
    backend = opened(host.url + "/v1")
    with pytest.raises(error) as caught:
        backend.create(label(), write(tmp_path, backend), "file-1", CALL, in_a_minute())
    assert type(caught.value) is error
    assert getattr(caught.value, "fault", None) is expected
    assert len(host.seen) == 1


def test_created_batch_counts_whatever_its_status(host: Host, tmp_path: Path) -> None:
    host.replies["POST /v1/batches"] = (200, document(status="pondering"))
    backend = opened(host.url + "/v1")
    created = backend.create(label(), write(tmp_path, backend), "file-1", CALL, in_a_minute())
    assert (created.provider_batch_id, created.results_until) == (
        "batch_1", NOW + timedelta(days=30),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "is_own", "is_sure"),
    [
        ({"metadata": {"batchsql_shard": "f" * 32}}, False, True),
        ({"metadata": None, "request_counts": {"total": 10}}, False, False),
        ({"metadata": {}, "request_counts": {"total": 0}}, False, False),
        ({}, False, False),
        ({"request_counts": {"total": 11}}, False, True),
        ({"created_at": int(NOW.timestamp()) + 1000}, False, True),
        ({"created_at": "2026-11-29T12:00:01Z"}, False, False),
        ({"id": "batch_other"}, False, True),
        ({}, True, True),
    ],
)
def test_absence_is_sure_where_marks_are_kept(
    host: Host,
    monkeypatch: pytest.MonkeyPatch,
    batch: dict[str, Any],
    is_own: bool,
    is_sure: bool,
) -> None:
    if is_own:
        monkeypatch.setattr(openai, "OWN_BASE_URL", host.url + "/v1")
    host.default = (200, {"object": "list", "data": [document(**batch)], "has_more": False})
    finding = opened(host.url + "/v1").find(label(not_ours=frozenset({"batch_other"})))
    assert (finding.provider_batch_id, finding.is_sure) == (None, is_sure)
    assert (finding.reason is None) is is_sure


def test_search_goes_through_the_pages_back_to_the_creation(host: Host) -> None:
    at = int(NOW.timestamp())
    mark = {"batchsql_shard": label().hex}
    pages = [
        [document(id="b6", created_at=at + 9000), document(id="b5", created_at=at + 8000)],
        [document(id="b4", created_at=at + 10), document(id="b3", created_at=at - 1000)],
        [document(id="b2", created_at=at - 5000), document(id="b1", created_at=at - 6000)],
    ]
    for page, after in zip(pages, ("", "&after=b5", "&after=b3"), strict=True):
        body = {"data": page, "has_more": True}
        host.replies[f"GET /v1/batches?limit=100{after}"] = (200, body)
    backend = opened(host.url + "/v1")
    backend.find(label())
    assert len(host.seen) == 3, "the third page is older than the shard"
    pages[1][0]["metadata"] = mark
    assert backend.find(label()).provider_batch_id == "b4"
    assert backend.find(label(created_after=None)).provider_batch_id == "b4"
    found = list(backend.list_batches(NOW))
    assert [(each.provider_batch_id, each.shard_hex) for each in found] == [
        ("b6", None),
        ("b5", None),
        ("b4", label().hex),
    ]
    assert found[2].created_at == NOW + timedelta(seconds=10)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"status": "VALIDATING"}, BatchState.RUNNING),
        ({"status": "PROGRESS"}, BatchState.RUNNING),
        ({"status": "IN_PROGRESS"}, BatchState.RUNNING),
        ({"status": "CANCELLING"}, BatchState.CANCELLING),
        ({"status": "COMPLETED"}, BatchState.COMPLETED),
        ({"status": "canceled"}, BatchState.CANCELLED),
        ({"status": "FAILED"}, BatchState.FAILED),
        ({"status": "failed", "output_file_id": "file-1"}, BatchState.EXPIRED),
    ],
)
def test_status_is_read_in_any_case(host: Host, changes: Any, state: BatchState) -> None:
    host.replies["GET /v1/batches/batch_1"] = (200, document(**changes))
    status = opened(host.url + "/v1").poll("batch_1")
    assert (status.state, status.provider_state) == (state, changes["status"])
    assert (status.fault is BatchFault.TRANSIENT) is (state is BatchState.FAILED)


def test_unknown_status_is_an_error_that_names_it(host: Host) -> None:
    host.replies["GET /v1/batches/batch_1"] = (200, document(status="pondering"))
    with pytest.raises(BackendError, match="'pondering'"):
        opened(host.url + "/v1").poll("batch_1")


def test_many_errors_of_a_batch_are_told_in_short(host: Host) -> None:
    data = [{"code": "invalid_json_line", "line": n, "message": "bad"} for n in range(1, 6)]
    host.replies["GET /v1/batches/batch_1"] = (
        200,
        document(status="failed", errors={"data": data}),
    )
    assert opened(host.url + "/v1").poll("batch_1").error == (
        "invalid_json_line, line 1: bad; invalid_json_line, line 2: bad; "
        "invalid_json_line, line 3: bad; and 2 more"
    )


def test_page_of_a_proxy_does_not_make_a_batch_gone(host: Host, tmp_path: Path) -> None:
    host.default = (404, b"<html>not found</html>")
    backend = opened(host.url + "/v1")
    for begin in (backend.poll, backend.cancel):
        with pytest.raises(SystemicError):
            begin("batch_1")


def test_paid_answers_without_a_file_are_waited_for(host: Host, tmp_path: Path) -> None:
    counts = {"total": 3, "completed": 2, "failed": 1}
    done = document(status="completed", output_file_id=None, error_file_id=None)
    host.replies["GET /v1/batches/batch_1"] = (200, {**done, "request_counts": counts})
    backend = opened(host.url + "/v1")
    with pytest.raises(ProviderBusyError, match="2 answers"):
        fetched(backend, "batch_1", tmp_path)
    host.replies["GET /v1/batches/batch_1"] = (200, {**done, "request_counts": {"total": 3}})
    assert fetched(backend, "batch_1", tmp_path) == []


@pytest.mark.parametrize(("there", "keys"), [("output", ["a"]), ("error", None), ("", None)])
def test_answers_are_taken_without_the_file_of_errors_and_not_the_other_way_round(
    host: Host, tmp_path: Path, there: str, keys: list[str] | None
) -> None:
    files = {"output_file_id": "file-output", "error_file_id": "file-error"}
    host.replies["GET /v1/batches/batch_1"] = (200, document(status="completed", **files))
    host.replies[f"GET /v1/files/file-{there}/content"] = (200, b'{"custom_id":"a"}')
    backend = opened(host.url + "/v1")
    if keys is None:
        with pytest.raises(BatchGoneError):
            backend.fetch("batch_1", tmp_path, CALL)
    else:
        assert [line.custom_id for line in fetched(backend, "batch_1", tmp_path)] == keys


@pytest.mark.parametrize(
    ("content", "keys"),
    [
        (b'{"custom_id":"a"}', ["a"]),
        (b'{"custom_id":"a\\ud800"}', ["a\ud800"]),
        (b'{"custom_id":"a"}\n', ["a"]),
        (b'{"custom_id":"a"}\n\r\n  \n{"custom_id":"b"}\r\n', ["a", "b"]),
        (b'{"custom_id":"a"}\n{"custom_id', None),
        (b'{"custom_id":"a"}\n{"custom_id\n{"custom_id":"b"}\n', ["a", "", "b"]),
        (b"", []),
    ],
)
def test_download_with_a_torn_end_is_not_taken(
    host: Host, tmp_path: Path, content: bytes, keys: list[str] | None
) -> None:
    host.replies["GET /v1/batches/batch_1"] = (
        200, document(status="completed", output_file_id="file-1"),
    )  # fmt: skip
    host.replies["GET /v1/files/file-1/content"] = (200, content)
    backend = opened(host.url + "/v1")
    if keys is None:
        with pytest.raises(ProviderBusyError, match="cut off"):
            backend.fetch("batch_1", tmp_path, CALL)
    else:
        assert [line.custom_id for line in fetched(backend, "batch_1", tmp_path)] == keys


def use_everything(backend: BatchBackend, folder: Path) -> None:
    """Make every call there is; none of them need succeed."""
    lines = write(folder, backend)
    for begin in (
        lambda: backend.upload(label(), lines, CALL),
        lambda: backend.create(label(), lines, "file-1", CALL, in_a_minute()),
        lambda: backend.find(label()),
        lambda: list(backend.list_batches(NOW)),
        lambda: backend.poll("batch_1"),
        lambda: fetched(backend, "batch_1", folder),
        lambda: backend.cancel("batch_1"),
        lambda: backend.discard("batch_1", "file-1"),
    ):
        try:
            begin()
        except BackendError as error:
            shown = f"{error!r} {error.__context__!r} {error.__cause__!r}"
            assert KEY not in shown and "sk-" not in shown


@pytest.mark.parametrize("key_env", ["TEST_API_KEY", "none"])
def test_other_origins_get_neither_the_default_key_nor_headers_of_the_environment(
    host: Host, tmp_path: Path, key_env: str
) -> None:
    host.default = (200, document(status="completed", output_file_id="file-1"))
    use_everything(opened(host.url + "/v1", api_key_env=key_env), tmp_path)
    assert len({name for name, _ in host.seen}) == 8
    names = {"accept", "accept-encoding", "connection", "content-length", "content-type"}
    names |= {"host", "user-agent"} | ({"authorization"} if key_env == "TEST_API_KEY" else set())
    for _, headers in host.seen:
        assert set(headers) <= names
        assert headers.get("authorization") == (f"Bearer {KEY}" if len(names) == 8 else None)


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500])
def test_no_message_holds_the_key(host: Host, tmp_path: Path, status: int) -> None:
    host.default = (status, fault(f"Incorrect API key: {KEY}, or sk-test*****cdef"))
    use_everything(opened(host.url + "/v1"), tmp_path)


def test_no_completion_and_no_status_holds_the_key(host: Host, tmp_path: Path) -> None:
    errors = {"data": [{"code": "x", "message": f"key {KEY}"}]}
    host.replies["GET /v1/batches/batch_1"] = (200, document(status="failed", errors=errors))
    backend = opened(host.url + "/v1")
    assert backend.poll("batch_1").error == "x: key [key]"
    response = {"status_code": 401, "body": fault(f"Incorrect API key: {KEY}")}
    content = json.dumps({"custom_id": "a", "response": response}).encode()
    host.replies["GET /v1/batches/batch_1"] = (
        200, document(status="completed", error_file_id="file-1"),
    )  # fmt: skip
    host.replies["GET /v1/files/file-1/content"] = (200, content)
    (line,) = fetched(backend, "batch_1", tmp_path)
    assert "[key]" in (line.completion.error or "")
    assert KEY not in (line.completion.error or "")


# --- opening it -----------------------------------------------------------------------------------


def test_compatible_server_has_batches_when_it_is_said_to(
    emulator: Emulator, tmp_path: Path
) -> None:
    model = ModelRef("openai_compatible", "gpt-4o-mini")
    engine = {"base_url": emulator.openai_base_url, "api_key_env": "TEST_API_KEY"}
    assert registry.open_batch_backend(model, engine, Path()) is None
    assert registry.open_batch_backend(model, {**engine, "batches": False}, Path()) is None
    engine["batches"] = True  # type: ignore[assignment]
    assert registry.check_model(model, {}, engine) == []
    backend = registry.open_batch_backend(model, engine, Path())
    assert backend is not None
    assert backend.identity() == {"endpoint": emulator.openai_base_url}
    assert registry.open_backend(model, engine, Path()).identity() == backend.identity()
    # As it takes what any server takes: no strict dialect of OpenAI, and max_tokens.
    returns, _ = parse_returns({"label": {"enum": ["bug"]}})
    call = Call(model, {}, returns.object_schema(), 500)
    batch_id = submit(emulator, backend, tmp_path, 3, call)
    emulator.finish()
    found = fetched(backend, batch_id, tmp_path, call)
    assert [line.completion.text for line in found] == ['{"label":"bug"}'] * 3
    assert '"max_tokens":500' in (tmp_path / "in.jsonl").read_text()


@pytest.mark.parametrize(
    ("provider", "engine", "where"),
    [
        ("openai_compatible", {"base_url": "http://h/v1", "batches": "yes"}, "engine.batches"),
        ("openai_compatible", {"batches": True}, "engine.base_url"),
        ("openai", {"batches": True}, "engine.batches"),
        ("openai", {"base_url": "http://h/v1"}, "engine.api_key_env"),
    ],
)
def test_wrong_option_is_a_mistake(provider: str, engine: dict[str, Any], where: str) -> None:
    mistakes = registry.check_model(ModelRef(provider, "m"), {}, engine)
    assert [mistake.where for mistake in mistakes] == [where]


def test_account_tells_endpoints_and_keys_apart_and_needs_a_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = opened("http://a/v1")
    accounts = {first.account, opened("http://b/v1").account}
    monkeypatch.setenv("TEST_API_KEY", "another")
    accounts.add(first.account)
    assert len(accounts) == 3
    assert opened("http://a/v1").account == first.account
    monkeypatch.delenv("TEST_API_KEY")
    with pytest.raises(SystemicError, match="TEST_API_KEY"):
        _ = first.account
    with pytest.raises(SystemicError, match="TEST_API_KEY"):
        first.poll("batch_1")
