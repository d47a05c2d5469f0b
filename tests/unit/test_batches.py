"""What becomes of a batch's shard when its provider is in doubt, late, or of no use any more."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pytest

from batchsql.backends import batch
from batchsql.backends.batch import (
    BatchFault,
    BatchGoneError,
    BatchState,
    BatchStatus,
    NotCreatedError,
    ProviderBusyError,
)
from batchsql.errors import BackendError, LeaseLostError, SystemicError
from batchsql.types import Outcome
from batchsql.warehouse.adopting import FoundBatch, adopt_batch
from batchsql.warehouse.shards import Attempt, ShardState
from tests.support.desk import CALL, DAY, HOUR, ORDER, RUN, SPEC, Desk, line

KEYS = [uuid.UUID(int=100 + n).hex for n in range(2)]
ODD = [("m\x00x", "m\\u0000x"), ("m\ud83dx", "m\\ud83dx")]
"""What databases do not store, and how it is stored."""

BUSY, GONE = ProviderBusyError("not now"), BatchGoneError("no such batch")


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.database.close()


# --- results that are not there -------------------------------------------------------------------


def test_results_that_are_missing_right_after_the_end_are_waited_for(desk: Desk) -> None:
    shard_id = desk.bring_to(ShardState.ENDED)
    desk.provider.does["fetch"] = GONE
    desk.step(shard_id)
    assert desk.state(shard_id) is ShardState.ENDED
    assert (desk.claims, desk.outcomes) == (2, [])
    assert desk.ledger.read_batch(shard_id).error == "no such batch"
    del desk.provider.does["fetch"]
    desk.provider.lines = [line(key, shard_id) for key in KEYS]
    desk.step(shard_id)
    assert desk.outcomes == ["ok", "ok"]


@pytest.mark.parametrize(
    ("age_seconds", "until"),
    [(11 * 60, None), (0, datetime.now(timezone.utc) - timedelta(seconds=1))],
)
def test_results_that_stay_missing_or_are_past_their_time_are_gone(
    desk: Desk, age_seconds: float, until: datetime | None
) -> None:
    shard_id = desk.bring_to(ShardState.ENDED, until=until)
    desk.age(age_seconds)
    desk.provider.does["fetch"] = GONE
    desk.step(shard_id)
    assert desk.state(shard_id) is ShardState.COLLECTED
    assert desk.outcomes == ["transient", "transient"]
    assert desk.claims == 0


# --- no state without a way out -------------------------------------------------------------------


@pytest.mark.parametrize("error", [BUSY, BackendError("unknown status"), SystemicError("404")])
@pytest.mark.parametrize(
    ("state", "call"),
    [
        (ShardState.SUBMITTING, "find"), (ShardState.SUBMITTED, "poll"),
        (ShardState.ENDED, "fetch"),
    ],
)  # fmt: skip
def test_a_batch_that_cannot_be_asked_about_is_given_up_when_its_results_are_gone(
    desk: Desk, state: ShardState, call: str, error: BackendError
) -> None:
    shard_id = desk.bring_to(state)
    desk.provider.does[call] = error
    desk.age(29 * DAY)
    if error is BUSY:
        desk.step(shard_id)
    else:
        with pytest.raises(type(error)):
            desk.step(shard_id)
    found = desk.ledger.read_batch(shard_id)
    assert (found.state, found.error, desk.claims) == (state, str(error), 2)
    desk.age(2 * DAY)
    desk.step(shard_id)
    assert desk.state(shard_id) is ShardState.FAILED
    assert desk.claims == 0
    assert desk.provider.discarded == ["file-1"]


def test_results_that_cannot_be_fetched_are_given_up_after_the_time_that_they_have(
    desk: Desk,
) -> None:
    now = datetime.now(timezone.utc)
    shard_id = desk.bring_to(ShardState.ENDED, until=now + timedelta(days=2))
    desk.age(40 * DAY)  # which is past what is usual
    desk.step(shard_id)
    assert desk.state(shard_id) is ShardState.ENDED
    desk.database.execute("update ledger.shards set results_until = now() - interval '25 hours'")
    desk.step(shard_id)
    assert desk.state(shard_id) is ShardState.FAILED


def test_a_refused_batch_is_told_however_old_it_is(desk: Desk) -> None:
    shard_id = desk.bring_to(ShardState.SUBMITTED)
    desk.age(31 * DAY)
    desk.provider.does["poll"] = BatchStatus(
        BatchState.FAILED, "failed", fault=BatchFault.SYSTEMIC, error="bad lines"
    )
    with pytest.raises(SystemicError, match="bad lines"):
        desk.step(shard_id)


# --- cancelling -----------------------------------------------------------------------------------


def test_a_batch_that_cannot_be_cancelled_is_kept_while_its_provider_knows_it(desk: Desk) -> None:
    shard_id = desk.bring_to(ShardState.SUBMITTED)
    desk.age(HOUR)
    desk.provider.does["cancel"] = GONE
    desk.provider.does["poll"] = BatchStatus(BatchState.RUNNING, "in_progress")
    desk.batches.cancel(shard_id)
    assert desk.state(shard_id) is ShardState.SUBMITTED
    assert (desk.claims, desk.outcomes) == (2, [])
    desk.provider.does["poll"] = GONE
    desk.batches.cancel(shard_id)
    assert desk.state(shard_id) is ShardState.FAILED
    assert desk.claims == 0
    assert desk.provider.discarded == ["file-1"]


# --- the input that was uploaded ------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        NotCreatedError(BatchFault.QUEUE_FULL, "full"), ProviderBusyError("busy"),
        SystemicError("no"),
    ],
)  # fmt: skip
def test_input_of_a_batch_that_is_not_created_is_deleted(desk: Desk, error: BackendError) -> None:
    desk.provider.does["create"] = error
    if isinstance(error, SystemicError):
        with pytest.raises(SystemicError):
            desk.submit()
    else:
        desk.submit()
    assert desk.provider.discarded == ["file-1"]


def test_input_is_deleted_when_its_shard_was_taken_over(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(shard: Any, *_: object) -> None:
        raise LeaseLostError(shard.shard_id)

    monkeypatch.setattr(desk.ledger, "begin_submission", lose)
    done = desk.batches.submit(ORDER, CALL, (), desk.judge, after=0, size=2)
    assert done.shard is None
    assert desk.provider.discarded == ["file-1"]


def test_input_of_a_batch_that_was_never_created_is_deleted(desk: Desk) -> None:
    shard_id = desk.bring_to(ShardState.SUBMITTING)
    assert desk.provider.discarded == []
    desk.age(HOUR)
    desk.step(shard_id)
    assert desk.state(shard_id) is ShardState.ABANDONED
    assert desk.provider.discarded == ["file-1"]


# --- what providers write -------------------------------------------------------------------------


@pytest.mark.parametrize(("odd", "kept"), ODD)
def test_odd_characters_of_a_provider_spoil_no_batch(desk: Desk, odd: str, kept: str) -> None:
    shard_id = desk.bring_to(ShardState.ENDED)
    desk.provider.does["fetch"] = ProviderBusyError(odd)
    desk.step(shard_id)
    assert desk.ledger.read_batch(shard_id).error == kept
    del desk.provider.does["fetch"]
    desk.provider.lines = [line(key, shard_id, model_reported=odd) for key in KEYS]
    desk.step(shard_id)
    assert desk.outcomes == ["ok", "ok"]
    models = desk.database.execute("select distinct model_reported from ledger.attempts")
    assert models.fetchall() == [(kept,)]


@pytest.mark.parametrize(("odd", "kept"), ODD)
def test_odd_characters_of_a_refusal_spoil_no_shard(desk: Desk, odd: str, kept: str) -> None:
    desk.provider.does["create"] = NotCreatedError(BatchFault.TRANSIENT, odd)
    assert desk.ledger.read_batch(desk.submit()).error == kept


# --- dead letters ---------------------------------------------------------------------------------


def test_a_dead_letter_in_a_batch_that_was_found_is_revived_by_an_answer_only(desk: Desk) -> None:
    taken, _ = desk.ledger.claim(ORDER, after=0, size=2)
    assert taken is not None
    dead = [Attempt(taken.shard_id, key, 1, Outcome.REJECTED, True, error="no") for key in KEYS]
    desk.ledger.flush(dead, {taken.shard_id: 1}, RUN, "me", {taken.shard_id: None})
    found = FoundBatch("b", "completed", ShardState.COLLECTED, "a", RUN, "e", SPEC, "fake/m", "{}")
    assert adopt_batch(desk.ledger, found, pa.array(KEYS)) == 2
    counts = desk.ledger.count_requests(SPEC)
    assert counts.adds_up
    assert (counts.dead, counts.claimed) == (0, 2)
    said = {"failure": Outcome.TRANSIENT, "error": "expired"}
    desk.provider.lines = [
        line(KEYS[0], found.shard_id),
        line(KEYS[1], found.shard_id, None, **said),
    ]
    desk.step(found.shard_id)
    counts = desk.ledger.count_requests(SPEC)
    assert (counts.results, counts.dead, counts.claimed, counts.waiting) == (1, 1, 0, 0)
    assert desk.ledger.read_unbalanced_batches("e") == []


# --- the clock ------------------------------------------------------------------------------------


def test_the_clock_counts_the_time_that_a_machine_is_suspended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "CLOCK_BOOTTIME", 7, raising=False)
    monkeypatch.setattr(time, "clock_gettime", lambda clock: {7: 1000.0}[clock])
    assert batch.read_clock() == 1000.0
    monkeypatch.delattr(time, "CLOCK_BOOTTIME")
    before = time.monotonic()
    assert before <= batch.read_clock() <= time.monotonic()
