"""A run without dbt around it, on DuckDB, for benchmarks that time the enrichment step alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import duckdb

from batchsql.backends.base import Capabilities, StreamBackend
from batchsql.backends.registry import check_model, open_backend, open_batch_backend
from batchsql.context import RunContext
from batchsql.declare.spec import Declaration, parse_declaration
from batchsql.pricing import open_prices
from batchsql.runner import EnrichmentRun
from batchsql.types import Call, Completion, FinishReason, Request
from batchsql.warehouse.duckdb import DuckDBDialect, DuckDBSource, DuckDBWarehouse
from batchsql.warehouse.ledger import Ledger

PROMPT = "system:\nYou label support tickets.\nuser:\n{{ subject }}\n{{ body }}\n"
RETURNS = {
    "category": {"enum": ["billing", "bug", "how_to", "other"]},
    "urgency": {"type": "integer", "minimum": 1, "maximum": 5},
    "summary": {"type": "string", "maxLength": 200},
}
ANSWER = '{"category":"billing","urgency":3,"summary":"a ticket about a bill that came twice"}'


class InstantBackend:
    """Answers at once, so that everything else is what takes time."""

    capabilities = Capabilities(slots=64, shard_requests=10_000, stays_inside=True)
    version = "instant"

    def identity(self) -> Mapping[str, Any]:
        return {}

    def complete(
        self, requests: Iterator[Request], call: Call, stop: threading.Event
    ) -> Iterator[Completion | None]:
        for request in requests:
            yield Completion(request.request_key, ANSWER, FinishReason.STOP)


def declare(**more: Any) -> Declaration:
    return parse_declaration(
        "bench",
        {"model": "local/smollm2-135m", "prompt": PROMPT, "returns": RETURNS, **more},
        unique_key="id",
        project_root=Path(),
        check_model=check_model,
    )


def _open_backend(declaration: Declaration) -> StreamBackend:
    """Return the declared backend, but an instant one in place of an engine."""
    if declaration.model.provider == "local":
        return InstantBackend()
    return open_backend(declaration.model, declaration.engine, Path())


def open_run(
    connection: duckdb.DuckDBPyConnection,
    declaration: Declaration,
    backend: StreamBackend | None = None,
) -> EnrichmentRun:
    """Return a run over a connection that stands for dbt's, with a ledger beside it."""
    database = connection.execute("select current_database()").fetchone()[0]
    own = connection.cursor()
    warehouse = DuckDBWarehouse(own, database, own.close)
    context = RunContext(
        source=DuckDBSource(
            query=connection.execute, cursor=lambda: connection, commit=lambda: None
        ),
        warehouse=warehouse,
        dialect=DuckDBDialect(),
        ledger=Ledger(warehouse, "ledger"),
        open_backend=lambda declaration: backend or _open_backend(declaration),
        open_ledger=lambda schema: Ledger(warehouse, schema),
        open_batch_backend=lambda model, engine: open_batch_backend(model, engine, Path()),
        open_prices=open_prices,
        enrichment="model.bench.bench",
        invocation_id="bench",
        stop=threading.Event(),
        info=lambda message: None,
        warn=print,
    )
    return EnrichmentRun(declaration, context)


def make_tickets(connection: duckdb.DuckDBPyConnection, rows: int) -> None:
    """Create a table of tickets of about 400 characters each."""
    connection.execute(
        "create or replace table tickets as select i as id, 'subject ' || (i % 1000) as subject, "
        f"'ticket ' || i || ' ' || repeat(md5(i::varchar), 12) as body from range({rows}) t(i)"
    )
