"""One run of one enrichment: evaluate, diff, record, ship, validate, reconcile, build.

The order of durable steps, and what a death between two of them costs:

1. the candidate is stored: nothing, it is a table of this run;
2. new items and their requests are recorded, batch by batch: the next run goes on from there;
3. requests are claimed in a shard under a lease: the lease runs out and the claims are freed;
4. the model answers: what was not flushed yet, at most one flush interval, is asked again;
5. answers are written, with their attempts, in one transaction that also frees the claims;
6. the table is built by dbt, from the candidate and the answers: the next run builds it, asking
   nothing.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson
import pyarrow as pa

from batchsql.backends.base import StreamBackend
from batchsql.behind import Behind
from batchsql.collecting import Collector
from batchsql.completion import NotToldError, take_tellings
from batchsql.context import RunContext
from batchsql.counting import ShipCounts
from batchsql.declare.keys import (
    KEY_RECIPE,
    RequestKeyer,
    asked_json,
    canonical_json,
    messages_json,
    spec_version,
)
from batchsql.declare.prompt import BoundPrompt, RenderError
from batchsql.declare.spec import Declaration, check_columns
from batchsql.dispatch import Dispatcher, Question
from batchsql.errors import (
    DataError,
    LostLedgerError,
    Mistake,
    ReconciliationError,
    SpecError,
    SystemicError,
)
from batchsql.garbage import without_collector
from batchsql.progress import PROGRESS_SECONDS, Progress
from batchsql.types import Call
from batchsql.validate.structure import safe_text
from batchsql.warehouse.base import (
    Column,
    ColumnSql,
    UnsupportedColumnTypeError,
    column_values,
    item_key_sql,
    quote,
)
from batchsql.warehouse.ledger import SpecRow
from batchsql.warehouse.shards import process_id
from batchsql.warehouse.todo import iter_positions

ITEM_KEY = "__batchsql_item_key"
REQUEST_KEY = "__batchsql_request_key"
OUTPUT = "__batchsql_output"
STATUS_COLUMN = "llm_status"
REQUEST_COLUMN = "llm_request_id"

RECORD_BATCH_ROWS = 10_000

LONGEST_FIRST = 16
"""So many of the longest requests are given to an engine before all others."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What a run saw and did. Rows first, then requests; every number names its kind."""

    rows: int = 0
    new: int = 0
    reused: int = 0
    duplicates: int = 0
    ok: int = 0
    pending: int = 0
    failed: int = 0
    requests_wanted: int = 0
    requests_sent: int = 0
    requests_in_batches: int = 0
    requests_ok: int = 0
    requests_failed: int = 0
    requests_borrowed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float = 0.0
    seconds: float = 0.0


