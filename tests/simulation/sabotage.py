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
from batchsql.batches import Batches, _Ingest
from batchsql.types import Call
from batchsql.warehouse.batch_shards import BatchShard, BatchShardLedger
from batchsql.warehouse.shards import ShardState
from tests.simulation.provider import FakeBatches
from tests.simulation.world import SimulatedWarehouse

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
    run = _Ingest.run

    def run_anyhow(self: _Ingest, call: Call) -> None:
        try:
            run(self, call)
        except ProviderBusyError:
            return

    return mock.patch.object(_Ingest, "run", run_anyhow)


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
    write = _Ingest._write

    def write_and_forget(self: _Ingest, attempts: Any) -> None:
        kept = dict(self.members)
        write(self, attempts)
        self.members.update(kept)
        self._seen.clear()

    with mock.patch.object(_Ingest, "_write", write_and_forget):
        yield


CAUGHT_BY: dict[Sabotage, int] = {
    resubmit_after_lost_reply: 0,
    submit_before_the_intent: 0,
    forget_epoch_and_owner: 0,
    look_before_it_settled: 0,
    look_while_it_is_created: 0,
    create_however_late: 0,
    free_what_is_being_submitted: 0,
    take_a_guess_for_sure: 0,
    believe_one_download: 0,
    take_a_broken_download_for_whole: 0,
    believe_not_found_at_once: 0,
    look_under_any_account: 0,
    forget_what_has_no_line: 0,
    wait_for_ever_for_an_end: 0,
    never_give_up: 0,
    give_up_early: 0,
    write_every_line: 0,
}
"""Each mistake, and the first seed that sees it."""
