"""A run's own list of wanted requests: in which order and in which lane they are to be sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from batchsql.types import Route
from batchsql.warehouse.batch_shards import BatchShardLedger
from batchsql.warehouse.shards import IN_BATCH_STATES, OPEN_REQUEST
from batchsql.warehouse.tables import braced


@dataclass(frozen=True, slots=True)
class TodoCounts:
    """A run's list of wanted requests, by what can be done about them now.

    ``free`` can be claimed; ``urgent`` and ``last_tries`` are part of it. ``in_batch`` are in
    batches at a provider, ``elsewhere`` another run is sending now.
    """

    free: int
    urgent: int
    last_tries: int
    in_batch: int
    elsewhere: int


class TodoLedger(BatchShardLedger):
    """Reads and writes the list, a temporary table of this connection."""

    def load_todo(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Keep the run's own list of wanted requests, in the order in which to send them.

        Args:
            batches: columns ``request_key`` (text), ``position`` (integers from 1, ascending) and
                ``is_urgent`` (booleans).
        """
        warehouse = self.warehouse
        warehouse.execute(self.sql("drop table if exists {todo}"))
        warehouse.execute(
            self.sql(
                "create temporary table {todo} (request_key uuid not null, "
                "position bigint not null, is_urgent boolean not null, lane text)"
            )
        )
        for batch in batches:
            with warehouse.transaction():
                staged = warehouse.stage("todo", pa.Table.from_batches([batch]))
                warehouse.execute(
                    self.sql(
                        "insert into {todo} select request_key::uuid, position, is_urgent, null "
                        f"from {staged}"
                    )
                )
        if warehouse.dialect == "postgres":
            warehouse.execute(self.sql("create index on {todo} (position)"))
            warehouse.execute(self.sql("analyze {todo}"))

    def load_todo_of(
        self, spec_version: str, enrichment: str, rescue_before_seconds: float
    ) -> None:
        """List what an enrichment's batches left over: neither answered, given up nor claimed.

        Of batches that were refused or lost, whose requests have no try, only those are known that
        were so since the last run; they are urgent where ``mark_overdue`` would say so.
        """
        warehouse = self.warehouse
        self.load_todo(())
        with warehouse.transaction():
            warehouse.execute(
                self.sql(
                    "insert into {todo} select t.request_key, row_number() over "
                    "(order by t.request_key), bool_or(t.is_due), null from ("
                    "select a.request_key, false as is_due from {attempts} a "
                    "join {shards} s on s.shard_id = a.shard_id "
                    "where s.enrichment = ? and s.spec_version = ?::uuid and s.route = 'batch' "
                    "union all "
                    "select k.request_key, k.position <= extract(epoch from {clock}) + "
                    f"{float(rescue_before_seconds)} from {{queued}} k where k.enrichment = ? "
                    "and k.request_key in "
                    "(select i.request_key from {items} i where i.spec_version = ?::uuid) "
                    "and not exists (select 1 from {queues} q where q.enrichment = k.enrichment)"
                    ") t where " + OPEN_REQUEST + " and not exists "
                    "(select 1 from {claims} c where c.request_key = t.request_key) "
                    "group by t.request_key"
                ),
                [enrichment, spec_version, enrichment, spec_version],
            )

    def mark_overdue(self, rescue_before_seconds: float) -> int:
        """Make urgent what was in a batch whose deadline has come; return how many that are.

        A deadline has come once no more than ``rescue_before_seconds`` are left until it.
        """
        overdue = (
            "select a.request_key from {attempts} a join {shards} s on s.shard_id = a.shard_id "
            "join {todo} w on w.request_key = a.request_key where s.deadline_at <= "
            f"{{clock}} + interval '{float(rescue_before_seconds)} seconds'"
        )
        with self.warehouse.transaction():
            self.warehouse.execute(
                self.sql(f"update {{todo}} set is_urgent = true where request_key in ({overdue})")
            )
            rows = self.warehouse.fetch(self.sql("select count(*) from {todo} where is_urgent"))
        return int(rows[0][0])

    def count_todo(self) -> int:
        """Return how many requests are on the run's list."""
        return int(self.warehouse.fetch(self.sql("select count(*) from {todo}"))[0][0])

    def trim_todo(self) -> int:
        """Drop what is answered or dead from the run's list; return what is left."""
        with self.warehouse.transaction():
            self.warehouse.execute(self.sql(f"delete from {{todo}} t where not ({OPEN_REQUEST})"))
            return self.count_todo()

    def count_wanted(
        self, *, lane: Route | None = None, max_item_failures: int | None = None
    ) -> TodoCounts:
        """Count the run's list, or a lane of it, by what can be done about each request now.

        A request has its last try before it when it failed ``max_item_failures`` times already.
        """
        where = "" if lane is None else f" where t.lane = '{lane.value}'"
        last_try = "false"
        if max_item_failures is not None:
            last_try = f"coalesce(h.failures, 0) >= {int(max_item_failures)}"
        rows = self.warehouse.fetch(
            self.sql(
                "select count(*) filter (where c.request_key is null), "
                "count(*) filter (where c.request_key is null and t.is_urgent), "
                f"count(*) filter (where c.request_key is null and not t.is_urgent and {last_try}),"
                f" count(*) filter (where s.state in {IN_BATCH_STATES}), "
                f"count(*) filter (where c.request_key is not null and (s.state is null or "
                f"s.state not in {IN_BATCH_STATES})) "
                "from {todo} t left join {claims} c on c.request_key = t.request_key "
                "left join {shards} s on s.shard_id = c.shard_id "
                f"left join ({braced(self.failures_sql(_LISTED))}) h "
                "on h.request_key = t.request_key" + where
            )
        )
        return TodoCounts(*(int(value) for value in rows[0]))

    def assign_lanes(
        self, *, lane: Route, urgent: Route, last_try: Route, max_item_failures: int
    ) -> None:
        """Say how each request on the run's list travels: urgent ones and last tries apart."""
        with self.warehouse.transaction():
            self.warehouse.execute(
                self.sql("update {todo} set lane = case when is_urgent then ? else ? end"),
                [urgent.value, lane.value],
            )
            if last_try is not lane and max_item_failures > 0:
                self.warehouse.execute(
                    self.sql(
                        "update {todo} set lane = ? where not is_urgent and request_key in "
                        f"(select h.request_key from ({braced(self.failures_sql(_LISTED))}) h "
                        f"where h.failures >= {int(max_item_failures)})"
                    ),
                    [last_try.value],
                )


_LISTED = "select request_key from {todo}"


def iter_positions(keys: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Number wanted requests from 1 in the order in which they come."""
    position = 0
    for batch in keys:
        count = batch.num_rows
        numbers = pa.array(range(position + 1, position + count + 1), pa.int64())
        position += count
        yield pa.RecordBatch.from_arrays(
            [batch.column(0), numbers, batch.column(1)], ["request_key", "position", "is_urgent"]
        )
