"""Gemini's batches through Google's own SDK, against the rehearsal server."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import httpx2
import pytest

from batchsql.backends import google_batch, google_wire, registry
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
from batchsql.backends.google_batch import LIMITS, GoogleBatch
from batchsql.backends.online import ErrorReply
from batchsql.emulate import Emulator, GoogleLimits, Rule
from batchsql.errors import BackendError, SystemicError
from batchsql.types import Call, FinishReason, Message, ModelRef, Outcome, Request, Role

pytest.importorskip("google.genai")

KEY = "sk-test-0123456789abcdef"
MODEL = ModelRef("google", "gemini-2.5-flash")
SHARD, OTHER = str(uuid.UUID(int=1 << 100)), str(uuid.UUID(int=2 << 100))
DAY = 24 * 3600


def a_call(label: str = "bug", model: ModelRef = MODEL) -> Call:
    schema = {
        "type": "object",
        "properties": {"label": {"type": "string", "enum": [label]}},
        "required": ["label"],
        "additionalProperties": False,
    }
    return Call(model, {}, schema, 50)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_API_KEY", KEY)
    monkeypatch.setenv("GEMINI_API_KEY", "sk-own-key-of-this-machine")


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    with Emulator() as started:
        yield started


def open_backend(base_url: str, model: ModelRef = MODEL, **options: Any) -> GoogleBatch:
    engine = {"base_url": base_url, "api_key_env": "TEST_API_KEY", **options}
    backend = registry.open_batch_backend(model, engine, Path())
    assert isinstance(backend, GoogleBatch)
    return backend


@pytest.fixture
def backend(emulator: Emulator) -> Iterator[GoogleBatch]:
    opened = open_backend(emulator.google_base_url)
    yield opened
    opened.close()


@pytest.fixture(params=["inline", "file"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the input travel in the creation call or as a file."""
    if request.param == "file":
        monkeypatch.setattr(google_batch, "INLINE_BYTES", 0)
    return str(request.param)


def ask(number: int, text: str | None = None) -> Request:
    message = Message(Role.USER, text or f"row {number}")
    return Request(f"{number:032x}", (Message(Role.SYSTEM, "Label it."), message))


class Desk:
    """One shard on its way through a backend."""

    def __init__(self, backend: BatchBackend, folder: Path) -> None:
        self.backend, self.folder = backend, folder
        self.seconds = LIMITS.create_seconds
        self.uploaded: str | None = None

    def label(self, shard_id: str = SHARD, **more: Any) -> ShardLabel:
        now = datetime.now(timezone.utc)
        times = {"created_after": now - timedelta(minutes=1), "created_before": now}
        return ShardLabel(shard_id, 4, **{**times, **more})

    def create(
        self, requests: int | list[Request] = 4, shard_id: str = SHARD, call: Call | None = None
    ) -> str:
        call = call or a_call()
        asked = [ask(n) for n in range(requests)] if isinstance(requests, int) else requests
        encode = self.backend.encoder(call)
        lines = self.folder / "lines.jsonl"
        with lines.open("wb") as file:
            for request in asked:
                file.write(encode(custom_id(request.request_key, shard_id), request) + b"\n")
        label = self.label(shard_id)
        self.uploaded = self.backend.upload(label, lines, call)
        until = read_clock() + self.seconds
        return self.backend.create(label, lines, self.uploaded, call, until).provider_batch_id

    def fetch(self, batch_id: str) -> list[BatchLine]:
        return list(self.backend.fetch(batch_id, self.folder, a_call()))


@pytest.fixture
def desk(backend: GoogleBatch, tmp_path: Path) -> Desk:
    return Desk(backend, tmp_path)


@contextmanager
def raises(kind: type[BackendError], match: str | None = None) -> Iterator[Any]:
    """Expect an error, and no key in it or in what a traceback shows with it."""
    with pytest.raises(kind, match=match) as caught:
        yield caught
    error: BaseException | None = caught.value
    while error is not None:
        assert KEY not in f"{error!r} {error}"
        error = error.__cause__ or error.__context__


