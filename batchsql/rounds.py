"""Look after all open batches of a ledger, without dbt: what cron does between two nights.

A round takes every batch as far as it goes, and asks online for what a batch left over whose
deadline has come.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any

from batchsql.asking import OpenPrices, parse_model, read_asked
from batchsql.backends.base import StreamBackend
from batchsql.batches import Batches, Say
from batchsql.collecting import Collector, OpenBatchBackend
from batchsql.counting import ShipCounts
from batchsql.errors import BatchsqlError
from batchsql.shipping import Pace, SendLimit, Shipper
from batchsql.types import ModelRef, Route
from batchsql.warehouse.batch_shards import BatchShard
from batchsql.warehouse.ledger import Ledger
from batchsql.warehouse.shards import ShardOrder, ShardState, process_id

OpenStreamBackend = Callable[[ModelRef, Mapping[str, Any]], StreamBackend]


@dataclass(frozen=True, slots=True)
class Round:
    """What one round came to.

    ``moved`` are the shards that are over now; ``open`` those that are not; ``errors`` were met on
    the way, and none of them kept another batch from being looked after.
    """

    moved: tuple[BatchShard, ...]
    open: tuple[BatchShard, ...]
    errors: tuple[BatchsqlError, ...]
    counts: ShipCounts


class Rounds:
    """Makes rounds over the open batches of one ledger. Close it after the last."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        open_batch_backend: OpenBatchBackend,
        open_backend: OpenStreamBackend,
        open_prices: OpenPrices,
        stop: Event,
        say: Say,
        warn: Say,
    ) -> None:
        self._ledger = ledger
        self._run_id = str(uuid.uuid4())
        self._owner = f"{process_id()}:{self._run_id}"
        self._open_backend = open_backend
        self._open_prices = open_prices
        self._stop = stop
        self._say = say
        self._warn = warn
        self._shipped = ShipCounts()
        self._collector = Collector(
            ledger, open_batch_backend, open_prices, owner=self._owner, say=say, warn=warn
        )

    def close(self) -> None:
        """Close the connections to the providers."""
        self._collector.close()

    def make(self, enrichments: Sequence[str] | None = None) -> Round:
        """Make one round over the batches of some enrichments, or of all."""
        self._ledger.free_lost_shards()
        looked = self._collector.look_after(self._ledger.read_open_batches(enrichments))
        errors = list(looked.errors)
        # One shard stands for all of its enrichment and spec: they share the settings.
        overdue = self._ledger.read_overdue_batches(enrichments)
        specs = {(s.enrichment, s.spec_version): s for s in (*overdue, *looked.open)}
        for shard in specs.values():
            try:
                self._rescue(shard)
            except BatchsqlError as error:
                errors.append(error)
        counts = self._collector.counts + self._shipped
        return Round(looked.moved, looked.open, tuple(errors), counts)

    def cancel(self, enrichments: Sequence[str] | None = None) -> Round:
        """Ask the providers to cancel the batches of some enrichments, or all."""
        asked, errors = [], []
        for shard in self._ledger.read_open_batches(enrichments):
            try:
                after = self._batches_of(shard).cancel(shard.shard_id)
            except BatchsqlError as error:
                errors.append(error)
                continue
            if after is not None and after.is_cancel_requested:
                asked.append(after)
        return Round(tuple(asked), (), tuple(errors), self._collector.counts)

    def read_lossy(self, enrichments: Sequence[str] | None = None) -> list[BatchShard]:
        """Return the batches of some enrichments, or all, of which nothing is left once cancelled.

        One whose provider cannot be reached is left out: it cannot be cancelled either.
        """
        lossy = []
        for shard in self._ledger.read_open_batches(enrichments):
            with contextlib.suppress(BatchsqlError):
                is_kept = self._batches_of(shard).backend.limits.keeps_partial
                if shard.state is ShardState.SUBMITTED and not is_kept:
                    lossy.append(shard)
        return lossy

    def _batches_of(self, shard: BatchShard) -> Batches:
        return self._collector.batches_of(
            parse_model(shard.model), shard.settings.get("engine", {})
        )

    def _rescue(self, shard: BatchShard) -> None:
        """Ask online for what batches left over whose deadline has come."""
        ledger = self._ledger
        before_seconds = float(shard.settings.get("rescue_before_seconds", 0.0))
        ledger.load_todo_of(shard.spec_version, shard.enrichment, before_seconds)
        overdue = ledger.mark_overdue(before_seconds)
        if not overdue:
            return
        asked = read_asked(ledger, shard.spec_version, shard.model, shard.settings)
        backend = self._open_backend(asked.model, asked.engine)
        name = shard.enrichment.rpartition(".")[2]
        self._say(f"{name}: {overdue:,} requests of batches whose deadline has come go online")
        ledger.assign_lanes(
            lane=Route.BATCH, urgent=Route.ONLINE, last_try=Route.BATCH, max_item_failures=0
        )
        pace = Pace(name)
        shipper = Shipper(
            pace, ledger, backend,
            order=ShardOrder(
                run_id=self._run_id, owner=self._owner, enrichment=shard.enrichment,
                spec_version=shard.spec_version, backend=asked.model.provider, model=shard.model,
                lease_seconds=pace.lease_seconds, route=Route.ONLINE,
                route_reason="the deadline of its batch has come",
            ),
            call=asked.call,
            judge=asked.judge(Route.ONLINE, backend.version, self._open_prices),
            limit=SendLimit(None), lane=Route.ONLINE, stop=self._stop,
            say=self._say, warn=self._warn,
        )  # fmt: skip
        try:
            shipper.ship()
        finally:
            self._shipped += shipper.counts
