"""The ledger: the tables that decide what is sent, and the SQL that reads and writes them.

Each public method that writes is one transaction. Between any two of them the process may die;
the next run finds the tables in a state from which nothing is lost and nothing finished is sent
again. ``docs/ledger.md`` describes every table for readers.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import pyarrow as pa

from batchsql.errors import WarehouseError
from batchsql.types import Message, Outcome, Request, Role, Usage
from batchsql.version import __version__
from batchsql.warehouse.tables import NEW_UUID, LedgerTables, relation_name

_PROCESS_NONCE = uuid.uuid4().hex


def process_id() -> str:
    """Return this process as the owner of leases.

    A forked child has its parent's memory but is another process, so the id is made of both.
    """
    return f"{_PROCESS_NONCE}-{os.getpid()}"


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
class Claim:
    """A request that this run alone may send now, and the tries it already had."""

    request: Request
    attempt_number: int
    item_failures: int
    transient_failures: int


@dataclass(frozen=True, slots=True)
class Shard:
    """Requests claimed together under one lease."""

    shard_id: str
    epoch: int
    claims: tuple[Claim, ...]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One finished try, ready to be written. ``answer`` is set when its outcome is ok."""

    shard_id: str
    request_key: str
    attempt_number: int
    outcome: Outcome
    is_final: bool
    answer: str | None = None
    checksum: str | None = None
    error: str | None = None
    raw_output: str | None = None
    finish_reason: str | None = None
    usage: Usage = field(default_factory=Usage)
    cost_usd: float | None = None
    model_reported: str | None = None
    engine_version: str | None = None
    started_at: Any = None
    finished_at: Any = None


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


