"""Every line that touches dbt's insides: the plugin, the adapter's methods, the connections.

Tried with dbt-core 1.10 and 1.11. The plugin interface is called experimental by dbt, so all of it
stays in this module. Nothing heavy is imported before a project is seen to have an llm model.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dbt.adapters.base.impl import BaseAdapter
from dbt.adapters.contracts.connection import AdapterResponse
from dbt.adapters.events.logging import AdapterLogger
from dbt.adapters.factory import get_adapter_by_type
from dbt.flags import get_flags
from dbt.plugins.manager import dbt_hook, dbtPlugin
from dbt_common.events.base_types import EventLevel
from dbt_common.events.functions import fire_event
from dbt_common.events.types import Note
from dbt_common.exceptions import DbtRuntimeError

from batchsql.errors import BatchsqlError, Mistake, SpecError, WarehouseError
from batchsql.version import __version__

if TYPE_CHECKING:
    from batchsql.backends.base import StreamBackend
    from batchsql.context import RunContext
    from batchsql.declare.spec import Declaration
    from batchsql.runner import Counts, EnrichmentRun
    from batchsql.warehouse.base import Dialect, Source, Warehouse
    from batchsql.warehouse.ledger import Ledger

MATERIALIZATION = "llm"
VAR = "batchsql"
DEFAULT_LEDGER_SUFFIX = "_batchsql"
LEDGER_PREFIX = "batchsql_"
"""Before the name of each table of a ledger that shares the target's schema."""

STOP = threading.Event()
"""Set when the process is asked to stop, so that runs in dbt's worker threads end by themselves."""

_logger = AdapterLogger("batchsql")  # for the log file; what people read is a dbt note
_runs: dict[str, _OpenRun] = {}  # between their two calls
_open_runs: set[str] = set()  # those whose model may be answering now


@dataclass
class EnrichmentResponse(AdapterResponse):  # type: ignore[misc]
    """What ``run_results.json`` says of an llm model, beside dbt's own fields."""

    rows: int = 0
    new: int = 0
    reused: int = 0
    duplicates: int = 0
    ok: int = 0
    pending: int = 0
    failed: int = 0
    requests_sent: int = 0
    requests_in_batches: int = 0
    requests_ok: int = 0
    requests_failed: int = 0
    requests_borrowed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float = 0.0


@dataclass
class _OpenRun:
    """A run between its two calls from the materialization, with what must be closed after it."""

    run: EnrichmentRun
    close: Callable[[], None]


# --- the plugin -----------------------------------------------------------------------------------


class BatchsqlPlugin(dbtPlugin):  # type: ignore[misc]
    """Adds the adapter methods, and checks every llm model's declaration right after parsing."""

    def initialize(self) -> None:
        for name, method in (
            ("batchsql_enrich", _enrich),
            ("batchsql_build", _build),
            ("batchsql_finish", _finish),
        ):
            setattr(BaseAdapter, name, method)
            for adapter in _all_adapters(BaseAdapter):
                adapter._available_ = adapter._available_ | {name}
                adapter._parse_replacements_[name] = _nothing_at_parse
        _listen_for_stop()

    @dbt_hook  # type: ignore[untyped-decorator]
    def get_manifest_artifacts(self, manifest: Any) -> dict[str, Any]:
        """Check all declarations at once and mark models whose prompt file changed."""
        nodes = [node for node in manifest.nodes.values() if is_llm_model(node)]
        if nodes:
            _check_declarations(nodes, get_adapter_by_type(manifest.metadata.adapter_type).config)
        return {}


def _all_adapters(root: Any) -> Iterator[Any]:
    yield root
    for child in root.__subclasses__():
        yield from _all_adapters(child)


def _nothing_at_parse(*_args: object, **_kwargs: object) -> None:
    """Stand in for a method while dbt parses."""


def is_llm_model(node: Any) -> bool:
    """Return whether a manifest node is a model with ``materialized='llm'``."""
    return bool(node.resource_type == "model" and node.config.materialized == MATERIALIZATION)


