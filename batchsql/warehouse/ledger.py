"""The ledger: the tables that decide what is sent, and the SQL that reads and writes them.

Each public method that writes is one transaction. Between any two of them the process may die;
the next run finds the tables in a state from which nothing is lost and nothing finished is sent
again. ``docs/ledger.md`` describes every table for readers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields

import pyarrow as pa

from batchsql.errors import WarehouseError
from batchsql.version import __version__
from batchsql.warehouse.queue import QueueLedger
from batchsql.warehouse.tables import NEW_UUID, braced, relation_name

_TELLING_SECONDS = 3600  # more than most commands take


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
class OpenCompletion:
    """An enrichment that has every answer, of which somebody is to be told."""

    enrichment: str
    opened_at: str
    requests: RequestCounts


class Ledger(QueueLedger):
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

    # --- answers of other ledgers ---------------------------------------------------------------

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
                    "opened_at = excluded.opened_at, fired_at = null, telling_until = null"
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

    def take_completions(self, enrichments: Collection[str]) -> list[OpenCompletion]:
        """Take those of these enrichments that have every answer while nobody was told yet.

        For an hour nobody else gets them: whoever took them tells, and then closes them or gives
        them back. After that time they are there again, since a process may have died over it.
        """
        rows = self.warehouse.fetch(
            self.sql(
                "select enrichment, spec_version::text, opened_at::text from {completions} "
                "where fired_at is null order by enrichment"
            )
        )
        found = [
            OpenCompletion(name, opened_at, self.count_requests(version))
            for name, version, opened_at in rows
            if name in enrichments
        ]
        return [
            each
            for each in found
            if not each.requests.waiting and not each.requests.claimed and self._take(each)
        ]

    def _take(self, completion: OpenCompletion) -> bool:
        return self._set_completion(
            f"telling_until = {{clock}} + interval '{_TELLING_SECONDS} seconds'",
            completion,
            " and (telling_until is null or telling_until < {clock})",
        )

    def close_completion(self, completion: OpenCompletion) -> None:
        """Record that it was told that an enrichment has every answer."""
        self._set_completion("fired_at = {clock}", completion)

    def give_back_completion(self, completion: OpenCompletion) -> None:
        """Record that nobody could be told, so that it is tried again."""
        self._set_completion("telling_until = null", completion)

    def _set_completion(self, change: str, completion: OpenCompletion, where: str = "") -> bool:
        """Change a completion unless a run has opened another one since; return whether it did."""
        with self.warehouse.transaction():
            changed = self.warehouse.fetch(
                self.sql(
                    f"update {{completions}} set {change} where enrichment = ? and "
                    f"opened_at = ?::timestamptz and fired_at is null{where} returning 1"
                ),
                [completion.enrichment, completion.opened_at],
            )
        return bool(changed)

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
        # A claimed request can have an answer already: one borrowed from another ledger. And it can
        # have been dead before: a batch that was found may answer it.
        sql = (
            "with mine as (select distinct request_key from {items} where spec_version = ?::uuid), "
            "answered as (select m.request_key from mine m join {results} r "
            "  on r.request_key = m.request_key), "
            "dead as (select m.request_key from mine m join {dead_letters} d "
            "  on d.request_key = m.request_key where not exists "
            "  (select 1 from {claims} c where c.request_key = m.request_key)), "
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
