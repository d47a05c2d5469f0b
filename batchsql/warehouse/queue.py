"""The queues of enrichments whose requests workers ask for: what is wanted, and how to ask it.

An enrichment has one queue. A run replaces it whole, so that rows that are gone are not asked any
more. Who asks a request is decided by claims, as everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from batchsql.types import Route
from batchsql.warehouse.shards import OPEN_REQUEST, ShardOrder
from batchsql.warehouse.todo import TodoLedger


@dataclass(frozen=True, slots=True)
class Queue:
    """The requests of one enrichment that wait for workers.

    ``free`` are those that can be claimed now; ``claimed`` are being asked. ``settings`` is what
    the declaration says of how to ask.
    """

    enrichment: str
    run_id: str
    spec_version: str
    model: str
    route: Route
    route_reason: str
    settings: Mapping[str, Any]
    free: int
    claimed: int
    workers: int
    age_seconds: float


class QueueLedger(TodoLedger):
    """Writes the queues, and reads them for workers."""

    def enqueue(self, order: ShardOrder, limit: int | None) -> int:
        """Make the open requests on this run's list the queue of an enrichment.

        With a ``limit``, no more than that many: those being asked now and the first of the rest.
        Returns how many are queued.
        """
        warehouse = self.warehouse
        route = order.route.value if order.route else None
        values = [
            order.enrichment, order.spec_version, order.run_id, order.model, route,
            order.route_reason, order.settings,
        ]  # fmt: skip
        again = ""
        with warehouse.transaction():
            if warehouse.has_foreign_writers:  # the row is the lock of the queue
                again = (
                    " on conflict (enrichment) do update set "
                    "spec_version = excluded.spec_version, run_id = excluded.run_id, "
                    "model = excluded.model, route = excluded.route, "
                    "route_reason = excluded.route_reason, settings = excluded.settings, "
                    "enqueued_at = excluded.enqueued_at"
                )
            else:
                warehouse.execute(
                    self.sql("delete from {queues} where enrichment = ?"), [order.enrichment]
                )
            warehouse.execute(
                self.sql(
                    "insert into {queues} (enrichment, spec_version, run_id, model, route, "
                    "route_reason, settings, enqueued_at) values "
                    "(?, ?::uuid, ?::uuid, ?, ?, ?, ?, {clock})" + again
                ),
                values,
            )
            warehouse.execute(
                self.sql("delete from {queued} where enrichment = ?"), [order.enrichment]
            )
            warehouse.execute(
                self.sql(
                    "insert into {queued} (enrichment, request_key, position, is_urgent) "
                    "select ?, t.request_key, t.position, t.is_urgent from {todo} t "
                    "left join {claims} c on c.request_key = t.request_key "
                    f"where {OPEN_REQUEST} order by c.request_key is null, not t.is_urgent, "
                    "t.position" + ("" if limit is None else f" limit {int(limit)}")
                ),
                [order.enrichment],
            )
            rows = warehouse.fetch(
                self.sql("select count(*) from {queued} where enrichment = ?"), [order.enrichment]
            )
        return int(rows[0][0])

    def count_queued(self, enrichment: str) -> int:
        """Return how many requests of a queue have no outcome yet."""
        rows = self.warehouse.fetch(
            self.sql("select count(*) from {queued} t where t.enrichment = ? and " + OPEN_REQUEST),
            [enrichment],
        )
        return int(rows[0][0])

    def read_queues(self, enrichments: Sequence[str] | None = None) -> list[Queue]:
        """Return the queues that are not empty, of some enrichments or all, oldest first."""
        named = ""
        if enrichments is not None:
            marks = ", ".join("?" for _ in enrichments) or "null"
            named = f"and q.enrichment in ({marks}) "
        rows = self.warehouse.fetch(
            self.sql(
                "with counted as (select t.enrichment, "
                "count(*) filter (where c.request_key is null) as free, "
                "count(*) filter (where c.request_key is not null) as claimed, "
                "count(distinct s.owner) as workers from {queued} t "
                "left join {claims} c on c.request_key = t.request_key "
                "left join {shards} s on s.shard_id = c.shard_id and s.lease_expires_at >= {clock} "
                f"where {OPEN_REQUEST} group by t.enrichment) "
                "select q.enrichment, q.run_id::text, q.spec_version::text, q.model, q.route, "
                "q.route_reason, q.settings, n.free, n.claimed, n.workers, "
                "extract(epoch from {clock} - q.enqueued_at)::double precision "
                f"from {{queues}} q join counted n on n.enrichment = q.enrichment {named}"
                "order by q.enqueued_at, q.enrichment"
            ),
            list(enrichments or ()),
        )
        return [
            Queue(
                enrichment, run_id, spec_version, model, Route(route), str(reason or ""),
                orjson.loads(settings), int(free), int(claimed), int(workers), float(age),
            )
            for enrichment, run_id, spec_version, model, route, reason, settings, free, claimed,
            workers, age in rows
        ]  # fmt: skip

    def list_queue(self, enrichment: str) -> None:
        """Make a queue this connection's own list of wanted requests, urgent ones first.

        What is answered or given up leaves the queue for good.
        """
        warehouse = self.warehouse
        self.load_todo(())
        with warehouse.transaction():
            self._trim_queue(enrichment)
            warehouse.execute(
                self.sql(
                    "insert into {todo} select request_key, row_number() over "
                    "(order by not is_urgent, position), is_urgent, null from {queued} "
                    "where enrichment = ?"
                ),
                [enrichment],
            )
        if warehouse.dialect == "postgres":
            warehouse.execute(self.sql("analyze {todo}"))

    def trim_queue(self, enrichment: str) -> None:
        """Take what is answered or given up out of a queue, so that nobody looks at it again."""
        with self.warehouse.transaction():
            self._trim_queue(enrichment)

    def _trim_queue(self, enrichment: str) -> None:
        self._lock_queue(enrichment)
        self.warehouse.execute(
            self.sql(
                "delete from {queued} t where t.enrichment = ? and not (" + OPEN_REQUEST + ")"
            ),
            [enrichment],
        )

    def drop_queue(self, enrichment: str) -> None:
        """Empty a queue, since its enrichment has nothing for workers any more."""
        with self.warehouse.transaction():
            self._lock_queue(enrichment)
            for table in ("queued", "queues"):
                self.warehouse.execute(
                    self.sql(f"delete from {{{table}}} where enrichment = ?"), [enrichment]
                )

    def _lock_queue(self, enrichment: str) -> None:
        """Keep others from changing a queue meanwhile, lest two deletes wait for each other."""
        if self.warehouse.has_foreign_writers:
            self.warehouse.fetch(
                self.sql("select 1 from {queues} where enrichment = ? for update"), [enrichment]
            )

    def is_replaced(self, queue: Queue) -> bool:
        """Return whether a run has made the enrichment another queue since this one was read."""
        rows = self.warehouse.fetch(
            self.sql("select count(*) from {queues} where enrichment = ? and run_id = ?::uuid"),
            [queue.enrichment, queue.run_id],
        )
        return not rows[0][0]

    def count_share(self, spec_version: str, owner: str) -> tuple[int, int]:
        """Return how many requests of this list nobody claims, and how many others work on it."""
        rows = self.warehouse.fetch(
            self.sql(
                "select (select count(*) from {todo} t where " + OPEN_REQUEST + " and not exists "
                "(select 1 from {claims} c where c.request_key = t.request_key)), "
                "(select count(distinct owner) from {shards} where spec_version = ?::uuid "
                "and state = 'running' and lease_expires_at >= {clock} and owner <> ?)"
            ),
            [spec_version, owner],
        )
        return int(rows[0][0]), int(rows[0][1])
