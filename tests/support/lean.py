"""Runs without dbt around them, for tests that need many: bare connections, the fake backend.

``run_job`` takes a run from the SELECT to the built table, as the dbt adapter does. ``start`` does
it in a process of its own, forked from a server that has everything imported; such a process can
be killed or stopped at any point, and its DuckDB file opened again after it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from batchsql import shipping
from batchsql.backends import registry
from batchsql.backends.base import StreamBackend
from batchsql.backends.batch import BatchBackend
from batchsql.cli.work import ending
from batchsql.collecting import OpenBatchBackend
from batchsql.context import RunContext
from batchsql.dbt import run_enrichment
from batchsql.declare.spec import Declaration, parse_declaration
from batchsql.pricing import open_prices
from batchsql.runner import Counts, EnrichmentRun
from batchsql.shipping import SendLimit
from batchsql.types import ModelRef
from batchsql.warehouse.base import Dialect, Source, Warehouse
from batchsql.warehouse.ledger import Ledger
from batchsql.working import Worker
from tests.support import fake, points
from tests.support.project import ROOT, Target

TEMPLATE = "system:\nYou label tickets.\nuser:\n{{ body }}\n"
RETURNS = {
    "category": {"enum": ["billing", "bug", "other"]},
    "urgency": {"type": "integer", "minimum": 1, "maximum": 5},
}


_BUILDING = threading.Lock()


@dataclass(frozen=True)
class Job:
    """One run of one model: where, what its rows say, and how it is declared."""

    target: Target
    log: str
    bodies: Sequence[str]
    name: str = "labels"
    model: str = "fake/labeller"
    template: str = TEMPLATE
    engine: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    lease_seconds: float = 60.0

    @property
    def select_sql(self) -> str:
        rows = ", ".join(f"({n}, '{body}')" for n, body in enumerate(self.bodies, 1))
        return f"select * from (values {rows}) t(id, body)"

    @property
    def conninfo(self) -> str:
        return f"host={self.target.profile['host']} user=postgres dbname=postgres"


def _engine_of(job: Job) -> Mapping[str, Any]:
    return {"log": job.log, "shard_requests": 4} if job.model.startswith("fake/") else {}


def declare(job: Job) -> Declaration:
    declaration = parse_declaration(
        job.name,
        {
            "model": job.model, "prompt": job.template, "returns": RETURNS,
            "engine": {**_engine_of(job), **job.engine}, **job.options,
        },
        unique_key="id",
        project_root=Path(),
        check_model=lambda model, params, engine: [],
    )  # fmt: skip
    # Under the second that a declaration must give at least.
    return replace(declaration, lease_seconds=job.lease_seconds)


@contextmanager
def connect(
    job: Job, database: Any = None
) -> Iterator[tuple[Source, Warehouse, Dialect, Callable[[str], object]]]:
    """Open a source, a warehouse and what builds a table, like ``batchsql.dbt`` does.

    Args:
        job: says where.
        database: an open DuckDB connection, for runs that share one process and its file.
    """
    schema = job.target.schema
    table = f'"{schema}"."{job.name}"'
    if job.target.kind == "duckdb":
        import duckdb

        from batchsql.warehouse.duckdb import DuckDBDialect, DuckDBSource, DuckDBWarehouse

        opened = database or duckdb.connect(job.target.profile["path"])
        cursor, own = opened.cursor(), opened.cursor()
        name = cursor.execute("select current_database()").fetchone()[0]

        def build_duckdb(sql: str) -> None:
            with _BUILDING:
                cursor.begin()
                cursor.execute(f'create schema if not exists "{schema}"')
                cursor.execute(f"create or replace table {table} as {sql}")
                points.reach("build")
                cursor.commit()
                points.reach("build")

        source = DuckDBSource(cursor.execute, lambda: cursor, lambda: None)
        try:
            yield source, DuckDBWarehouse(own, name, own.close), DuckDBDialect(), build_duckdb
        finally:
            cursor.close()
            own.close()
            if database is None:
                opened.close()
        return

    import psycopg2

    from batchsql.warehouse.postgres import (
        PostgresDialect,
        PostgresSource,
        PostgresWarehouse,
        connect_adbc,
    )

    connection = psycopg2.connect(job.conninfo)

    def query(sql: str) -> Any:
        cursor = connection.cursor()
        cursor.execute(sql)
        return cursor

    def build_postgres(sql: str) -> None:
        query("select pg_advisory_xact_lock(1)")  # two that create one schema would collide
        query(f'create schema if not exists "{schema}"')
        query(f"drop table if exists {table}")
        query(f"create table {table} as {sql}")
        points.reach("build")
        connection.commit()
        points.reach("build")

    def connect_own() -> Any:
        return connect_adbc(job.conninfo, None)

    warehouse = PostgresWarehouse(connect_own, "postgres")
    try:
        yield (
            PostgresSource(query, connection.commit, lambda: None, lambda: None, connect_own),
            warehouse, PostgresDialect(), build_postgres,
        )  # fmt: skip
    finally:
        warehouse.close()
        connection.close()


def run_job(
    job: Job,
    database: Any = None,
    open_backend: Callable[[Declaration], StreamBackend] | None = None,
    say: Callable[[str], None] = lambda message: None,
    open_batch_backend: OpenBatchBackend | None = None,
) -> Counts:
    """Run one model from the SELECT to the built table; return its counts."""
    shipping.WAIT_SECONDS = 0.05
    shipping.BACKOFF_SECONDS = 0.01
    with connect(job, database) as (source, warehouse, dialect, build):
        context = RunContext(
            source=source,
            warehouse=warehouse,
            dialect=dialect,
            ledger=Ledger(warehouse, job.target.ledger),
            open_backend=open_backend or _open_backend,
            open_ledger=lambda schema: Ledger(warehouse, schema),
            open_batch_backend=open_batch_backend or _open_batch_backend,
            open_prices=open_prices,
            enrichment=f"model.shop.{job.name}",
            invocation_id="test",
            stop=threading.Event(),
            info=say,
            warn=say,
        )
        run = EnrichmentRun(declare(job), context)
        run_enrichment(run, job.select_sql, None)
        build(run.candidate.build_sql())
        run.finish()
        return run.counts


def _open_backend(declaration: Declaration) -> StreamBackend:
    if declaration.model.provider == fake.PROVIDER:
        return fake.FakeBackend(declaration.engine)
    return registry.open_backend(declaration.model, declaration.engine, Path())


def _open_batch_backend(model: ModelRef, engine: Mapping[str, Any]) -> BatchBackend | None:
    if model.provider == fake.PROVIDER:
        return None
    return registry.open_batch_backend(model, engine, Path())


def work_job(job: Job, say: Callable[[str], None] = lambda message: None) -> dict[str, Any]:
    """Work on the queue of one model like ``batchsql work``, until every request has an outcome."""
    stop, drain = threading.Event(), threading.Event()
    with ending(stop, drain, 10.0), connect(job) as (_, warehouse, _, _):
        ledger = Ledger(warehouse, job.target.ledger)
        worker = Worker(
            ledger, name=f"worker:{os.getpid()}",
            open_backend=lambda model, engine: (
                fake.FakeBackend(engine) if model.provider == fake.PROVIDER
                else registry.open_backend(model, engine, Path())
            ),
            engine=job.engine, open_prices=open_prices, limit=SendLimit(None, drain=drain),
            stop=stop, say=say, warn=say,
        )  # fmt: skip
        while not drain.is_set():
            if not worker.work() and not ledger.count_queued(f"model.shop.{job.name}"):
                break
            drain.wait(0.02)
        return {"counts": asdict(worker.worked.counts), "set_aside": worker.worked.set_aside}


# --- processes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Child:
    """A run in a process of its own, and the file in which it says how it went."""

    process: ForkServerProcess
    report_file: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def finish(self, timeout: float = 60) -> dict[str, Any]:
        """Wait for a run that must end well; return its counts, points and messages."""
        assert self.wait(timeout) == 0, self.report_file.read_text()
        report: dict[str, Any] = json.loads(self.report_file.read_text())
        return report

    def wait(self, timeout: float = 60) -> int:
        """Wait for the end and return the exit code, negative for a signal."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, "the run does not end"
        return self.process.exitcode