def _check_declarations(nodes: list[Any], config: Any) -> None:
    problems = []
    for node in sorted(nodes, key=lambda each: str(each.name)):
        try:
            declaration = read_declaration(node, config)
        except SpecError as error:
            problems.append(str(error))
            continue
        from batchsql.declare.keys import digest

        # dbt compares this with the state's manifest under --select state:modified.
        node.unrendered_config["batchsql_prompt_sha256"] = digest(declaration.template.encode())
        for interruption in declaration.prompt.interrupts():
            _logger.debug(f"{node.name}: {describe_interruption(interruption)}")
    if problems:
        raise DbtRuntimeError("\n".join(problems))


def describe_interruption(interruption: Any) -> str:
    """Say which column keeps a part of the prompt from being shared, and what to do."""
    return (
        f"the column {interruption.name} on line {interruption.line} of the prompt comes before "
        f"{interruption.static_chars:,} characters that are the same for every row; moved to the "
        "end, they could be shared between requests"
    )


def project_root_of(node: Any, config: Any) -> Path:
    """Return the directory of the project or package that a node belongs to."""
    root = Path(config.project_root)
    if node.package_name == config.project_name:
        return root
    return root / str(config.packages_install_path) / str(node.package_name)


def overrides_of(config: Any) -> object:
    """Return the ``batchsql`` var, from the command line or else from ``dbt_project.yml``."""
    return {**config.vars.to_dict(), **(config.cli_vars or {})}.get(VAR)


def read_declaration(node: Any, config: Any) -> Declaration:
    """Read the declaration of an llm model under the configuration of the running project.

    Raises:
        SpecError: with every mistake found.
    """
    from batchsql.backends.registry import check_model
    from batchsql.declare.spec import parse_declaration
    from batchsql.placement import place
    from batchsql.plan.cost import check_prices

    meta = node.config.meta or {}
    mistakes = []
    if "macro.dbt.is_incremental" in node.depends_on.macros:
        mistakes.append(
            Mistake(
                "is_incremental()",
                "is always false in an llm model, so its filter would be ignored; write "
                "batchsql.is_incremental()",
            )
        )
    declaration = parse_declaration(
        str(node.name),
        meta.get("llm"),
        defaults=meta.get("llm_defaults"),
        overrides=overrides_of(config),
        unique_key=node.config.unique_key,
        project_root=project_root_of(node, config),
        check_model=check_model,
        check_prices=check_prices,
        more_mistakes=mistakes,
    )
    return place(declaration)


class InterruptedRunError(DbtRuntimeError, KeyboardInterrupt):  # type: ignore[misc]
    """Ctrl-C or SIGTERM, which dbt handles as ever but reports without a stack trace."""


def _listen_for_stop() -> None:
    """Let Ctrl-C and SIGTERM reach runs in worker threads.

    While no run is open, for example after dbt has returned to a program that called it, a signal
    does what it did before.
    """
    STOP.clear()
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        before = signal.getsignal(number)
        if getattr(before, "is_batchsql", False):
            continue

        def handle(signum: int, frame: Any, before: Any = before) -> None:
            if _open_runs:
                STOP.set()
                if not callable(before) or before is signal.default_int_handler:
                    _interrupt()
            if callable(before):
                before(signum, frame)
            elif before == signal.SIG_DFL:
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)

        handle.is_batchsql = True  # type: ignore[attr-defined]
        signal.signal(number, handle)


def _interrupt() -> NoReturn:
    # With --single-threaded a node would catch an ordinary error, and the next one start.
    if get_flags().SINGLE_THREADED:
        raise KeyboardInterrupt
    raise InterruptedRunError("interrupted; what was answered until now is kept")


# --- the adapter's methods ------------------------------------------------------------------------