def operations(emulator: Emulator) -> list[str]:
    return [call.operation.removeprefix("google.") for call in emulator.calls]


# --- the whole life -------------------------------------------------------------------------------


def test_batch_lives_from_creation_to_its_answers(emulator: Emulator, desk: Desk, way: str) -> None:
    batch_id = desk.create(4)
    status = desk.backend.poll(batch_id)
    assert (status.state, status.provider_state) == (BatchState.RUNNING, "BATCH_STATE_PENDING")
    assert (status.total, status.results_until) == (4, None)
    emulator.finish()
    status = desk.backend.poll(batch_id)
    assert (status.state, status.total, status.ok, status.failed) == (BatchState.COMPLETED, 4, 4, 0)
    assert status.results_until is not None
    left = status.results_until - datetime.now(timezone.utc)
    assert timedelta(hours=47) < left <= timedelta(hours=48)
    lines = desk.fetch(batch_id)
    keys = [f"{n:032x}" for n in range(4)]
    assert sorted(line.completion.request_key for line in lines) == keys
    assert {line.custom_id for line in lines} == {custom_id(key, SHARD) for key in keys}
    assert {line.completion.text for line in lines} == {'{"label":"bug"}'}
    assert {line.completion.finish_reason for line in lines} == {FinishReason.STOP}
    assert {line.completion.model_reported for line in lines} == {MODEL.name}
    assert all(line.completion.usage.input_tokens > 0 for line in lines)
    assert emulator.bill.by_custom_id == {custom_id(key, SHARD): 1 for key in keys}
    uploads = [name for name in operations(emulator) if name == "files.upload"]
    assert len(uploads) == {"inline": 0, "file": 2}[way]
    assert operations(emulator).count("batches.create") == 1


def test_input_file_is_deleted_when_it_is_discarded(
    emulator: Emulator, desk: Desk, way: str
) -> None:
    batch_id = desk.create()
    desk.backend.discard(batch_id, desk.uploaded)
    if way == "inline":
        assert desk.uploaded is None
        return
    assert operations(emulator)[-1] == "files.delete"
    url = f"{emulator.google_base_url}/v1/{desk.uploaded}"
    assert httpx2.get(url, headers={"x-goog-api-key": "x"}).status_code == 403
    desk.backend.discard(batch_id, desk.uploaded)  # best effort


def test_line_separators_of_unicode_stay_inside_a_line(
    emulator: Emulator, desk: Desk, way: str
) -> None:
    label = "a\u2028b\u2029c\x85d"
    batch_id = desk.create([ask(1, label), ask(2)], call=a_call(label))
    emulator.finish()
    assert [line.completion.text for line in desk.fetch(batch_id)] == [
        json.dumps({"label": label}, ensure_ascii=False, separators=(",", ":"))
    ] * 2


