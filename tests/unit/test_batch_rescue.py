"""What becomes of a batch near its deadline: cancelled once, copied, waited for, or remembered."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from batchsql.backends.batch import (
    BatchFault,
    BatchGoneError,
    BatchState,
    BatchStatus,
    MaybeCreatedError,
    NotCreatedError,
    ProviderBusyError,
)
from batchsql.judging import Judge
from batchsql.types import Route
from batchsql.warehouse.shards import ShardState
from tests.support.desk import CALL, DAY, HOUR, LIMITS, ORDER, RETURNS, SPEC, Desk

KEEPS_NOTHING = replace(LIMITS, keeps_partial=False)
RUNNING = BatchStatus(BatchState.RUNNING, "in_progress")
WAITING = replace(RUNNING, provider_state="pending", has_begun=False)
MINUTE = 60.0


class Near(Desk):
    """A desk whose batch, of two requests that cost a dollar each, has a deadline."""

    def __init__(self, limits: Any = LIMITS, max_usd: float = 10) -> None:
        super().__init__(limits)
        self.judge = Judge(RETURNS, 3, Route.BATCH, "v", lambda *_: 1.0)
        self.provider.does["poll"] = RUNNING
        settings = {"rescue_before_seconds": HOUR, "rescue_max_usd": max_usd}
        self.order = replace(ORDER, deadline_seconds=6 * HOUR, settings=json.dumps(settings))

    def submit(self) -> str:
        done = self.batches.submit(self.order, CALL, (), self.judge, after=0, size=2)
        assert done.shard is not None
        return done.shard.shard_id

    def look(self, shard_id: str, to_deadline: float) -> tuple[int, int | None]:
        """Look after the batch so long before its deadline.

        Returns how often a cancelling was asked for until now, and what was freed for copies.
        """
        self.database.execute(
            f"update ledger.shards set deadline_at = now() + interval '{to_deadline} seconds'"
        )
        self.step(shard_id)
        return self.provider.calls["cancel"], self.ledger.read_batch(shard_id).copied

    def list_overdue(self, *, enrichment: str = "e") -> int:
        """Return how many requests a rescue would ask online now."""
        self.ledger.load_todo_of(SPEC, enrichment, HOUR)
        return self.ledger.mark_overdue(HOUR)


# --- cancelling, and copies -----------------------------------------------------------------------


@pytest.mark.parametrize("state", [BatchState.RUNNING, BatchState.CANCELLING])
def test_a_cancelling_is_asked_for_once_and_copied_where_it_hangs(state: BatchState) -> None:
    desk = Near()
    with closing(desk.database):
        shard_id = desk.submit()
        assert desk.look(shard_id, 61 * MINUTE) == (0, None)
        assert desk.look(shard_id, 59 * MINUTE) == (1, None)
        desk.provider.does["poll"] = BatchStatus(state, "?")
        assert desk.look(shard_id, 31 * MINUTE) == (1, None)
        assert desk.look(shard_id, 29 * MINUTE) == (1, 2)
        assert desk.look(shard_id, 28 * MINUTE) == (1, 2)
        assert (desk.claims, desk.outcomes) == (0, ["copied", "copied"])


@pytest.mark.parametrize(
    ("error", "calls"), [(ProviderBusyError("not now"), 2), (BatchGoneError("no such call"), 1)]
)
def test_a_cancelling_that_failed_is_asked_for_again_unless_there_is_none(
    error: Exception, calls: int
) -> None:
    desk = Near()
    with closing(desk.database):
        shard_id = desk.submit()
        desk.provider.does["cancel"] = error
        desk.look(shard_id, 20 * MINUTE)
        assert len([said for said in desk.warned if str(error) in said]) == 1
        desk.provider.does["cancel"] = None
        desk.look(shard_id, 20 * MINUTE)
        assert desk.look(shard_id, 20 * MINUTE) == (calls, 2)
        assert desk.state(shard_id) is ShardState.SUBMITTED


@pytest.mark.parametrize(("max_usd", "copies"), [(10, 2), (1.5, 1)])
def test_a_batch_of_which_nothing_would_be_kept_is_copied_and_not_cancelled(
    max_usd: float, copies: int
) -> None:
    desk = Near(KEEPS_NOTHING, max_usd)
    with closing(desk.database):
        shard_id = desk.submit()
        assert desk.look(shard_id, 61 * MINUTE) == (0, None)
        assert desk.look(shard_id, 59 * MINUTE) == (0, copies)
        assert desk.look(shard_id, 1 * MINUTE) == (0, copies)
        assert desk.claims == 2 - copies


def test_it_is_waited_for_where_nothing_may_be_asked_twice_and_that_is_said_once() -> None:
    desk = Near(KEEPS_NOTHING, 0)
    with closing(desk.database):
        shard_id = desk.submit()
        for minutes in (59, 29, 0, -29):
            assert desk.look(shard_id, minutes * MINUTE) == (0, None)
        (warning,) = desk.warned
        for part in ("the deadline has come", "gives nothing of a cancelled batch", "waited for"):
            assert part in warning
        assert "set rescue_max_usd to ask its requests online too" in warning
        assert (desk.claims, desk.state(shard_id)) == (2, ShardState.SUBMITTED)


def test_one_that_has_not_begun_is_cancelled_all_the_same() -> None:
    desk = Near(KEEPS_NOTHING)
    with closing(desk.database):
        shard_id = desk.submit()
        desk.provider.does["poll"] = WAITING
        assert desk.look(shard_id, 59 * MINUTE) == (1, None)
        assert any("it has not begun" in said for said in desk.said)


def test_one_that_does_not_end_long_after_its_window_is_cancelled_all_the_same() -> None:
    desk = Near(KEEPS_NOTHING, 0)
    with closing(desk.database):
        shard_id = desk.submit()
        desk.age(2 * DAY - HOUR)
        assert desk.look(shard_id, -DAY) == (0, None)
        desk.age(2 * HOUR)
        assert desk.look(shard_id, -DAY) == (1, None)
        assert not any("what is finished is kept" in said for said in desk.said)


# --- what was refused or lost ---------------------------------------------------------------------


def refuse(desk: Near) -> str:
    desk.provider.does["create"] = NotCreatedError(BatchFault.QUEUE_FULL, "full")
    return desk.submit()


def refuse_later(desk: Near) -> str:
    shard_id = desk.submit()
    desk.provider.does["poll"] = BatchStatus(
        BatchState.FAILED, "failed", fault=BatchFault.TRANSIENT
    )
    desk.step(shard_id)
    return shard_id


def lose(desk: Near) -> str:
    shard_id = desk.submit()
    desk.provider.does["poll"] = ProviderBusyError("not now")
    desk.age(31 * DAY)
    desk.step(shard_id)
    return shard_id


def never_create(desk: Near) -> str:
    desk.provider.does["create"] = MaybeCreatedError("no reply")
    shard_id = desk.submit()
    desk.age(HOUR)
    desk.step(shard_id)
    return shard_id


@pytest.mark.parametrize("end", [refuse, refuse_later, lose, never_create])
def test_what_was_refused_or_lost_is_listed_once_its_deadline_comes(end: Any) -> None:
    desk = Near()
    with closing(desk.database):
        shard_id = end(desk)
        assert desk.state(shard_id) in (ShardState.FAILED, ShardState.ABANDONED)
        assert (desk.claims, desk.outcomes, desk.list_overdue()) == (0, [], 0)
        desk.database.execute("update ledger.queued set position = position - 5.1 * 3600")
        assert desk.list_overdue(enrichment="another") == 0
        assert desk.list_overdue() == 2
        [found] = desk.ledger.read_overdue_batches()
        assert found.shard_id == shard_id
        desk.ledger.drop_queue("e")  # as the next run does, which has them on its own list
        assert desk.list_overdue() == 0


def test_what_is_refused_twice_is_listed_once_and_not_while_it_is_claimed() -> None:
    desk = Near()
    with closing(desk.database):
        for _ in range(2):
            refuse(desk)
        desk.database.execute("update ledger.queued set position = 0")
        assert desk.list_overdue() == 2
        desk.ledger.assign_lanes(
            lane=Route.BATCH, urgent=Route.BATCH, last_try=Route.BATCH, max_item_failures=0
        )
        desk.ledger.claim(ORDER, after=0, size=1)
        assert desk.list_overdue() == 1


def test_the_queue_of_workers_is_left_alone() -> None:
    desk = Near()
    with closing(desk.database):
        order = replace(ORDER, settings="{}", route=Route.ONLINE, route_reason="r")
        desk.ledger.enqueue(order, limit=1)
        refuse(desk)
        assert desk.database.execute("select position from ledger.queued").fetchall() == [(1,)]
        assert desk.list_overdue() == 0