def _enrich(
    self: Any,
    model: Mapping[str, Any],
    sql: str,
    *,
    macros_version: str,
    invocation_id: str,
    existing: Any = None,
    current: Any = None,
    is_empty: bool = False,
) -> dict[str, Any]:
    """Answer what is new for an llm model, and say what dbt is to build.

    Args:
        model: the node.
        sql: its compiled SELECT.
        macros_version: the version of the macros that call.
        invocation_id: dbt's.
        existing: the table that an incremental run would merge into.
        current: the table as it is, whatever becomes of it.
        is_empty: whether dbt was given ``--empty``.

    Returns:
        ``run_id``, ``sql`` (the SELECT of the finished table), ``incremental`` (whether to merge it
        into ``existing`` instead of replacing it) and ``is_held`` (whether the table stays as it
        is, since rows are pending).
    """
    with _as_dbt_error(model["name"]):
        if macros_version != __version__:
            raise BatchsqlError(
                f"the macros of the batchsql package have version {macros_version}, the installed "
                f"batchsql has {__version__}; install the same version of both, then run dbt deps"
            )
        node = _Node.of(model)
        declaration = read_declaration(node, self.config)
        is_incremental = declaration.incremental and existing is not None
        context, close = open_context(
            self, declaration, enrichment=str(model["unique_id"]), invocation_id=invocation_id,
            project_root=project_root_of(node, self.config), column_types=node.column_types,
        )  # fmt: skip
        from batchsql.runner import EnrichmentRun
        from batchsql.warehouse.base import bare_select

        run = EnrichmentRun(declaration, context)
        select_sql = bare_select(sql, context.dialect.name)
        try:
            # A transaction that a pre-hook began would not see what the ledger commits meanwhile.
            _commit(self)
            if is_empty:
                run.candidate.bind(select_sql)
                close()
                # Rows written into the SELECT itself would be merged over answered ones.
                nothing = " where 1 = 0" if is_incremental else ""
                empty_sql = f"select * from (\n{run.candidate.empty_sql(select_sql)}\n) e{nothing}"
                return {
                    "run_id": None, "sql": empty_sql, "incremental": is_incremental,
                    "is_held": False,
                }  # fmt: skip
            run_enrichment(
                run, select_sql, existing.render() if is_incremental else None,
                None if current is None else current.render(),
            )  # fmt: skip
            is_held = _decide_pending(run, current)
        except BaseException:
            close()
            raise
        _runs[run.run_id] = _OpenRun(run, close)
        return {
            "run_id": run.run_id, "sql": run.candidate.build_sql(), "incremental": is_incremental,
            "is_held": is_held,
        }  # fmt: skip


def _decide_pending(run: EnrichmentRun, current: Any) -> bool:
    """Return whether the table stays as it is while rows are pending, as ``on_pending`` says.

    Raises:
        PendingRowsError: the model is to fail then.
    """
    from batchsql.errors import PendingRowsError
    from batchsql.types import OnPending

    pending, choice = run.counts.pending, run.declaration.on_pending
    if not pending or choice is OnPending.BUILD:
        return False
    if choice is OnPending.HOLD:
        said = "the table stays as it was" if current is not None else "there is no table to keep"
        run.context.info(f"{pending:,} rows are pending; {said} (on_pending: hold)")
        return current is not None
    error = PendingRowsError(
        f"{run.declaration.subject}: {pending:,} rows are pending, and on_pending is fail; "
        f"{_who_answers(run)}, or wait lets the run wait for them"
    )
    run.finish(str(error))
    raise error


def _who_answers(run: EnrichmentRun) -> str:
    from batchsql.types import Runner

    if run.declaration.runner is Runner.DETACHED:
        return "batchsql work answers what is queued"
    return "batchsql collect brings the answers of batches"


def run_enrichment(
    run: EnrichmentRun, select_sql: str, target: str | None, current: str | None = None
) -> None:
    """Take a run from the SELECT to answers that add up; on any error close it and say why.

    Args:
        run: the run.
        select_sql: the model's SELECT.
        target: the table that an incremental run merges into.
        current: the model's table as it is now, if there is one.
    """
    source = run.context.source
    _open_runs.add(run.run_id)
    try:
        run.collect()
        run.prepare(select_sql, target)
        run.record()
        counts = run.counts
        if counts.requests_wanted:
            run.check_ledger_is_not_lost(current)
            run.context.info(
                f"{counts.rows:,} rows: {counts.reused:,} answered before, {counts.new:,} new with "
                f"{counts.requests_wanted:,} requests to send"
            )
            source.release()
            try:
                run.ship()
            finally:
                source.resume()
        else:
            run.drop_queue()
        run.reconcile()
    except BaseException as error:
        # The first error is the one to tell, whatever else fails while closing.
        with contextlib.suppress(Exception):
            run.finish(str(error) or type(error).__name__)
        raise
    finally:
        run.close()
        _open_runs.discard(run.run_id)