def test_schema_goes_without_what_gemini_ignores(backend: GoogleBatch) -> None:
    call = replace(
        a_call(), schema={"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}
    )
    line = json.loads(backend.encoder(call)("id", ask(1)))
    schema = line["request"]["generationConfig"]["responseJsonSchema"]
    assert schema["properties"]["a"] == {"type": "string", "description": "maxLength: 3"}
    assert line["key"] == "id"


# --- creating -------------------------------------------------------------------------------------


@pytest.mark.parametrize("behaviour", ["lost_reply", "slow"])
def test_batch_whose_reply_was_lost_is_found_by_its_name(
    emulator: Emulator, desk: Desk, monkeypatch: pytest.MonkeyPatch, behaviour: str
) -> None:
    desk.create(shard_id=OTHER)
    monkeypatch.setattr(google_batch, "LIMITS", replace(LIMITS, create_seconds=1.5))
    desk.seconds = 1.5
    emulator.misbehave(Rule(behaviour=behaviour, endpoint="google.batches.create", count=1))
    with raises(MaybeCreatedError):
        desk.create()
    found = desk.backend.find(desk.label())
    assert found.provider_batch_id is not None
    listed = {
        batch.provider_batch_id: batch.shard_hex
        for batch in desk.backend.list_batches(datetime.now(timezone.utc) - timedelta(hours=1))
    }
    assert listed[found.provider_batch_id] == SHARD.replace("-", "")
    assert len(listed) == 2, "the call was made once"
    emulator.release()
    emulator.finish()
    assert len(desk.fetch(found.provider_batch_id)) == 4


@pytest.mark.parametrize("behaviour", ["server_error", "unavailable", "bad_gateway", "drop"])
def test_creation_that_failed_at_the_provider_may_have_made_a_batch(
    emulator: Emulator, desk: Desk, behaviour: str
) -> None:
    emulator.misbehave(Rule(behaviour=behaviour, endpoint="google.batches.create"))
    with raises(MaybeCreatedError):
        desk.create()
    emulator.behave()
    assert operations(emulator).count("batches.create") == 1
    assert desk.backend.find(desk.label()) == Finding(is_sure=True)


@pytest.mark.parametrize("seconds", [-1.0, LIMITS.create_seconds / 2 - 1])
def test_creation_is_not_begun_when_too_little_time_is_left(
    emulator: Emulator, desk: Desk, seconds: float
) -> None:
    desk.seconds = seconds
    with raises(NotCreatedError) as caught:
        desk.create()
    assert caught.value.fault is BatchFault.TRANSIENT
    assert "batches.create" not in operations(emulator)


def test_creation_without_a_server_surely_made_nothing(tmp_path: Path) -> None:
    with Emulator() as gone:
        url = gone.google_base_url
    with raises(NotCreatedError) as caught:
        Desk(open_backend(url), tmp_path).create()
    assert caught.value.fault is BatchFault.TRANSIENT


@pytest.mark.parametrize(
    ("rule", "fault", "seconds"),
    [
        (Rule(behaviour="queue_full"), BatchFault.QUEUE_FULL, None),
        (Rule(behaviour="rate_limit", retry_after=7), BatchFault.TRANSIENT, 7.0),
        (Rule(behaviour="rate_limit"), BatchFault.QUEUE_FULL, None),
    ],
)
def test_refusal_of_a_batch_says_what_helps(
    emulator: Emulator, desk: Desk, rule: Rule, fault: BatchFault, seconds: float | None
) -> None:
    emulator.misbehave(rule)
    with raises(NotCreatedError) as caught:
        desk.create()
    assert (caught.value.fault, caught.value.retry_after_seconds) == (fault, seconds)


@pytest.mark.parametrize(
    ("limits", "fault"),
    [
        (GoogleLimits(concurrent_batches=1), BatchFault.QUEUE_FULL),
        (GoogleLimits(enqueued_tokens=400), BatchFault.QUEUE_FULL),
        (GoogleLimits(inline_bytes=3000), BatchFault.TOO_LARGE),
        (GoogleLimits(file_bytes=3000), BatchFault.TOO_LARGE),
    ],
)
def test_limit_of_the_provider_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: GoogleLimits, fault: BatchFault
) -> None:
    if limits.file_bytes == 3000:
        monkeypatch.setattr(google_batch, "INLINE_BYTES", 3000)
    with Emulator(google=limits) as emulator:
        desk = Desk(open_backend(emulator.google_base_url), tmp_path)
        desk.create(2, shard_id=OTHER)
        with raises(NotCreatedError) as caught:
            desk.create(30)
    assert caught.value.fault is fault


@pytest.mark.parametrize("behaviour", ["bad_key", "no_credit", "redirect"])
def test_refused_account_is_systemic(emulator: Emulator, desk: Desk, behaviour: str) -> None:
    emulator.misbehave(Rule(behaviour=behaviour))
    with raises(SystemicError):
        desk.create()
    with raises(SystemicError):
        desk.backend.find(desk.label())
    assert operations(emulator) == ["batches.create", "batches.list"]