class Forks:
    """Starts processes from a server that has the modules of a run imported."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["pytest", "tests.support.lean_preload"])
        # The server finds the tests' modules by this alone.
        path = os.environ.get("PYTHONPATH", "")
        if str(ROOT) not in path.split(os.pathsep):
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), path]))

    def serve(self) -> None:
        """Start the server now, with its socket in the folder for temporary files of now."""
        forkserver.ensure_running()

    def start(self, target: Callable[..., object], *args: object) -> Child:
        """Run a function in a new process; what it returns is its report."""
        self._number += 1
        report_file = self._folder / f"report_{self._number}"
        process = self.context.Process(target=_child, args=(report_file, target, args))
        process.start()
        return Child(process, report_file)

    def run(self, job: Job, kill_at: str | None = None) -> Child:
        """Start the run of one model, which may be told to die at a point."""
        return self.start(_run_reported, job, kill_at)

    def work(
        self, job: Job, at: str | None = None, number: int = signal.SIGKILL,
        clock_seconds: float = 0.0,
    ) -> Child:  # fmt: skip
        """Start a worker, which may get a signal at a point and have a clock that is wrong."""
        return self.start(_work_reported, job, at, number, clock_seconds)


def _child(report_file: Path, target: Callable[..., object], args: Sequence[object]) -> None:
    try:
        report = target(*args)
    except BaseException:
        report_file.write_text(traceback.format_exc())
        raise
    report_file.write_text(json.dumps(report))


def _run_reported(job: Job, kill_at: str | None) -> object:
    points.watch()
    points.arm(kill_at)
    messages: list[str] = []
    counts = run_job(job, say=messages.append)
    return {"counts": asdict(counts), "points": points.passed(), "messages": messages}


def _work_reported(job: Job, at: str | None, number: int, clock_seconds: float) -> object:
    points.watch()
    points.arm(at, number=number)
    right = time.time
    time.time = lambda: right() + clock_seconds
    messages: list[str] = []
    return {**work_job(job, messages.append), "points": points.passed(), "messages": messages}


def wait_for(condition: Callable[[], object], seconds: float = 30) -> None:
    """Wait until another process has done something that can only be looked at."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.01)
