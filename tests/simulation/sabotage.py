"""Mistakes put into batchsql on purpose, each of which the simulation must see.

A simulation that finds nothing says little until it is known to find what is there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from batchsql.backends.batch import BatchLimits, Finding, ProviderBusyError, ShardLabel
from batchsql.batches import Batches
from batchsql.ingest import Ingest
from batchsql.types import Call
from batchsql.warehouse.batch_shards import BatchShard, BatchShardLedger
from batchsql.warehouse.shards import ShardState
from tests.simulation.provider import HOUR, FakeBatches
from tests.simulation.world import PRICE_USD, SimulatedWarehouse, Troubles

Sabotage = Callable[[], AbstractContextManager[Any]]


def resubmit_after_lost_reply() -> AbstractContextManager[Any]:
    record = BatchShardLedger.record_trouble

    def record_trouble(self: BatchShardLedger, shard: BatchShard, error: str) -> BatchShard:
        if error == "the reply was lost":
            return self.close_batch(shard, ShardState.FAILED, error=error, fault="transient")
        return record(self, shard, error)

    return mock.patch.object(BatchShardLedger, "record_trouble", record_trouble)


def submit_before_the_intent() -> AbstractContextManager[Any]:
    def begin_submission(
        self: BatchShardLedger, shard: BatchShard, account: str, uploaded: str, seconds: float
    ) -> BatchShard:
        return replace(shard, state=ShardState.SUBMITTING, account=account, uploaded=uploaded)

    return mock.patch.object(BatchShardLedger, "begin_submission", begin_submission)


def forget_epoch_and_owner() -> AbstractContextManager[Any]:
    def hold(self: BatchShardLedger, shard_id: str, epoch: int, owner: str) -> bool:
        return True

    return mock.patch.object(BatchShardLedger, "_hold", hold)


def look_before_it_settled() -> AbstractContextManager[Any]:
    def limits(self: FakeBatches) -> BatchLimits:
        return replace(self._provider.limits, settle_seconds=0.0)

    return mock.patch.object(FakeBatches, "limits", property(limits))


def look_while_it_is_created() -> AbstractContextManager[Any]:
    begin = BatchShardLedger.begin_submission

    def begin_submission(
        self: BatchShardLedger, shard: BatchShard, account: str, uploaded: str, seconds: float
    ) -> BatchShard:
        return begin(self, shard, account, uploaded, 0.0)

    return mock.patch.object(BatchShardLedger, "begin_submission", begin_submission)


def create_however_late() -> AbstractContextManager[Any]:
    create = FakeBatches.create

    def create_late(self: FakeBatches, *args: Any) -> Any:
        self._world.reach("a late creation")
        return create(self, *args[:-1], self._world.now + self.limits.create_seconds)

    return mock.patch.object(FakeBatches, "create", create_late)


def free_what_is_being_submitted() -> AbstractContextManager[Any]:
    fetch = SimulatedWarehouse.fetch

    def fetch_more(self: SimulatedWarehouse, sql: str, params: Sequence[Any] = ()) -> Any:
        more = sql.replace("in ('running', 'planned')", "in ('running', 'planned', 'submitting')")
        return fetch(self, more, params)

    return mock.patch.object(SimulatedWarehouse, "fetch", fetch_more)


def take_a_guess_for_sure() -> AbstractContextManager[Any]:
    find = FakeBatches._find

    def find_surely(self: FakeBatches, shard: ShardLabel) -> Finding:
        return replace(find(self, shard), is_sure=True)

    return mock.patch.object(FakeBatches, "_find", find_surely)


def believe_one_download() -> AbstractContextManager[Any]:
    return mock.patch("batchsql.batches._DOWNLOADS", 1)


def take_a_broken_download_for_whole() -> AbstractContextManager[Any]:
    run = Ingest.run

    def run_anyhow(self: Ingest, call: Call) -> None:
        try:
            run(self, call)
        except ProviderBusyError:
            return

    return mock.patch.object(Ingest, "run", run_anyhow)


def believe_not_found_at_once() -> AbstractContextManager[Any]:
    return mock.patch("batchsql.batches.GONE_AFTER_SECONDS", 0.0)


def look_under_any_account() -> AbstractContextManager[Any]:
    return mock.patch.object(Batches, "_is_same_account", lambda self, shard: True)


def forget_what_has_no_line() -> AbstractContextManager[Any]:
    return mock.patch.object(Batches, "_write_leftovers", lambda self, *args: None)


def wait_for_ever_for_an_end() -> AbstractContextManager[Any]:
    return mock.patch("batchsql.batches.OVERDUE_SECONDS", math.inf)


def never_give_up() -> AbstractContextManager[Any]:
    return mock.patch.object(Batches, "_give_up_if_late", lambda self, shard, reason: shard)


def give_up_early() -> AbstractContextManager[Any]:
    def give_up(self: Batches, shard: BatchShard, reason: str) -> BatchShard:
        return self._ledger.close_batch(shard, ShardState.FAILED, error=reason, fault="lost")

    return mock.patch.object(Batches, "_give_up_if_late", give_up)


@contextmanager
def write_every_line() -> Iterator[None]:
    """Take a line that comes twice for news."""
    write = Ingest._write

    def write_and_forget(self: Ingest, attempts: Any) -> None:
        kept = dict(self.members)
        write(self, attempts)
        self.members.update(kept)
        self._seen.clear()

    with mock.patch.object(Ingest, "_write", write_and_forget):
        yield


def forget_what_came_of_copies() -> AbstractContextManager[Any]:
    flush = BatchShardLedger.flush

    def flush_without(self: BatchShardLedger, *args: Any, copies: int = 0) -> Any:
        return flush(self, *args)

    return mock.patch.object(BatchShardLedger, "flush", flush_without)


def cancel_what_is_not_kept() -> AbstractContextManager[Any]:
    def limits(self: FakeBatches) -> BatchLimits:
        return replace(self._provider.limits, keeps_partial=True)

    return mock.patch.object(FakeBatches, "limits", property(limits))


_LOST = {"lost_reply": 0.6, "refused": 0.0, "systemic": 0.0, "refused_later": 0.0}
_WAITS = {"wait_seconds": (5 * HOUR,), "other_account": 0.0}
_STOPS = {"is_shared": True, "stop": 0.06, "crash": 0.02, "actions": 6, "requests": 5}

TROUBLES: dict[Sabotage, Troubles] = {
    resubmit_after_lost_reply: Troubles(_LOST),
    submit_before_the_intent: Troubles(_LOST, _STOPS),
    forget_epoch_and_owner: Troubles(_LOST, _STOPS),
    look_before_it_settled: Troubles(_LOST, _WAITS),
    look_while_it_is_created: Troubles(_LOST, _WAITS),
    create_however_late: Troubles({**_LOST, "lost_reply": 0.0}, {**_STOPS, "stop": 0.15}),
    free_what_is_being_submitted: Troubles(_LOST, {"requests": 5, "actions": 6}),
    take_a_guess_for_sure: Troubles({**_LOST, "keeps_marks": False}, _WAITS),
    believe_one_download: Troubles({**_LOST, "lost_reply": 0.0, "cut_download": 1.0}),
    take_a_broken_download_for_whole: Troubles(
        {**_LOST, "lost_reply": 0.0, "broken_download": 1.0}
    ),
    believe_not_found_at_once: Troubles({**_LOST, "unknown_at_first": 1.0}, _WAITS),
    look_under_any_account: Troubles({}, {"other_account": 0.3}),
    forget_what_has_no_line: Troubles({"expires": 0.5, "missing_line": 0.3}),
    wait_for_ever_for_an_end: Troubles(
        {**_LOST, "lost_reply": 0.0, "never_ends": 1.0, "forgets_old_batches": False},
        {"deadline_seconds": None, "other_account": 0.0},
    ),
    never_give_up: Troubles(
        {**_LOST, "never_ends": 0.5, "cancel_hangs": 1.0, "forgets_old_batches": False}
    ),
    give_up_early: Troubles({**_LOST, "keeps_marks": False}, _WAITS),
    write_every_line: Troubles({**_LOST, "lost_reply": 0.0, "repeated_line": 0.5}),
    forget_what_came_of_copies: Troubles(
        {**_LOST, "lost_reply": 0.0, "never_ends": 0.0, "expires": 0.7, "cancel_hangs": 0.0},
        {**_WAITS, "deadline_seconds": 2 * HOUR, "rescue_max_usd": 10 * PRICE_USD},
    ),
    cancel_what_is_not_kept: Troubles(
        {**_LOST, "lost_reply": 0.0, "keeps_partial": False}, {"deadline_seconds": 2 * HOUR}
    ),
}
"""Each mistake, and what makes it show within few seeds."""