def _build(self: Any, run_id: str | None, builder: Callable[[], object]) -> object:
    """Let dbt build the table. When that fails, close the run before the error goes on its way."""
    try:
        return builder()
    except BaseException as error:
        open_run = _runs.pop(run_id, None) if run_id else None
        if open_run is not None:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                _rollback(self)
                open_run.run.finish(str(error) or type(error).__name__)
            open_run.close()
        raise


def _finish(self: Any, run_id: str | None, model: Mapping[str, Any]) -> EnrichmentResponse:
    """Close a run after its table is built; return what dbt is to report of it."""
    with _as_dbt_error(model["name"]):
        if run_id is None:
            return EnrichmentResponse(_message="LLM (nothing sent: --empty)")
        open_run = _runs.pop(run_id)
        try:
            open_run.run.finish()
            open_run.run.tell_completion()
        finally:
            open_run.close()
        return _response(open_run.run.counts)


def _response(counts: Counts) -> EnrichmentResponse:
    parts = [f"{counts.rows:,} rows", f"{counts.requests_sent:,} requests"]
    parts += [
        f"{value:,} {name}"
        for name, value in (("pending", counts.pending), ("failed", counts.failed))
        if value
    ]
    if counts.cost_usd:
        parts.append(f"{counts.cost_usd:.4f} USD")
    shared = {field.name for field in fields(counts)} & {f.name for f in fields(EnrichmentResponse)}
    return EnrichmentResponse(
        _message=f"LLM {', '.join(parts)}",
        rows_affected=counts.rows,
        **{name: getattr(counts, name) for name in shared},
    )


@contextlib.contextmanager
def _as_dbt_error(name: str) -> Iterator[None]:
    """Turn our errors into dbt's, which prints them without a stack trace."""
    try:
        yield
    except DbtRuntimeError:
        raise
    except BatchsqlError as error:
        message = str(error)
        prefix = "" if message.startswith(name) else f"{name}: "
        raise DbtRuntimeError(f"{prefix}{message}") from error
    except Exception as error:
        _logger.debug(traceback.format_exc())
        raise DbtRuntimeError(
            f"{name}: {type(error).__name__}: {error}; dbt's log file holds the details"
        ) from error


@dataclass(frozen=True, slots=True)
class _Node:
    """The parts of the materialization's ``model`` that look like a manifest node."""

    name: str
    package_name: str
    config: Any
    depends_on: Any
    column_types: Mapping[str, str]

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> _Node:
        config = model["config"]
        return cls(
            name=model["name"],
            package_name=model["package_name"],
            config=_Fields(meta=config.get("meta"), unique_key=config.get("unique_key")),
            depends_on=_Fields(macros=model["depends_on"]["macros"]),
            column_types={
                name: column["data_type"]
                for name, column in model["columns"].items()
                if column.get("data_type")
            },
        )


class _Fields:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


# --- connections ----------------------------------------------------------------------------------


def open_context(
    adapter: Any,
    declaration: Declaration,
    *,
    enrichment: str,
    invocation_id: str,
    project_root: Path,
    column_types: Mapping[str, str],
) -> tuple[RunContext, Callable[[], None]]:
    """Open what a run needs on a dbt adapter; return it and the function that closes it.

    Raises:
        WarehouseError: there is no support for this adapter.
    """
    from batchsql.backends.registry import open_batch_backend
    from batchsql.context import RunContext
    from batchsql.pricing import open_prices

    source, warehouse, dialect = open_connections(adapter)
    credentials = adapter.connections.profile.credentials

    def tell(level: EventLevel, message: str) -> None:
        fire_event(Note(msg=f"{declaration.subject}: {message}"), level=level)

    context = RunContext(
        source=source,
        warehouse=warehouse,
        dialect=dialect,
        ledger=open_ledger(warehouse, credentials.schema, declaration.ledger_schema),
        open_backend=lambda d: _open_checked(d, project_root),
        open_ledger=lambda schema: open_lender(warehouse, schema),
        open_batch_backend=lambda model, engine: open_batch_backend(model, engine, project_root),
        open_prices=open_prices,
        enrichment=enrichment,
        invocation_id=invocation_id,
        stop=STOP,
        info=lambda message: tell(EventLevel.INFO, message),
        warn=lambda message: tell(EventLevel.WARN, message),
        column_types=column_types,
    )
    return context, warehouse.close


