"""The ledger: the tables that decide what is sent, and the SQL that reads and writes them.

Each public method that writes is one transaction. Between any two of them the process may die;
the next run finds the tables in a state from which nothing is lost and nothing finished is sent
again. ``docs/ledger.md`` describes every table for readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import pyarrow as pa

from batchsql.errors import WarehouseError
from batchsql.types import Route
from batchsql.version import __version__
from batchsql.warehouse.batch_shards import BatchShardLedger
from batchsql.warehouse.shards import IN_BATCH_STATES, OPEN_REQUEST
from batchsql.warehouse.tables import NEW_UUID, braced, relation_name


@dataclass(frozen=True, slots=True)
class SpecRow:
    """A spec as the ledger keeps it: all that gives its requests their meaning."""

    spec_version: str
    key_recipe: int
    model: str
    template: str
    params: str
    returns: str
    normalize: str
    identity: str
    prefix: str


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Where the requests of a spec stand; the four states are disjoint and complete."""

    total: int
    results: int
    dead: int
    claimed: int
    waiting: int

    @property
    def adds_up(self) -> bool:
        return self.total == self.results + self.dead + self.claimed + self.waiting


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


class Ledger(BatchShardLedger):
    """What a run reads and writes: specs, items, requests, and all about who sends them."""

    # --- what is asked ------------------------------------------------------------------------

    def write_spec(self, spec: SpecRow) -> None:
        """Record a spec when it is first used."""
        columns = (
            "spec_version", "key_recipe", "model", "template", "params", "returns", "normalize",
            "identity", "prefix",
        )  # fmt: skip
        table = pa.table({name: [getattr(spec, name)] for name in columns})
        with self.warehouse.transaction():
            staged = self.warehouse.stage("specs", table)
            self.warehouse.insert_new(
                self.names["specs"],
                (*columns, "batchsql_version", "first_used_at"),
                f"select spec_version::uuid as spec_version, {', '.join(columns[1:])}, "
                f"'{__version__}' as batchsql_version, {self.warehouse.clock} as first_used_at "
                f"from {staged}",
            )

    def read_spec(self, spec_version: str) -> SpecRow:
        """Return a spec as it was recorded."""
        columns = [each.name for each in fields(SpecRow)][1:]
        rows = self.warehouse.fetch(
            self.sql(f"select {', '.join(columns)} from {{specs}} where spec_version = ?::uuid"),
            [spec_version],
        )
        return SpecRow(spec_version, *rows[0])

    def write_items(self, spec_version: str, items: pa.Table, requests: pa.Table) -> None:
        """Record new items and the requests they render to, in one transaction.

        Args:
            spec_version: the spec they belong to.
            items: columns ``item_key``, ``request_key`` (hex text) and ``unique_key`` (JSON text or
                NULL), each item key once.
            requests: columns ``request_key`` and ``messages`` (JSON text), each key once.
        """
        warehouse = self.warehouse
        with warehouse.transaction():
            staged_requests = warehouse.stage("requests", requests)
            staged_items = warehouse.stage("items", items)
            warehouse.insert_new(
                self.names["requests"],
                ("request_key", "spec_version", "messages", "created_at"),
                f"select request_key::uuid as request_key, '{spec_version}'::uuid as spec_version, "
                f"messages, {warehouse.clock} as created_at from {staged_requests}",
            )
            warehouse.insert_new(
                self.names["items"],
                ("item_key", "request_key", "spec_version", "unique_key", "first_seen_at"),
                "select item_key::uuid as item_key, request_key::uuid as request_key, "
                f"'{spec_version}'::uuid as spec_version, unique_key, {warehouse.clock} as "
                f"first_seen_at from {staged_items}",
            )

    # --- what is to be sent -------------------------------------------------------------------

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

    def load_todo_of(self, spec_version: str, enrichment: str) -> None:
        """List what an enrichment's batches left over: neither answered, given up nor claimed."""
        warehouse = self.warehouse
        self.load_todo(())
        with warehouse.transaction():
            warehouse.execute(
                self.sql(
                    "insert into {todo} select request_key, row_number() over "
                    "(order by request_key), false, null from (select distinct a.request_key "
                    "from {attempts} a join {shards} s on s.shard_id = a.shard_id where "
                    "s.enrichment = ? and s.spec_version = ?::uuid and s.route = 'batch') t "
                    "where " + OPEN_REQUEST + " and not exists "
                    "(select 1 from {claims} c where c.request_key = t.request_key)"
                ),
                [enrichment, spec_version],
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

    def count_borrowable(self, others: Sequence[Ledger]) -> int:
        """Return how many wanted requests have an accepted answer in any of these ledgers.

        Raises:
            WarehouseError: one of them is not there.
            LedgerVersionError: a newer batchsql wrote it.
        """
        found = []
        for other in others:
            other.check_lendable()
            found.append(
                f"exists (select 1 from {braced(other.relation('results'))} r where "
                "r.request_key = t.request_key and r.state = 'accepted')"
            )
        if not found:
            return 0
        sql = f"select count(*) from {{todo}} t where {' or '.join(found)}"
        return int(self.warehouse.fetch(self.sql(sql))[0][0])

    def check_lendable(self) -> None:
        """Check that answers can be copied from this ledger.

        Raises:
            WarehouseError: it is not there.
            LedgerVersionError: a newer batchsql wrote it.
        """
        if not self.exists():
            raise WarehouseError(
                f"read_from names {self.schema}, but there is no batchsql ledger in that schema; "
                "give the schema that holds a table named meta beside items, requests and results"
            )
        self.check_version()

    def borrow(self, other: Ledger, run_id: str) -> int:
        """Copy accepted answers of wanted requests from another ledger; return how many.

        The copies are final: later changes of the other ledger do not touch them.

        Raises:
            WarehouseError: the other ledger is not there.
            LedgerVersionError: a newer batchsql wrote it.
        """
        other.check_lendable()
        theirs = braced(other.relation("results"))
        warehouse = self.warehouse
        with warehouse.transaction():
            warehouse.execute(self.sql("drop table if exists {borrowed}"))
            warehouse.execute(
                self.sql(
                    "create temporary table {borrowed} as select r.request_key, r.output, "
                    f"r.checksum, {NEW_UUID[warehouse.dialect]} as attempt_id from {{todo}} t "
                    f"join {theirs} r on r.request_key = t.request_key and r.state = 'accepted' "
                    "where not exists (select 1 from {results} o where "
                    "o.request_key = t.request_key)"
                )
            )
            warehouse.insert_new(
                self.names["results"],
                ("request_key", "output", "checksum", "attempt_id", "state", "created_at"),
                "select request_key, output, checksum, attempt_id, 'accepted' as state, "
                f"{warehouse.clock} as created_at from {self.names['borrowed']}",
            )
            # One row per answer that is really ours now: another run may have been first.
            warehouse.execute(
                self.sql(
                    "insert into {attempts} (attempt_id, request_key, run_id, attempt_number, "
                    "outcome, is_final, recorded_at) select b.attempt_id, b.request_key, ?::uuid, "
                    "0, 'borrowed', false, {clock} from {borrowed} b join {results} r on "
                    "r.request_key = b.request_key and r.attempt_id = b.attempt_id"
                ),
                [run_id],
            )
            rows = warehouse.fetch(
                self.sql(
                    "select count(*) from {borrowed} b join {results} r on "
                    "r.request_key = b.request_key and r.attempt_id = b.attempt_id"
                )
            )
        return int(rows[0][0])

    # --- runs and reconciliation --------------------------------------------------------------

    def begin_run(self, run_id: str, enrichment: str, spec_version: str, invocation: str) -> None:
        """Record that a run of an enrichment has started.

        Runs that died without a word are marked as interrupted, as far as that can be known: where
        one process owns the warehouse, those of other invocations; elsewhere those that started
        a day ago or earlier and have no lease that lasts.
        """
        if self.warehouse.has_foreign_writers:
            gone = (
                "started_at < {clock} - interval '1 day' and not exists (select 1 from {shards} s "
                "where s.run_id = {runs}.run_id and s.state = 'running' "
                "and s.lease_expires_at >= {clock})"
            )
            params = []
        else:
            gone, params = "invocation_id <> ?", [invocation]
        with self.warehouse.transaction():
            self.warehouse.execute(
                self.sql(
                    "update {runs} set state = 'interrupted', finished_at = {clock} "
                    f"where state = 'running' and {gone}"
                ),
                params,
            )
            self.warehouse.execute(
                self.sql(
                    "insert into {runs} (run_id, enrichment, spec_version, state, invocation_id, "
                    f"batchsql_version, started_at) values (?::uuid, ?, ?::uuid, 'running', ?, "
                    f"'{__version__}', {{clock}})"
                ),
                [run_id, enrichment, spec_version, invocation],
            )

    def open_completion(self, enrichment: str, spec_version: str) -> None:
        """Record that somebody is to be told once an enrichment has every answer."""
        again = ""
        with self.warehouse.transaction():
            if self.warehouse.has_foreign_writers:  # two that delete and insert would collide
                again = (
                    " on conflict (enrichment) do update set spec_version = excluded.spec_version, "
                    "opened_at = excluded.opened_at, fired_at = null"
                )
            else:
                self.warehouse.execute(
                    self.sql("delete from {completions} where enrichment = ?"), [enrichment]
                )
            self.warehouse.execute(
                self.sql(
                    "insert into {completions} (enrichment, spec_version, opened_at) "
                    "values (?, ?::uuid, {clock})" + again
                ),
                [enrichment, spec_version],
            )

    def read_completions(self) -> list[tuple[str, RequestCounts]]:
        """Return the enrichments that have every answer while nobody was told yet."""
        rows = self.warehouse.fetch(
            self.sql(
                "select enrichment, spec_version::text from {completions} where fired_at is null "
                "order by enrichment"
            )
        )
        counted = [(name, self.count_requests(version)) for name, version in rows]
        return [(name, each) for name, each in counted if not each.waiting and not each.claimed]

    def close_completion(self, enrichment: str) -> None:
        """Record that it was told that an enrichment has every answer."""
        with self.warehouse.transaction():
            self.warehouse.execute(
                self.sql("update {completions} set fired_at = {clock} where enrichment = ?"),
                [enrichment],
            )

    def has_finished_run(self, enrichment: str) -> bool:
        """Return whether a run of an enrichment has ever come to a good end."""
        rows = self.warehouse.fetch(
            self.sql("select count(*) from {runs} where enrichment = ? and state = 'finished'"),
            [enrichment],
        )
        return bool(rows[0][0])

    def drop_leftover_candidates(self) -> None:
        """Drop candidate tables of runs that are over. DuckDB's are temporary and need no care.

        Only what is surely ours and may be dropped: the schema can hold the user's tables too, and
        candidates of another role.
        """
        if self.warehouse.dialect != "postgres":
            return
        found = self.warehouse.fetch(
            self.sql(
                "select c.relname::text from pg_catalog.pg_class c join pg_catalog.pg_namespace n "
                "on n.oid = c.relnamespace where n.nspname = ? and c.relkind = 'r' "
                "and c.relpersistence = 'u' and pg_has_role(c.relowner, 'USAGE') and c.relname ~ "
                f"'^{self.prefix}candidate_[0-9a-f]{{{{32}}}}$' and not exists (select 1 from "
                "{runs} r where r.state = 'running' "
                "and replace(r.run_id::text, '-', '') = right(c.relname, 32))"
            ),
            [self.schema],
        )
        for (name,) in found:
            relation = relation_name(self.warehouse, self.schema, name)
            self.warehouse.execute(f"drop table if exists {relation}")

    def finish_run(
        self, run_id: str, state: str, error: str | None, counts: Mapping[str, int | float | None]
    ) -> None:
        """Record how a run ended and its counts, which name columns of ``runs``."""
        sets = "".join(f"{name} = ?, " for name in counts)
        with self.warehouse.transaction():
            self.warehouse.execute(
                self.sql(
                    f"update {{runs}} set {sets}state = ?, error = ?, finished_at = {{clock}} "
                    "where run_id = ?::uuid"
                ),
                [*counts.values(), state, error, run_id],
            )

    def count_attempts(self, run_id: str) -> int:
        """Return how many tries are recorded for a run, those in batches aside."""
        rows = self.warehouse.fetch(
            self.sql(
                "select count(*) from {attempts} where run_id = ?::uuid "
                "and outcome not in ('borrowed', 'replayed', 'copied') "
                "and (route is null or route <> 'batch')"
            ),
            [run_id],
        )
        return int(rows[0][0])

    def count_requests(self, spec_version: str) -> RequestCounts:
        """Count the requests of a spec by where they stand, each state by a query of its own."""
        # A claimed request can have an answer already: one borrowed from another ledger.
        sql = (
            "with mine as (select distinct request_key from {items} where spec_version = ?::uuid), "
            "answered as (select m.request_key from mine m join {results} r "
            "  on r.request_key = m.request_key), "
            "dead as (select m.request_key from mine m join {dead_letters} d "
            "  on d.request_key = m.request_key), "
            "claimed as (select m.request_key from mine m join {claims} c "
            "  on c.request_key = m.request_key where not exists "
            "  (select 1 from {results} r where r.request_key = m.request_key)), "
            "waiting as (select m.request_key from mine m join {requests} q "
            "  on q.request_key = m.request_key where "
            "  not exists (select 1 from {results} r where r.request_key = m.request_key) and "
            "  not exists (select 1 from {dead_letters} d where d.request_key = m.request_key) and "
            "  not exists (select 1 from {claims} c where c.request_key = m.request_key)) "
            "select (select count(*) from mine), (select count(*) from answered), "
            "(select count(*) from dead), (select count(*) from claimed), "
            "(select count(*) from waiting)"
        )
        rows = self.warehouse.fetch(self.sql(sql), [spec_version])
        return RequestCounts(*(int(value) for value in rows[0]))


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