def test_creation_that_is_refused_without_a_reason_is_systemic(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def create(self: object, body: object, sending: object) -> ErrorReply:
        return ErrorReply(400, "Request contains an invalid argument.", "INVALID_ARGUMENT")

    monkeypatch.setattr(GoogleBatch, "_create", create)
    with raises(SystemicError, match="invalid argument"):
        desk.create()


def test_unknown_model_is_systemic(emulator: Emulator, tmp_path: Path) -> None:
    model = ModelRef("google", "gemini-0")
    with raises(SystemicError, match="gemini-0"):
        Desk(open_backend(emulator.google_base_url, model), tmp_path).create()


def test_address_without_batches_is_systemic(
    emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(open_backend(f"{emulator.google_base_url}/nothing"), tmp_path)
    for call in (desk.create, lambda: desk.backend.find(desk.label())):
        with raises(SystemicError, match="404"):
            call()
    monkeypatch.setattr(google_batch, "INLINE_BYTES", 0)
    with raises(SystemicError, match="404"):
        desk.create()


def test_input_file_that_is_gone_is_no_fault_of_the_batch(desk: Desk, tmp_path: Path) -> None:
    until = read_clock() + LIMITS.create_seconds
    with raises(NotCreatedError) as caught:
        desk.backend.create(desk.label(), tmp_path / "lines", "files/none", a_call(), until)
    assert caught.value.fault is BatchFault.TRANSIENT


def test_upload_that_fails_can_be_done_again(
    emulator: Emulator, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(google_batch, "INLINE_BYTES", 0)
    emulator.misbehave(Rule(behaviour="unavailable", endpoint="google.files.upload", count=1))
    with raises(ProviderBusyError):
        desk.create()
    assert operations(emulator) == ["files.upload"]
    desk.create()


# --- finding --------------------------------------------------------------------------------------


def test_batch_is_found_beyond_the_first_page(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(google_batch, "_PAGE", 2)
    mine = desk.create(1)
    for number in range(4):
        desk.create(1, shard_id=str(uuid.UUID(int=(number + 7) << 100)))
    assert desk.backend.find(desk.label()) == Finding(mine)
    assert desk.backend.find(desk.label(not_ours=frozenset({mine}))) == Finding(is_sure=True)
    assert desk.backend.find(desk.label(str(uuid.UUID(int=5)))) == Finding(is_sure=True)


def an_operation(name: str, created: str, shard: str = OTHER, **metadata: Any) -> dict[str, Any]:
    told = {"state": "BATCH_STATE_RUNNING", "createTime": created}
    title = f"batchsql-{shard.replace('-', '')}"
    return {"name": name, "metadata": {**told, "displayName": title, **metadata}}


OLD, MIDDLE, NEW = (f"2026-11-{day}T10:00:00.123456789Z" for day in (10, 20, 28))


@pytest.mark.parametrize(
    ("pages", "found", "asked"),
    [
        # In order, an old one ends the search.
        ([[("a", NEW), ("b", OLD)], [("mine", OLD)]], None, 1),
        # In another order, or in none that shows, all is read.
        ([[("a", OLD), ("b", NEW)], [("c", OLD)], [("mine", MIDDLE)]], "mine", 3),
        ([[("a", OLD)], [("mine", MIDDLE)]], "mine", 2),
        ([[("b", NEW), ("c", MIDDLE)], [("mine", MIDDLE)]], "mine", 2),
    ],
)
def test_search_trusts_no_order_that_it_has_not_seen(
    backend: GoogleBatch, monkeypatch: pytest.MonkeyPatch, pages: Any, found: str | None, asked: int
) -> None:
    paths = []

    async def send(method: str, path: str) -> str:
        paths.append(path)
        number = len(paths) - 1
        operations = [
            an_operation(name, created, SHARD if name == "mine" else OTHER)
            for name, created in pages[number]
        ]
        page: dict[str, Any] = {"operations": operations}
        if number + 1 < len(pages):
            page["nextPageToken"] = f"t{number}"
        return json.dumps(page)

    monkeypatch.setattr(backend, "_send", send)
    since = datetime(2026, 11, 15, tzinfo=timezone.utc)
    label = ShardLabel(SHARD, 4, created_after=since)
    assert backend.find(label) == Finding(found, is_sure=found is None)
    assert len(paths) == asked


# --- following ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("BATCH_STATE_PENDING", BatchState.RUNNING),
        ("JOB_STATE_QUEUED", BatchState.RUNNING),
        ("BATCH_STATE_RUNNING", BatchState.RUNNING),
        ("BATCH_STATE_SUCCEEDED", BatchState.COMPLETED),
        ("BATCH_STATE_PARTIALLY_SUCCEEDED", BatchState.COMPLETED),
        ("BATCH_STATE_FAILED", BatchState.FAILED),
        ("BATCH_STATE_CANCELLED", BatchState.CANCELLED),
        ("BATCH_STATE_EXPIRED", BatchState.EXPIRED),
        ("JOB_STATE_CANCELLING", BatchState.CANCELLING),
        ("BATCH_STATE_UNSPECIFIED", BatchState.RUNNING),
    ],
)
def test_states_are_translated(
    backend: GoogleBatch, monkeypatch: pytest.MonkeyPatch, state: str, expected: BatchState
) -> None:
    async def send(method: str, path: str) -> str:
        return json.dumps(an_operation(path, NEW, state=state))

    monkeypatch.setattr(backend, "_send", send)
    status = backend.poll("batches/x")
    assert status.state is expected
    assert status.has_begun is (state not in ("BATCH_STATE_PENDING", "JOB_STATE_QUEUED"))


def test_unknown_state_is_an_error(backend: GoogleBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    async def send(method: str, path: str) -> str:
        return json.dumps(an_operation(path, NEW, state="BATCH_STATE_DREAMING"))

    monkeypatch.setattr(backend, "_send", send)
    with raises(BackendError, match="DREAMING"):
        backend.poll("batches/x")


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (None, BatchFault.SYSTEMIC),
        ("RESOURCE_EXHAUSTED", BatchFault.QUEUE_FULL),
        ("INTERNAL", BatchFault.TRANSIENT),
        ("PERMISSION_DENIED", BatchFault.SYSTEMIC),
    ],
)
def test_batch_that_failed_says_why(
    emulator: Emulator, desk: Desk, code: str | None, fault: BatchFault
) -> None:
    emulator.misbehave(Rule(behaviour="fail_validation", code=code))
    batch_id = desk.create()
    assert desk.backend.poll(batch_id).state is BatchState.RUNNING
    emulator.finish()
    status = desk.backend.poll(batch_id)
    assert (status.state, status.fault) == (BatchState.FAILED, fault)
    assert "as the rehearsal asked" in (status.error or "")
    assert desk.fetch(batch_id) == []
    assert emulator.bill.charges == []


def test_expired_batch_gives_nothing(emulator: Emulator, desk: Desk, way: str) -> None:
    emulator.misbehave(Rule(behaviour="expire", fraction=0.5))
    batch_id = desk.create()
    emulator.advance(1.5 * DAY)
    assert desk.backend.poll(batch_id).state is BatchState.RUNNING
    emulator.advance(0.5 * DAY)
    assert desk.backend.poll(batch_id).state is BatchState.EXPIRED
    assert desk.fetch(batch_id) == []
    assert not LIMITS.keeps_partial
    assert emulator.bill.charges == []


def test_cancelled_batch_gives_nothing(emulator: Emulator, desk: Desk) -> None:
    batch_id = desk.create()
    emulator.advance(stage="in_progress", fraction=0.5)
    desk.backend.cancel(batch_id)
    assert desk.backend.poll(batch_id).state is BatchState.RUNNING
    desk.backend.cancel(batch_id)
    emulator.finish()
    assert desk.backend.poll(batch_id).state is BatchState.CANCELLED
    assert desk.fetch(batch_id) == []
    desk.backend.cancel(batch_id)
    with raises(BatchGoneError):
        desk.backend.cancel("batches/none")


def test_batch_whose_cancelling_hangs_runs_on(emulator: Emulator, desk: Desk) -> None:
    emulator.misbehave(Rule(behaviour="cancel_hangs"))
    batch_id = desk.create()
    desk.backend.cancel(batch_id)
    emulator.advance(DAY)
    assert desk.backend.poll(batch_id).state is BatchState.RUNNING


def test_batch_that_is_not_known_is_gone(desk: Desk) -> None:
    with raises(BatchGoneError):
        desk.backend.poll("batches/none")
    with raises(BatchGoneError):
        desk.fetch("batches/none")


@pytest.mark.parametrize(
    ("behaviour", "seconds"), [("rate_limit", 9.0), ("unavailable", None), ("drop", None)]
)
def test_call_that_may_succeed_later_says_so(
    emulator: Emulator, desk: Desk, behaviour: str, seconds: float | None
) -> None:
    batch_id = desk.create()
    emulator.misbehave(Rule(behaviour=behaviour, retry_after=seconds))
    with raises(ProviderBusyError) as caught:
        desk.backend.poll(batch_id)
    assert caught.value.retry_after_seconds == seconds


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "finish_reason", "failure"),
    [
        (Rule(behaviour="refusal"), FinishReason.CONTENT_FILTER, None),
        (Rule(behaviour="content_filter"), FinishReason.CONTENT_FILTER, None),
        (Rule(behaviour="length"), FinishReason.LENGTH, None),
        (Rule(behaviour="empty"), FinishReason.STOP, None),
        (Rule(behaviour="invalid_json"), FinishReason.STOP, None),
        (Rule(behaviour="rejected"), None, Outcome.REJECTED),
        (Rule(behaviour="too_long"), None, Outcome.TOO_LONG),
        (Rule(behaviour="error_in_output"), None, Outcome.REJECTED),
        (Rule(behaviour="error_in_output", status=429), None, Outcome.TRANSIENT),
        (Rule(behaviour="error_in_output", status=499), None, Outcome.TRANSIENT),
        (Rule(behaviour="error_in_output", status=500), None, Outcome.TRANSIENT),
        (Rule(behaviour="error_in_output", status=403), None, Outcome.TRANSIENT),
        (Rule(behaviour="errors_only"), None, Outcome.REJECTED),
    ],
)
def test_line_says_what_became_of_its_request(
    emulator: Emulator, desk: Desk, way: str, rule: Rule, finish_reason: FinishReason | None,
    failure: Outcome | None,
) -> None:  # fmt: skip
    emulator.misbehave(rule)
    batch_id = desk.create(1)
    emulator.finish()
    (line,) = desk.fetch(batch_id)
    completion = line.completion
    assert (completion.finish_reason, completion.failure) == (finish_reason, failure)
    assert line.custom_id == custom_id(f"{0:032x}", SHARD)
    assert bool(completion.usage.input_tokens) == (failure is None)
    assert bool(completion.error) == (failure is not None)