class EnrichmentRun:
    """A run of one enrichment.

    Call ``collect``, ``prepare``, ``record``, ``ship``, ``reconcile`` in this order. Then build the
    table from ``build_sql`` and call ``finish``. ``plan`` stops after ``record``.
    """

    def __init__(self, declaration: Declaration, context: RunContext) -> None:
        self.declaration = declaration
        self.context = context
        self.run_id = str(uuid.uuid4())
        self.counts = Counts()
        self.columns: list[Column] = []
        self._started_at = time.monotonic()
        self._backend: StreamBackend | None = None
        self._bound: BoundPrompt | None = None
        self._inputs: dict[str, ColumnSql] = {}
        self.spec_version = ""
        self._identity: Mapping[str, Any] = {}
        self._all_known = False
        self._stream_tries = 0
        owner = f"{process_id()}:{self.run_id}"
        self._owner = owner
        self._collector = Collector(
            context.ledger, context.open_batch_backend, context.open_prices,
            owner=owner, say=context.info, warn=context.warn,
        )  # fmt: skip

    # --- evaluate -----------------------------------------------------------------------------

    @property
    def candidate(self) -> str:
        """The quoted name of this run's candidate table."""
        name = f"candidate_{self.run_id.replace('-', '')}"
        if self.context.warehouse.dialect == "duckdb":
            return quote(f"batchsql_{name}", "duckdb")
        return self.context.ledger.relation(name)

    def check(self, select_sql: str) -> None:
        """Look at the columns of the model's SELECT and bind the declaration to them.

        Raises:
            SpecError: with every mistake that needs the columns to be seen.
        """
        declaration = self.declaration
        self.columns = self.context.source.describe(select_sql)
        # Sorted, so that a prompt which takes the whole row sees one order of columns.
        self._bound = check_columns(declaration, sorted(column.name for column in self.columns))
        by_name = {column.name: column for column in self.columns}
        mistakes = []
        for name in self._bound.inputs:
            try:
                self._inputs[name] = self.context.dialect.input_sql(by_name[name])
            except UnsupportedColumnTypeError as error:
                mistakes.append(Mistake(f"column {name}", str(error)))
        if mistakes:
            raise SpecError(declaration.subject, mistakes)

    def collect(self) -> None:
        """Take the batches that earlier runs left at a provider as far as they go.

        Raises:
            SystemicError: the provider refuses us, or refused a whole batch.
        """
        ledger = self.context.ledger
        if not ledger.exists():
            return
        ledger.migrate()
        shards = ledger.read_open_batches([self.context.enrichment])
        if not shards:
            return
        looked = self._collector.look_after(shards)
        self._count(self._collector.counts)
        for error in looked.errors:
            if isinstance(error, SystemicError):
                raise error
            self.context.warn(str(error))

    def prepare(self, select_sql: str, target: str | None = None) -> None:
        """Evaluate the SELECT once into the candidate, with its keys and the answers known so far.

        Args:
            select_sql: the model's SELECT.
            target: for an incremental run, the table to merge into: its rows without an answer join
                the candidate, though the SELECT no longer returns them.

        Raises:
            SpecError: the declaration does not fit the columns.
            DataError: the unique key is not unique, or NULL.
            WarehouseError: the ledger cannot be made or is newer than this batchsql.
        """
        context = self.context
        if not self.columns:
            self.check(select_sql)
        declaration = self.declaration
        self._backend = context.open_backend(declaration)
        self._identity = self._backend.identity()
        context.ledger.migrate()
        bound = self._bound_prompt
        self.spec_version = spec_version(
            model=declaration.model,
            template=declaration.template,
            params=declaration.params,
            returns=declaration.returns,
            normalize=declaration.normalize.value,
            identity=self._identity,
        )
        context.ledger.write_spec(
            SpecRow(
                spec_version=self.spec_version,
                key_recipe=KEY_RECIPE,
                model=str(declaration.model),
                template=declaration.template,
                params=canonical_json(declaration.params).decode(),
                returns=orjson.dumps(asked_json(declaration.returns)).decode(),
                normalize=declaration.normalize.value,
                identity=canonical_json(self._identity).decode(),
                prefix=messages_json(bound.prefix).decode(),
            )
        )
        context.ledger.begin_run(
            self.run_id, context.enrichment, self.spec_version, context.invocation_id
        )
        context.ledger.drop_leftover_candidates()
        context.source.create_candidate(self.candidate, self._candidate_sql(select_sql, target))
        self._count_candidate()

    @property
    def _bound_prompt(self) -> BoundPrompt:
        if self._bound is None:
            raise RuntimeError("check or prepare comes first")
        return self._bound

    def _quote(self, name: str) -> str:
        return quote(name, self.context.dialect.name)

    def _candidate_sql(self, select_sql: str, target: str | None) -> str:
        names = self.context.ledger.relation
        rows = f"(\n{select_sql}\n)"
        head = ""
        if target is not None:
            columns = ", ".join(self._quote(column.name) for column in self.columns)
            older = self._target_columns(target)
            same = " and ".join(
                f"p.{self._quote(key)} = t.{self._quote(key)}" for key in self._unique_key_columns()
            )
            head = f"with picked as materialized (\n{select_sql}\n)\n"
            rows = (
                f"(select {columns} from picked union all select {older} from {target} t "
                f"where t.{STATUS_COLUMN} <> 'ok' "
                f"and not exists (select 1 from picked p where {same}))"
            )
        return (
            f"{head}select q.*, k.request_key as {REQUEST_KEY}, r.output as {OUTPUT}\n"
            f"from (select s.*, {self.item_key_sql()} as {ITEM_KEY} from {rows} s) q\n"
            f"left join {names('items')} k on k.item_key = q.{ITEM_KEY}\n"
            f"left join {names('results')} r on r.request_key = k.request_key "
            "and r.state = 'accepted'"
        )

    def item_key_sql(self) -> str:
        """Return the SQL that computes a row's item key from its input columns."""
        return item_key_sql(self.context.dialect, self.spec_version, list(self._inputs.items()))

    def _target_columns(self, target: str) -> str:
        """Return SQL for this SELECT's columns in the target, NULL for those it has not got yet."""
        fold = str.casefold if self.context.dialect.name == "duckdb" else str
        columns = self.context.source.describe(f"select * from {target}")
        there = {fold(column.name) for column in columns}
        if STATUS_COLUMN not in there:
            raise DataError(
                f"{self.declaration.subject}: the table {target} has no column {STATUS_COLUMN}, so "
                "batchsql did not build it and cannot merge into it; run dbt with --full-refresh"
            )
        return ", ".join(
            self._quote(name) if fold(name) in there else f"null as {self._quote(name)}"
            for name in (column.name for column in self.columns)
        )

    def _unique_key_columns(self) -> list[str]:
        by_name = {column.name: column.name for column in self.columns}
        folded = {column.name.casefold(): column.name for column in self.columns}
        return [by_name.get(key) or folded[key.casefold()] for key in self.declaration.unique_key]

    def _count_candidate(self) -> None:
        rows, answered = self.context.source.fetch(
            f"select count(*), count({OUTPUT}) from {self.candidate}"
        )[0]
        self._all_known = rows == answered
        self.counts = replace(
            self.counts, rows=int(rows), reused=int(answered), new=int(rows) - int(answered)
        )
        self._check_unique_key()

    def _check_unique_key(self) -> None:
        keys = self._unique_key_columns()
        if not keys:
            return
        quoted = ", ".join(self._quote(key) for key in keys)
        label = ", ".join(keys)
        is_null = " or ".join(f"{self._quote(key)} is null" for key in keys)
        fetch = self.context.source.fetch
        nulls = fetch(f"select count(*) from {self.candidate} where {is_null}")[0][0]
        if nulls:
            raise DataError(
                f"{self.declaration.subject}: the unique key {label} is NULL in {nulls:,} rows; "
                "filter them out in the model or choose another unique_key"
            )
        if len(keys) == 1:
            distinct = fetch(f"select count(distinct {quoted}) from {self.candidate}")[0][0]
            if distinct == self.counts.rows:
                return
        repeated = fetch(
            f"select {quoted}, count(*) from {self.candidate} group by {quoted} "
            f"having count(*) > 1 order by {quoted} limit 5"
        )
        if repeated:
            shown = "; ".join(
                f"{', '.join(safe_text(str(value), 100) for value in row[:-1])} ({row[-1]} times)"
                for row in repeated
            )
            raise DataError(
                f"{self.declaration.subject}: the unique key {label} is not unique, for example "
                f"{shown}; remove the duplicates in the model or choose another unique_key"
            )

    # --- diff and record ----------------------------------------------------------------------

    def record(self) -> None:
        """Render what is new, record it, and list the requests that are wanted.

        Raises:
            DataError: the prompt cannot be rendered for a row, which is named.
        """
        if self._all_known:
            return
        context = self.context
        rendered = 0
        started = shown = time.monotonic()
        with Behind() as behind:
            for batch in context.source.stream(self._new_items_sql(), RECORD_BATCH_ROWS):
                with without_collector():
                    items, requests = self._render_batch(batch)
                behind.do(context.ledger.write_items, self.spec_version, items, requests)
                rendered += batch.num_rows
                now = time.monotonic()
                if now - shown >= PROGRESS_SECONDS:
                    progress = Progress(
                        rendered, self.counts.new, now - started, "new rows rendered"
                    )
                    context.info(str(progress))
                    shown = now
        context.ledger.load_todo(iter_positions(context.source.stream(self._wanted_sql(), 100_000)))
        wanted = context.ledger.count_todo()
        unanswered = context.source.fetch(
            f"select count(*) from {self.candidate} where {OUTPUT} is null"
        )[0][0]
        left = context.ledger.trim_todo()
        self.counts = replace(
            self.counts, requests_wanted=left, duplicates=int(unanswered) - wanted
        )

    def check_ledger_is_not_lost(self, current: str | None) -> None:
        """Refuse to send where the table holds answers that this ledger has never heard of.

        A ledger that was dropped, or another one than last night's, would pay for them again.

        Args:
            current: the model's table as it is now, if there is one.

        Raises:
            LostLedgerError: with what to do.
        """
        if current is None or self.declaration.allow_fresh_ledger:
            return
        if self.context.ledger.has_finished_run(self.context.enrichment):
            return
        fold = str.casefold if self.context.dialect.name == "duckdb" else str
        names = {fold(c.name) for c in self.context.source.describe(f"select * from {current}")}
        if not {STATUS_COLUMN, REQUEST_COLUMN} <= names:
            return
        ledgers = [self.context.ledger, *map(self.context.open_ledger, self.declaration.read_from)]
        for other in ledgers[1:]:
            other.check_lendable()
        is_unknown = " and ".join(
            f"not exists (select 1 from {ledger.relation('results')} r where "
            f"replace(r.request_key::varchar, '-', '') = t.{REQUEST_COLUMN})"
            for ledger in ledgers
        )
        unknown = self.context.source.fetch(
            f"select count(*) from {current} t where t.{STATUS_COLUMN} = 'ok' and {is_unknown}"
        )[0][0]
        if unknown:
            raise LostLedgerError(
                f"{self.declaration.subject}: {current} holds {unknown:,} answered rows that the "
                f"ledger in {self.context.ledger.schema} does not know, so they would be paid for "
                "again. Nothing was sent. Bring the ledger back (batchsql import, "
                "batchsql recover, read_from, or the ledger_schema it is in), or set "
                "allow_fresh_ledger: true to ask for them anew"
            )

    def _new_items_sql(self) -> str:
        text = "varchar" if self.context.dialect.name == "duckdb" else "text"
        inputs = "".join(
            f", {sql.value} as i{number}" for number, sql in enumerate(self._inputs.values())
        )
        keys = "".join(
            f", {self._quote(key)}::{text} as k{number}"
            for number, key in enumerate(self._unique_key_columns())
        )
        return (
            f"select {ITEM_KEY}::{text} as item_key{inputs}{keys} from {self.candidate} "
            f"where {REQUEST_KEY} is null"
        )

    def _render_batch(self, batch: pa.RecordBatch) -> tuple[pa.Table, pa.Table]:
        bound = self._bound_prompt
        keyer = RequestKeyer(
            self.declaration.model,
            self.declaration.params,
            self.declaration.returns,
            self._identity,
            bound.prefix,
        )
        item_keys = batch.column(0).to_pylist()
        forms = [sql.form for sql in self._inputs.values()]
        values = [column_values(batch.column(1 + n), form) for n, form in enumerate(forms)]
        first_key = 1 + len(forms)
        unique = [batch.column(n).to_pylist() for n in range(first_key, batch.num_columns)]
        uniques: Iterator[tuple[Any, ...]] = zip(*unique, strict=True) if unique else iter(())
        rows: Iterator[tuple[Any, ...]] = zip(*values, strict=True)
        items: dict[str, tuple[str, str | None]] = {}
        requests: dict[str, str] = {}
        for item_key, row in zip(item_keys, rows, strict=True):
            names = next(uniques, None)
            if item_key in items:
                continue
            shown = _show_unique_key(names)
            try:
                suffix = messages_json(bound.render_suffix(row))
            except RenderError as error:
                where = f" for the row {safe_text(shown, 200)}" if shown else ""
                raise DataError(
                    f"{self.declaration.subject}: the prompt cannot be rendered{where}: {error}; "
                    "mend the template or the row, nothing was sent"
                ) from error
            request_key = keyer.key(suffix)
            items[item_key] = (request_key, shown)
            requests[request_key] = suffix.decode()
        return (
            pa.table(
                {
                    "item_key": pa.array(list(items), pa.string()),
                    "request_key": pa.array([key for key, _ in items.values()], pa.string()),
                    "unique_key": pa.array([shown for _, shown in items.values()], pa.string()),
                }
            ),
            pa.table(
                {
                    "request_key": pa.array(list(requests), pa.string()),
                    "messages": pa.array(list(requests.values()), pa.string()),
                }
            ),
        )

    def _wanted_sql(self) -> str:
        """Select the requests without an answer, equal beginnings side by side."""
        text = "varchar" if self.context.dialect.name == "duckdb" else "text"
        is_engine = self._backend is not None and self._backend.capabilities.is_engine
        urgent = "false"
        if self.declaration.urgent_when is not None:
            urgent = f"coalesce(bool_or((\n{self.declaration.urgent_when}\n)), false)"
        # Names of our own only, since the sort keys name the user's columns without a prefix.
        items = (
            f"(select item_key as __batchsql_item, request_key as __batchsql_request "
            f"from {self.context.ledger.relation('items')})"
        )

        def wanted(more: str = "") -> str:
            return (
                f"select coalesce({REQUEST_KEY}, __batchsql_request)::{text} "
                f"as __batchsql_wanted, {urgent} as __batchsql_urgent{more} "
                f"from {self.candidate} left join {items} k "
                f"on {REQUEST_KEY} is null and __batchsql_item = {ITEM_KEY} "
                f"where {OUTPUT} is null group by 1"
            )

        texts = [sql.key_text for sql in self._inputs.values()]
        starts = [f"min(left({each}, 200))" for each in texts]
        if not is_engine:
            return f"{wanted()} order by {', '.join(starts)}, 1"
        # An engine keeps the beginning that neighbours share, and works best on texts of about one
        # length. The keys are hashes: what is alike in both comes shuffled. A few of the longest go
        # first, since it is these that do not fit into its memory.
        length = f"max({' + '.join(f'coalesce(length({each}), 0)' for each in texts)})"
        parts = [*starts[:-1], f"floor(ln(greatest({length}, 1)) / ln(2))"]
        columns = "".join(f", {each} as o{number}" for number, each in enumerate(parts))
        names = ", ".join(f"o{number}" for number in range(len(parts)))
        return (
            "select __batchsql_wanted, __batchsql_urgent from (select *, row_number() over "
            f"(order by size desc, __batchsql_wanted) as place from "
            f"({wanted(f', {length} as size{columns}')}) w) w "
            f"order by case when place <= {LONGEST_FIRST} then 0 else 1 end, {names}, "
            "__batchsql_wanted"
        )

    # --- ship ---------------------------------------------------------------------------------

    def ship(self) -> None:
        """Send what is wanted and write the answers, until nothing more can be done.

        Raises:
            SystemicError: the backend refuses everything; what was answered before is kept.
            StoppedError: ``stop`` was set; what was answered before is kept.
        """
        if self._all_known:
            return
        if self._backend is None:
            raise RuntimeError("prepare comes first")
        declaration, prefix = self.declaration, self._bound_prompt.prefix
        call = Call(
            model=declaration.model,
            params=declaration.params,
            schema=declaration.returns.object_schema(),
            max_tokens=declaration.max_tokens,
            prefix_messages=len(prefix),
        )
        dispatcher = Dispatcher(
            declaration, self.context, self._backend, self._collector,
            Question(call, tuple(prefix), self.spec_version),
            run_id=self.run_id, owner=self._owner,
        )  # fmt: skip
        if declaration.on_complete is not None:
            self.context.ledger.open_completion(self.context.enrichment, self.spec_version)
        try:
            dispatcher.ship()
        finally:
            self._stream_tries = dispatcher.stream_tries
            self._count(dispatcher.counts)

    def drop_queue(self) -> None:
        """Empty the queue for workers, where an earlier run has left one."""
        self.context.ledger.drop_queue(self.context.enrichment)

    def _count(self, sent: ShipCounts) -> None:
        """Take over what was sent, and what came of it, in this run."""
        self.counts = replace(
            self.counts,
            requests_sent=self._stream_tries + sent.submitted,
            requests_in_batches=sent.submitted,
            requests_ok=sent.ok,
            requests_failed=sent.given_up,
            requests_borrowed=sent.borrowed,
            input_tokens=sent.input_tokens,
            output_tokens=sent.output_tokens,
            cached_tokens=sent.cached_tokens,
            cost_usd=sent.cost_usd,
        )

    def tell_completion(self) -> None:
        """Tell whom the declaration names, if the enrichment has every answer now."""
        on_complete, ledger = self.declaration.on_complete, self.context.ledger
        if on_complete is None:
            return
        for telling in take_tellings(ledger, {self.context.enrichment: on_complete}):
            try:
                telling.tell()
            except NotToldError as error:
                ledger.give_back_completion(telling.completion)
                self.context.warn(str(error))
            else:
                ledger.close_completion(telling.completion)

    def close(self) -> None:
        """Close the connections to the providers."""
        self._collector.close()

    # --- reconcile and build ------------------------------------------------------------------

    def reconcile(self) -> None:
        """Check that every row and every request is accounted for.

        Raises:
            ReconciliationError: with the counts that differ. Nothing is built.
        """
        problems = []
        if self._all_known:
            self.counts = replace(self.counts, ok=self.counts.rows)
        else:
            found = dict(
                self.context.source.fetch(
                    f"select {STATUS_COLUMN}, count(*) "
                    f"from (\n{self._resolved_sql()}\n) b group by 1"
                )
            )
            self.counts = replace(
                self.counts,
                ok=int(found.pop("ok", 0)),
                pending=int(found.pop("pending", 0)),
                failed=int(found.pop("failed", 0)),
            )
            keyless = int(found.pop("unrecorded", 0))
            if keyless:
                problems.append(f"{keyless:,} rows have no recorded request")
            requests = self.context.ledger.count_requests(self.spec_version)
            if not requests.adds_up:
                problems.append(
                    f"{requests.total:,} requests of this spec are {requests.results:,} answered + "
                    f"{requests.dead:,} dead + {requests.claimed:,} in progress + "
                    f"{requests.waiting:,} waiting"
                )
            tries = self.context.ledger.count_attempts(self.run_id)
            if tries != self._stream_tries:
                problems.append(f"{self._stream_tries:,} tries were made, {tries:,} are recorded")
            unbalanced = self.context.ledger.read_unbalanced_batches(self.context.enrichment)
            if unbalanced:
                problems.append(
                    f"{len(unbalanced)} batches do not hold what they should, the first of them "
                    f"is shard {unbalanced[0]}"
                )
        counts = self.counts
        if counts.ok + counts.pending + counts.failed != counts.rows:
            problems.append(
                f"{counts.rows:,} rows are {counts.ok:,} ok + {counts.pending:,} pending + "
                f"{counts.failed:,} failed"
            )
        if problems:
            raise ReconciliationError(
                f"{self.declaration.subject}: the counts do not add up, so nothing was built: "
                + "; ".join(problems)
                + f". The run is {self.run_id} in {self.context.ledger.relation('runs')}"
            )

    def _resolved_sql(self) -> str:
        """Select the candidate's rows, each with the request and the answer it has by now."""
        names = self.context.ledger.relation
        columns = "".join(f"c.{self._quote(column.name)}, " for column in self.columns)
        if self._all_known:
            return (
                f"select {columns}c.{REQUEST_KEY}, c.{OUTPUT}, 'ok' as {STATUS_COLUMN} "
                f"from {self.candidate} c"
            )
        key = f"coalesce(c.{REQUEST_KEY}, k.request_key)"
        return (
            f"select {columns}{key} as {REQUEST_KEY}, coalesce(c.{OUTPUT}, r.output) as {OUTPUT}, "
            f"case when coalesce(c.{OUTPUT}, r.output) is not null then 'ok' "
            f"when {key} is null then 'unrecorded' "
            f"when d.request_key is not null then 'failed' else 'pending' end as {STATUS_COLUMN} "
            f"from {self.candidate} c "
            f"left join {names('items')} k "
            f"on c.{REQUEST_KEY} is null and k.item_key = c.{ITEM_KEY} "
            f"left join {names('results')} r on c.{OUTPUT} is null and r.request_key = {key} "
            "and r.state = 'accepted' "
            f"left join {names('dead_letters')} d on c.{OUTPUT} is null and d.request_key = {key}"
        )

    def build_sql(self) -> str:
        """Return the SELECT of the finished table: the model's columns, the answers, the status."""
        text = "varchar" if self.context.dialect.name == "duckdb" else "text"
        return self._final_sql(
            self._resolved_sql(), f"b.{OUTPUT}", f"b.{STATUS_COLUMN}",
            f"replace(b.{REQUEST_KEY}::{text}, '-', '')",
        )  # fmt: skip

    def empty_sql(self, select_sql: str) -> str:
        """Return the SELECT of the table for ``--empty``: nothing is asked, nothing recorded."""
        text = "varchar" if self.context.dialect.name == "duckdb" else "text"
        no_answer = f"cast(null as {self.context.warehouse.json_type})"
        return self._final_sql(select_sql, no_answer, "'pending'", f"cast(null as {text})")

    def _final_sql(self, rows: str, answer: str, status: str, request: str) -> str:
        dialect = self.context.dialect
        text = "varchar" if dialect.name == "duckdb" else "text"
        columns = [f"b.{self._quote(column.name)}" for column in self.columns]
        # Two outputs never differ only in case, so the YAML file may write them in any.
        types = {name.casefold(): kind for name, kind in self.context.column_types.items()}
        for output in self.declaration.returns.visible:
            value = dialect.answer_sql(
                answer, output.name, output.kind, types.get(output.name.casefold())
            )
            columns.append(f"{value} as {self._quote(output.name)}")
        columns.append(f"cast({status} as {text}) as {STATUS_COLUMN}")
        columns.append(f"cast({request} as {text}) as {REQUEST_COLUMN}")
        listed = ",\n  ".join(columns)
        return f"select\n  {listed}\nfrom (\n{rows}\n) b"

    def finish(self, error: str | None = None, *, state: str = "finished") -> None:
        """Record the run's end, ``failed`` where there is an error, and drop its candidate."""
        counts = replace(self.counts, seconds=time.monotonic() - self._started_at)
        self.counts = counts
        self.context.ledger.finish_run(
            self.run_id,
            "failed" if error else state,
            error,
            {
                "total_rows": counts.rows,
                "new_rows": counts.new,
                "reused_rows": counts.reused,
                "duplicate_rows": counts.duplicates,
                "ok_rows": counts.ok,
                "pending_rows": counts.pending,
                "failed_rows": counts.failed,
                "requests_sent": counts.requests_sent,
                "requests_ok": counts.requests_ok,
                "requests_failed": counts.requests_failed,
                "requests_borrowed": counts.requests_borrowed,
                "cost_usd": counts.cost_usd,
                "input_tokens": counts.input_tokens,
                "output_tokens": counts.output_tokens,
            },
        )
        self.context.source.drop_candidate(self.candidate)


def _show_unique_key(values: Sequence[Any] | None) -> str | None:
    if values is None:
        return None
    return str(values[0]) if len(values) == 1 else orjson.dumps(list(values)).decode()
