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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

from batchsql.backends.base import StreamBackend
from batchsql.behind import Behind
from batchsql.candidate import REQUEST_COLUMN, STATUS_COLUMN, Candidate
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
from batchsql.declare.spec import Declaration
from batchsql.dispatch import Dispatcher, Question
from batchsql.errors import (
    LostLedgerError,
    ReconciliationError,
    SystemicError,
)
from batchsql.garbage import without_collector
from batchsql.progress import PROGRESS_SECONDS, Progress
from batchsql.rendering import Renderer
from batchsql.types import Call
from batchsql.warehouse.ledger import SpecRow
from batchsql.warehouse.shards import process_id
from batchsql.warehouse.todo import iter_positions

RECORD_BATCH_ROWS = 10_000
WANTED_BATCH_ROWS = 100_000


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
    table from ``candidate.build_sql`` and call ``finish``. ``plan`` stops after ``record``.
    """

    def __init__(self, declaration: Declaration, context: RunContext) -> None:
        self.declaration = declaration
        self.context = context
        self.run_id = str(uuid.uuid4())
        self.counts = Counts()
        self.candidate = Candidate(declaration, context, self.run_id)
        self.spec_version = ""
        self._started_at = time.monotonic()
        self._backend: StreamBackend | None = None
        self._identity: Mapping[str, Any] = {}
        self._stream_tries = 0
        self._owner = f"{process_id()}:{self.run_id}"
        self._collector = Collector(
            context.ledger, context.open_batch_backend, context.open_prices,
            owner=self._owner, say=context.info, warn=context.warn,
        )  # fmt: skip

    # --- evaluate -----------------------------------------------------------------------------

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
        self.candidate.bind(select_sql)
        declaration = self.declaration
        self._backend = context.open_backend(declaration)
        self._identity = self._backend.identity()
        context.ledger.migrate()
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
                prefix=messages_json(self.candidate.prompt.prefix).decode(),
            )
        )
        context.ledger.begin_run(
            self.run_id, context.enrichment, self.spec_version, context.invocation_id
        )
        context.ledger.drop_leftover_candidates()
        candidate = self.candidate
        candidate.create(select_sql, target, self.spec_version)
        self.counts = replace(
            self.counts, rows=candidate.rows, reused=candidate.answered,
            new=candidate.rows - candidate.answered,
        )  # fmt: skip
        candidate.check_unique_key()

    # --- diff and record ----------------------------------------------------------------------

    def record(self) -> None:
        """Render what is new, record it, and list the requests that are wanted.

        Raises:
            DataError: the prompt cannot be rendered for a row, which is named.
        """
        candidate, context = self.candidate, self.context
        if candidate.is_answered:
            return
        renderer = self._renderer()
        rendered = 0
        started = shown = time.monotonic()
        with Behind() as behind:
            for batch in candidate.stream_new(RECORD_BATCH_ROWS):
                with without_collector():
                    items, requests = renderer.render(batch)
                behind.do(context.ledger.write_items, self.spec_version, items, requests)
                rendered += batch.num_rows
                now = time.monotonic()
                if now - shown >= PROGRESS_SECONDS:
                    progress = Progress(
                        rendered, self.counts.new, now - started, "new rows rendered"
                    )
                    context.info(str(progress))
                    shown = now
        is_engine = self._backend is not None and self._backend.capabilities.is_engine
        wanted = candidate.stream_wanted(WANTED_BATCH_ROWS, is_engine=is_engine)
        context.ledger.load_todo(iter_positions(wanted))
        requests_unanswered = context.ledger.count_todo()
        self.counts = replace(
            self.counts,
            requests_wanted=context.ledger.trim_todo(),
            duplicates=candidate.rows - candidate.answered - requests_unanswered,
        )

    def _renderer(self) -> Renderer:
        declaration, candidate = self.declaration, self.candidate
        keyer = RequestKeyer(
            declaration.model, declaration.params, declaration.returns, self._identity,
            candidate.prompt.prefix,
        )  # fmt: skip
        forms = [sql.form for sql in candidate.inputs.values()]
        return Renderer(declaration.subject, candidate.prompt, keyer, forms)

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

    # --- ship ---------------------------------------------------------------------------------

    def ship(self) -> None:
        """Send what is wanted and write the answers, until nothing more can be done.

        Raises:
            SystemicError: the backend refuses everything; what was answered before is kept.
            StoppedError: ``stop`` was set; what was answered before is kept.
        """
        if self.candidate.is_answered:
            return
        if self._backend is None:
            raise RuntimeError("prepare comes first")
        declaration, prefix = self.declaration, self.candidate.prompt.prefix
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
                telling.tell(self.context.stop)
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
        found = self.candidate.count_by_status()
        self.counts = replace(
            self.counts,
            ok=found.get("ok", 0), pending=found.get("pending", 0), failed=found.get("failed", 0),
        )  # fmt: skip
        if found.get("unrecorded"):
            problems.append(f"{found['unrecorded']:,} rows have no recorded request")
        if not self.candidate.is_answered:
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
        self.candidate.drop()