class Ledger(LedgerTables):
    """What a run reads and writes: specs, items, requests, claims, attempts, results."""

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
            batches: columns ``request_key`` (text) and ``position`` (integers from 1, ascending).
        """
        warehouse = self.warehouse
        warehouse.execute(self.sql("drop table if exists {todo}"))
        warehouse.execute(
            self.sql(
                "create temporary table {todo} "
                "(request_key uuid not null, position bigint not null)"
            )
        )
        for batch in batches:
            with warehouse.transaction():
                staged = warehouse.stage("todo", pa.Table.from_batches([batch]))
                warehouse.execute(
                    self.sql(
                        f"insert into {{todo}} select request_key::uuid, position from {staged}"
                    )
                )
        if warehouse.dialect == "postgres":
            warehouse.execute(self.sql("create index on {todo} (position)"))
            warehouse.execute(self.sql("analyze {todo}"))

    def count_todo(self) -> int:
        """Return how many requests are on the run's list."""
        return int(self.warehouse.fetch(self.sql("select count(*) from {todo}"))[0][0])

    def trim_todo(self) -> int:
        """Drop what is answered or dead from the run's list; return what is left."""
        with self.warehouse.transaction():
            self.warehouse.execute(self.sql(f"delete from {{todo}} t where not ({_OPEN})"))
            return self.count_todo()

    def count_claimed_elsewhere(self) -> int:
        """Return how many wanted requests another run is answering now."""
        sql = "select count(*) from {todo} t join {claims} c on c.request_key = t.request_key"
        return int(self.warehouse.fetch(self.sql(sql))[0][0])

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
                f"exists (select 1 from {_braced(other.relation('results'))} r where "
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
        theirs = _braced(other.relation("results"))
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

    # --- who sends it -------------------------------------------------------------------------

    def free_lost_shards(self) -> int:
        """Take back the work of owners that are gone: raise the epoch, free the claims.

        A shard is lost when its lease has run out or, where one process owns the warehouse, at once
        when its owner is another process. Returns the number of shards freed.
        """
        warehouse = self.warehouse
        if warehouse.has_foreign_writers:
            lost, skip = "lease_expires_at < {clock}", " for update skip locked"
            params = []
        else:
            lost, skip = "(lease_expires_at < {clock} or owner not like ?)", ""
            params = [f"{process_id()}:%"]
        with warehouse.transaction():
            found = warehouse.fetch(
                self.sql(
                    "select shard_id::text from {shards} where state = 'running' and "
                    f"{lost}{skip}"
                ),
                params,
            )
            for (shard_id,) in found:
                warehouse.execute(
                    self.sql(
                        "update {shards} set state = 'abandoned', epoch = epoch + 1, "
                        "finished_at = {clock} where shard_id = ?::uuid"
                    ),
                    [shard_id],
                )
                warehouse.execute(
                    self.sql("delete from {claims} where shard_id = ?::uuid"), [shard_id]
                )
        return len(found)

    def claim(
        self,
        *,
        after: int,
        size: int,
        run_id: str,
        owner: str,
        enrichment: str,
        spec_version: str,
        backend: str,
        model: str,
        lease_seconds: float,
    ) -> tuple[Shard | None, int]:
        """Claim the next wanted requests for a new shard of this run.

        Looks at the positions after ``after``. The claims decide who sends: two runs that want the
        same request both ask, and one gets it. Since a claim goes when its request has an outcome,
        what was claimed is looked at once more, by a statement that sees all that committed before.

        Returns:
            The shard, or None when all of the window was answered or claimed elsewhere; and the
            last position looked at, or ``after`` itself when no wanted request is left behind it.
        """
        warehouse = self.warehouse
        shard_id = str(uuid.uuid4())
        with warehouse.transaction():
            window = warehouse.fetch(
                self.sql(
                    "select max(position) from (select position from {todo} where position > ? "
                    "order by position limit ?) w"
                ),
                [after, size],
            )
            last = window[0][0]
            if last is None:
                return None, after
            warehouse.insert_new(
                self.names["claims"],
                ("request_key", "shard_id", "epoch", "claimed_at"),
                # Materialized, or DuckDB hashes all results to look up the few of a window.
                self.sql(
                    "with t as materialized (select request_key from {todo} where "
                    f"position > {int(after)} and position <= {int(last)}) "
                    f"select t.request_key, '{shard_id}'::uuid as shard_id, 1 as epoch, "
                    f"{{clock}} as claimed_at from t where {_OPEN}"
                ),
            )
            if warehouse.has_foreign_writers:
                warehouse.execute(
                    self.sql(
                        "delete from {claims} t where t.shard_id = ?::uuid and not (" + _OPEN + ")"
                    ),
                    [shard_id],
                )
            claims = self._read_claims(shard_id)
            if not claims:  # nothing may stay claimed by a shard that is not there
                warehouse.execute(
                    self.sql("delete from {claims} where shard_id = ?::uuid"), [shard_id]
                )
            else:
                warehouse.execute(
                    self.sql(
                        "insert into {shards} (shard_id, run_id, enrichment, spec_version, "
                        "backend, model, state, owner, epoch, lease_expires_at, requests, ok, "
                        "failed, "
                        "created_at) values (?::uuid, ?::uuid, ?, ?::uuid, ?, ?, 'running', ?, 1, "
                        f"{{clock}} + interval '{float(lease_seconds)} seconds', "
                        f"{len(claims)}, 0, 0, {{clock}})"
                    ),
                    [shard_id, run_id, enrichment, spec_version, backend, model, owner],
                )
        return (Shard(shard_id, 1, claims) if claims else None), int(last)

    def _read_claims(self, shard_id: str) -> tuple[Claim, ...]:
        rows = self.warehouse.fetch(
            self.sql(
                "select c.request_key::text, q.messages, s.prefix, "
                "coalesce(h.last_number, 0), coalesce(h.item_failures, 0), "
                "coalesce(h.transient_failures, 0) "
                "from {claims} c join {requests} q on q.request_key = c.request_key "
                "join {specs} s on s.spec_version = q.spec_version "
                "left join (select a.request_key, max(a.attempt_number) as last_number, "
                "  sum(case when a.outcome in ({item_failures}) and a.attempt_number > "
                "      coalesce(p.replayed, -1) then 1 else 0 end) as item_failures, "
                "  sum(case when a.outcome = 'transient' and a.attempt_number > "
                "      coalesce(p.replayed, -1) then 1 else 0 end) as transient_failures "
                "  from {attempts} a join {claims} k on k.request_key = a.request_key "
                "  and k.shard_id = ?::uuid "
                "  left join (select b.request_key, max(b.attempt_number) as replayed "
                "    from {attempts} b join {claims} m on m.request_key = b.request_key "
                "    and m.shard_id = ?::uuid where b.outcome = 'replayed' "
                "    group by b.request_key) p "
                "  on p.request_key = a.request_key group by a.request_key) h "
                "on h.request_key = c.request_key "
                "join {todo} t on t.request_key = c.request_key "
                "where c.shard_id = ?::uuid order by t.position",
                item_failures=_ITEM_FAILURES,
            ),
            [shard_id, shard_id, shard_id],
        )
        prefixes: dict[str, tuple[Message, ...]] = {}
        claims = []
        for key, messages, prefix, number, item_failures, transient_failures in rows:
            if prefix not in prefixes:
                prefixes[prefix] = parse_messages(prefix)
            request = Request(key.replace("-", ""), prefixes[prefix] + parse_messages(messages))
            claims.append(Claim(request, int(number), int(item_failures), int(transient_failures)))
        return tuple(claims)

    def renew(self, shards: Mapping[str, int], owner: str, lease_seconds: float) -> set[str]:
        """Extend the leases of shards; return the ids of those that are not ours any more."""
        lost = set()
        with self.warehouse.transaction():
            for shard_id, epoch in sorted(shards.items()):
                kept = self._hold(shard_id, epoch, owner)
                if not kept:
                    lost.add(shard_id)
                    continue
                self.warehouse.execute(
                    self.sql(
                        "update {shards} set lease_expires_at = {clock} + "
                        f"interval '{float(lease_seconds)} seconds' where shard_id = ?::uuid"
                    ),
                    [shard_id],
                )
        return lost

    def _hold(self, shard_id: str, epoch: int, owner: str) -> bool:
        """Lock a shard's row for this transaction; return whether it is still ours."""
        lock = " for update" if self.warehouse.has_foreign_writers else ""
        return bool(
            self.warehouse.fetch(
                self.sql(
                    "select 1 from {shards} where shard_id = ?::uuid and epoch = ? and owner = ? "
                    f"and state = 'running'{lock}"
                ),
                [shard_id, epoch, owner],
            )
        )

    def flush(
        self,
        attempts: Sequence[Attempt],
        epochs: Mapping[str, int],
        run_id: str,
        owner: str,
        done: Collection[str] = (),
    ) -> set[str]:
        """Write finished tries, their answers, and free their claims, all in one transaction.

        Each shard's row is locked and its owner and epoch checked first; tries of a shard that was
        taken over are left out, since its new owner answers for them. Shards named in ``done`` have
        no try outstanding after these, and are closed.

        Returns:
            The ids of the shards that are not ours any more.
        """
        warehouse = self.warehouse
        with warehouse.transaction():
            touched = sorted({attempt.shard_id for attempt in attempts})
            lost = {s for s in touched if not self._hold(s, epochs[s], owner)}
            kept = [attempt for attempt in attempts if attempt.shard_id not in lost]
            if kept:
                self._write_attempts(kept, run_id)
            for shard_id in sorted(set(done) & set(touched) - lost):
                self._close_shard(shard_id)
        return lost

    def _write_attempts(self, attempts: Sequence[Attempt], run_id: str) -> None:
        warehouse = self.warehouse
        staged = warehouse.stage("attempts", _attempts_table(attempts))
        warehouse.execute(
            self.sql(
                "insert into {attempts} (attempt_id, request_key, shard_id, run_id, "
                "attempt_number, outcome, is_final, error, raw_output, finish_reason, "
                "input_tokens, output_tokens, "
                "cached_tokens, cost_usd, model_reported, engine_version, started_at, finished_at, "
                f"recorded_at) select attempt_id::uuid, request_key::uuid, shard_id::uuid, "
                "?::uuid, attempt_number, outcome, is_final, error, raw_output, finish_reason, "
                "input_tokens, output_tokens, cached_tokens, cost_usd, model_reported, "
                f"engine_version, started_at, finished_at, {{clock}} from {staged}"
            ),
            [run_id],
        )
        warehouse.insert_new(
            self.names["results"],
            ("request_key", "output", "checksum", "attempt_id", "state", "created_at"),
            f"select request_key::uuid as request_key, answer::{warehouse.json_type} as output, "
            "checksum, attempt_id::uuid as attempt_id, 'accepted' as state, "
            f"{warehouse.clock} as created_at from {staged} where answer is not null",
        )
        warehouse.execute(
            self.sql(
                "delete from {claims} where request_key in "
                f"(select request_key::uuid from {staged})"
            )
        )
        for shard_id in sorted({attempt.shard_id for attempt in attempts}):
            mine = [a.outcome is Outcome.OK for a in attempts if a.shard_id == shard_id]
            warehouse.execute(
                self.sql(
                    "update {shards} set ok = ok + ?, failed = failed + ? where shard_id = ?::uuid"
                ),
                [mine.count(True), mine.count(False), shard_id],
            )

    def finish_shards(self, epochs: Mapping[str, int], owner: str) -> None:
        """Close shards of this run and free whatever they still claim."""
        with self.warehouse.transaction():
            for shard_id, epoch in sorted(epochs.items()):
                if self._hold(shard_id, epoch, owner):
                    self._close_shard(shard_id)

    def _close_shard(self, shard_id: str) -> None:
        self.warehouse.execute(
            self.sql("delete from {claims} where shard_id = ?::uuid"), [shard_id]
        )
        self.warehouse.execute(
            self.sql(
                "update {shards} set state = 'finished', finished_at = {clock} "
                "where shard_id = ?::uuid"
            ),
            [shard_id],
        )

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
        """Return how many tries are recorded for a run."""
        rows = self.warehouse.fetch(
            self.sql(
                "select count(*) from {attempts} where run_id = ?::uuid "
                "and outcome not in ('borrowed', 'replayed')"
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


# A wanted request may be sent: it has no answer and its budget is not spent.
_OPEN = (
    "not exists (select 1 from {results} r where r.request_key = t.request_key) and "
    "not exists (select 1 from {dead_letters} d where d.request_key = t.request_key)"
)
_ITEM_FAILURES = ", ".join(f"'{outcome.value}'" for outcome in Outcome if outcome.is_item_failure)


def _braced(name: str) -> str:
    """Keep the braces of a name through ``LedgerTables.sql``."""
    return name.replace("{", "{{").replace("}", "}}")


def parse_messages(text: str) -> tuple[Message, ...]:
    """Read messages as the ledger stores them: a JSON list of [role, text] pairs."""
    return tuple(Message(Role(role), content) for role, content in orjson.loads(text))


def _attempts_table(attempts: Sequence[Attempt]) -> pa.Table:
    stamp = pa.timestamp("us", tz="UTC")
    columns: dict[str, tuple[list[Any], pa.DataType]] = {
        "attempt_id": ([str(uuid.uuid4()) for _ in attempts], pa.string()),
        "request_key": ([a.request_key for a in attempts], pa.string()),
        "shard_id": ([a.shard_id for a in attempts], pa.string()),
        "attempt_number": ([a.attempt_number for a in attempts], pa.int32()),
        "outcome": ([a.outcome.value for a in attempts], pa.string()),
        "is_final": ([a.is_final for a in attempts], pa.bool_()),
        "answer": ([a.answer for a in attempts], pa.string()),
        "checksum": ([a.checksum for a in attempts], pa.string()),
        "error": ([a.error for a in attempts], pa.string()),
        "raw_output": ([a.raw_output for a in attempts], pa.string()),
        "finish_reason": ([a.finish_reason for a in attempts], pa.string()),
        "input_tokens": ([a.usage.input_tokens for a in attempts], pa.int64()),
        "output_tokens": ([a.usage.output_tokens for a in attempts], pa.int64()),
        "cached_tokens": ([a.usage.cached_tokens for a in attempts], pa.int64()),
        "cost_usd": ([a.cost_usd for a in attempts], pa.float64()),
        "model_reported": ([a.model_reported for a in attempts], pa.string()),
        "engine_version": ([a.engine_version for a in attempts], pa.string()),
        "started_at": ([a.started_at for a in attempts], stamp),
        "finished_at": ([a.finished_at for a in attempts], stamp),
    }
    return pa.table({name: pa.array(values, kind) for name, (values, kind) in columns.items()})


def iter_positions(keys: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Number wanted requests from 1 in the order in which they come."""
    position = 0
    for batch in keys:
        count = batch.num_rows
        numbers = pa.array(range(position + 1, position + count + 1), pa.int64())
        position += count
        yield pa.RecordBatch.from_arrays([batch.column(0), numbers], ["request_key", "position"])