def _open_checked(declaration: Declaration, project_root: Path) -> StreamBackend:
    from batchsql.backends.registry import open_backend
    from batchsql.placement import check_egress

    check_egress(declaration)
    return open_backend(declaration.model, declaration.engine, project_root)


def open_ledger(warehouse: Warehouse, target_schema: str, ledger_schema: str | None) -> Ledger:
    """Return the ledger of a target: in a schema of its own, or prefixed in the target's."""
    from batchsql.warehouse.ledger import Ledger

    schema = ledger_schema or f"{target_schema}{DEFAULT_LEDGER_SUFFIX}"
    return Ledger(warehouse, schema, LEDGER_PREFIX if schema == target_schema else "")


def open_lender(warehouse: Warehouse, schema: str) -> Ledger:
    """Return the ledger that ``read_from`` means by a schema, prefixed or not."""
    from batchsql.warehouse.ledger import Ledger

    # The prefixed one first, since a table of the user's own may be named meta.
    prefixed = Ledger(warehouse, schema, LEDGER_PREFIX)
    return prefixed if prefixed.exists() else Ledger(warehouse, schema)


def open_connections(adapter: Any) -> tuple[Source, Warehouse, Dialect]:
    """Open dbt's connection as a source and one of our own for the ledger.

    Raises:
        WarehouseError: there is no support for this adapter.
    """
    kind = adapter.type()
    if kind == "duckdb":
        return _open_duckdb(adapter)
    if kind == "postgres":
        return _open_postgres(adapter)
    raise WarehouseError(
        f"the adapter {kind} is not supported; batchsql works on duckdb and postgres"
    )


def _query(adapter: Any) -> Callable[[str], Any]:
    """Run SQL on dbt's connection the way dbt does, so that its log shows it."""
    return lambda sql: adapter.connections.add_query(sql, auto_begin=False)[1]


def _commit(adapter: Any) -> None:
    connection = adapter.connections.get_thread_connection()
    if connection.transaction_open:
        adapter.connections.commit()
    else:  # the driver may have begun a transaction that dbt does not know of
        commit = getattr(connection.handle, "commit", None)
        if commit is not None:
            commit()


def _rollback(adapter: Any) -> None:
    """Leave a transaction that an error has spoilt."""
    connection = adapter.connections.get_thread_connection()
    if connection.transaction_open:
        adapter.connections.rollback_if_open()
    else:
        with contextlib.suppress(Exception):  # DuckDB complains when there is none
            connection.handle.rollback()


def _open_duckdb(adapter: Any) -> tuple[Source, Warehouse, Dialect]:
    from batchsql.warehouse.duckdb import DuckDBDialect, DuckDBSource, DuckDBWarehouse

    adapter.execute("select 1")  # dbt opens its connection, and so the environment, lazily
    environment = type(adapter.connections).env()
    handle = environment.handle()
    database = adapter.connections.profile.credentials.database
    source = DuckDBSource(
        query=_query(adapter),
        cursor=lambda: adapter.connections.get_thread_connection().handle.cursor(),
        commit=lambda: _commit(adapter),
    )
    return source, DuckDBWarehouse(handle.cursor(), database, handle.close), DuckDBDialect()


def _open_postgres(adapter: Any) -> tuple[Source, Warehouse, Dialect]:
    from batchsql.warehouse.postgres import (
        PostgresDialect,
        PostgresSource,
        PostgresWarehouse,
        connect_adbc,
    )

    connections = adapter.connections
    credentials = connections.profile.credentials
    name = connections.get_thread_connection().name
    conninfo = _postgres_conninfo(connections.get_thread_connection().handle, credentials)

    def connect() -> Any:
        return connect_adbc(conninfo, credentials.role)

    source = PostgresSource(
        query=_query(adapter),
        commit=lambda: _commit(adapter),
        release=adapter.release_connection,
        resume=lambda: adapter.acquire_connection(name),
        connect=connect,
    )
    return source, PostgresWarehouse(connect, credentials.database), PostgresDialect()


def _postgres_conninfo(handle: Any, credentials: Any) -> str:
    """Return a connection string for what dbt's own connection uses, all options included."""
    import psycopg2.extensions

    parameters = dict(handle.get_dsn_parameters())
    parameters["password"] = credentials.password
    known = {key: value for key, value in parameters.items() if value not in (None, "")}
    return str(psycopg2.extensions.make_dsn(**known))