def test_results_are_told_apart_by_key(emulator: Emulator, desk: Desk, way: str) -> None:
    requests = [ask(number) for number in range(20)]
    call = replace(a_call(), schema={"type": "object", "properties": {"a": {"type": "string"}}})
    plain = desk.create(requests, OTHER, call)
    emulator.misbehave(Rule(behaviour="shuffle"))
    shuffled = desk.create(requests, SHARD, call)
    emulator.finish()
    first, second = (
        [(line.completion.request_key, line.completion.text) for line in desk.fetch(batch_id)]
        for batch_id in (plain, shuffled)
    )
    assert first != second
    assert dict(first) == dict(second)


@pytest.mark.parametrize(("behaviour", "lines"), [("missing", 3), ("duplicate", 5)])
def test_lines_are_given_as_they_are(
    emulator: Emulator, desk: Desk, way: str, behaviour: str, lines: int
) -> None:
    emulator.misbehave(Rule(behaviour=behaviour, count=1))
    batch_id = desk.create()
    emulator.finish()
    assert desk.backend.poll(batch_id).state is BatchState.COMPLETED
    assert len(desk.fetch(batch_id)) == lines


def test_download_that_breaks_off_is_noticed(
    emulator: Emulator, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(google_batch, "INLINE_BYTES", 0)
    batch_id = desk.create()
    emulator.finish()
    emulator.misbehave(Rule(behaviour="truncate", endpoint="google.files.download"))
    with raises(ProviderBusyError):
        desk.fetch(batch_id)
    emulator.behave()
    emulator.misbehave(Rule(behaviour="truncate", endpoint="google.files.download", count=1))
    assert len(desk.fetch(batch_id)) == 4


def test_results_that_are_deleted_are_gone(
    emulator: Emulator, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(google_batch, "INLINE_BYTES", 0)
    batch_id = desk.create()
    emulator.finish()
    emulator.advance(2 * DAY)
    with raises(BatchGoneError):
        desk.fetch(batch_id)


@pytest.mark.parametrize(
    ("hours", "error"), [(1, ProviderBusyError), (47, ProviderBusyError), (49, BatchGoneError)]
)
def test_results_that_are_not_shown_are_gone_only_after_two_days(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, hours: float, error: type[BackendError]
) -> None:
    ended_at = datetime.now(timezone.utc) - timedelta(hours=hours)
    times = {"createTime": ended_at.isoformat(), "endTime": ended_at.isoformat()}
    metadata = {"state": "BATCH_STATE_SUCCEEDED", **times}
    found = google_wire.Operation.model_validate({"name": "batches/1", "metadata": metadata})
    monkeypatch.setattr(GoogleBatch, "_get", lambda self, batch_id: found)
    with raises(error):
        desk.fetch("batches/1")


def test_results_of_a_running_batch_are_not_there_yet(desk: Desk) -> None:
    with raises(ProviderBusyError):
        desk.fetch(desk.create())


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b'{"response": {}}',
        b'{"key": 7, "response": {"candidates": []}}',
        b'{"key": "x", "metadata": null}',
        b'{"key":' + b"[" * 100_000,
    ],
    ids=lambda line: repr(line[:20]),
)
def test_line_that_is_no_result_is_transient(line: bytes) -> None:
    parsed = google_wire.parse_line(line)
    assert parsed.completion.request_key == ""
    assert parsed.completion.failure is Outcome.TRANSIENT


def test_half_of_a_surrogate_pair_is_read() -> None:
    candidate = b'{"content":{"parts":[{"text":"\\ud800"}]},"finishReason":"STOP"}'
    name = custom_id(f"{1:032x}", SHARD).encode()
    parsed = google_wire.parse_line(
        b'{"key":"%b","response":{"candidates":[%b]}}' % (name, candidate)
    )
    assert parsed.completion.text == "\ud800"


# --- keys -----------------------------------------------------------------------------------------


def test_another_server_gets_the_key_that_is_named_and_no_other(
    emulator: Emulator, desk: Desk, way: str
) -> None:
    desk.create()
    sent = {call.authorization for call in emulator.calls}
    assert sent == ({KEY} if way == "inline" else {KEY, None})  # an upload's own URL needs none


def test_no_key_is_sent_where_none_is_named(emulator: Emulator, tmp_path: Path) -> None:
    backend = open_backend(emulator.google_base_url, api_key_env="none")
    with raises(SystemicError, match="403"):
        Desk(backend, tmp_path).create()
    assert [call.authorization for call in emulator.calls] == [None]


def test_missing_key_is_systemic(
    emulator: Emulator, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TEST_API_KEY")
    with raises(SystemicError, match="TEST_API_KEY"):
        desk.create()
    with raises(SystemicError, match="TEST_API_KEY"):
        _ = desk.backend.account
    assert emulator.calls == []


def test_account_tells_keys_apart_and_shows_none(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = desk.backend.account
    assert desk.backend.account == first
    monkeypatch.setenv("TEST_API_KEY", KEY + "2")
    assert desk.backend.account != first
    assert KEY not in first
