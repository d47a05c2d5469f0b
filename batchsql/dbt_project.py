"""A dbt project opened by the command line: profile, connection, compiled models, ledgers.

Like ``dbt.py`` it touches dbt's insides: what ``dbt run`` does for a model inside dbt is done here
without its process around it. Tried with dbt-core 1.10 and 1.11.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import orjson
from dbt.adapters.factory import adapter_management, get_adapter, register_adapter
from dbt.cli.flags import Flags, args_to_context
from dbt.cli.main import dbtRunner
from dbt.config.runtime import RuntimeConfig, load_profile, load_project
from dbt.events.logging import setup_event_logger
from dbt.flags import set_flags
from dbt.mp_context import get_mp_context
from dbt_common.context import set_invocation_context
from dbt_common.exceptions import DbtBaseException
from dbt_common.invocation import get_invocation_id

from batchsql.backends.registry import has_batches, open_batch_backend
from batchsql.collecting import Collector, shard_settings
from batchsql.dbt import (
    DEFAULT_LEDGER_SUFFIX,
    MATERIALIZATION,
    describe_interruption,
    is_llm_model,
    open_connections,
    open_context,
    open_ledger,
    overrides_of,
    project_root_of,
    read_declaration,
)
from batchsql.declare.routing import OnComplete, read_on_complete
from batchsql.errors import BatchsqlError
from batchsql.pricing import open_prices
from batchsql.recovering import OnBatch, Recovered, Wanted, recover
from batchsql.replaying import DeadSpec, Instead, NewPrompt, Replay, plan_rendered, plan_stored
from batchsql.runner import EnrichmentRun
from batchsql.warehouse.base import bare_select, literal
from batchsql.warehouse.report import LedgerReport
from batchsql.warehouse.shards import process_id

if TYPE_CHECKING:
    from batchsql.declare.spec import Declaration
    from batchsql.warehouse.ledger import Ledger

_LOCK = re.compile(
    r'Could not set lock on file "(?P<file>[^"]+)"'
    r"(?:.*?held in (?P<program>\S+) \(PID (?P<pid>\d+)\))?",
    re.DOTALL,
)
_SILENT = ("--quiet", "--no-print", "--log-level", "none")
_KIND_OF_ERROR = re.compile(r"\A[A-Z]\w+ Error\n")


@dataclass(frozen=True, slots=True)
class ProjectOptions:
    """What says which project, profile and target are meant; None leaves it to dbt's own rules."""

    project_dir: Path
    profiles_dir: Path | None = None
    profile: str | None = None
    target: str | None = None
    variables: str | None = None

    def arguments(self) -> list[str]:
        """Return them as arguments of a dbt command."""
        given = (
            ("--project-dir", self.project_dir.resolve()),
            ("--profiles-dir", self.profiles_dir and self.profiles_dir.resolve()),
            ("--profile", self.profile),
            ("--target", self.target),
            ("--vars", self.variables),
        )
        return [part for name, value in given if value is not None for part in (name, str(value))]


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What a run of one llm model would send now. Rows and requests are counted apart."""

    name: str
    enrichment: str
    model: str = ""
    rows: int = 0
    reused: int = 0
    new: int = 0
    duplicates: int = 0
    failed: int = 0
    requests: int = 0
    borrowable: int = 0
    in_progress: int = 0
    in_batches: int = 0
    limit: int | None = None
    warnings: tuple[str, ...] = ()
    error: str | None = None

    @property
    def to_send(self) -> int:
        """How many requests would leave: not those in batches already, and within the limit."""
        wanted = max(0, self.requests - self.borrowable - self.in_batches)
        return wanted if self.limit is None else min(wanted, self.limit)


# --- errors ---------------------------------------------------------------------------------------


def explain_error(error: BaseException) -> str:
    """Return what to tell people of an error: dbt's and our own words, or its class and text."""
    each: BaseException | None = error
    while each is not None:
        if found := _LOCK.search(str(each)):
            return _explain_lock(found)
        each = each.__cause__ or each.__context__
    if isinstance(error, BatchsqlError):
        return str(error)
    if isinstance(error, DbtBaseException):
        return _without_kind(str(error))
    return f"{type(error).__name__}: {error}"


def is_file_lock(error: BaseException) -> bool:
    """Return whether an error says that another process has the DuckDB file open."""
    each: BaseException | None = error
    while each is not None:
        if _LOCK.search(str(each)):
            return True
        each = each.__cause__ or each.__context__
    return False


def _explain_lock(found: re.Match[str]) -> str:
    holder = (
        f"the process {found['pid']} ({found['program']})" if found["pid"] else "another process"
    )
    return (
        f"the DuckDB file {found['file']} is open in {holder}, and DuckDB lets one process at a "
        "time use a file; wait until it ends or close it, then try again"
    )


def _without_kind(message: str) -> str:
    """Leave out dbt's first line where it says nothing but the kind of error."""
    body = _KIND_OF_ERROR.sub("", message)
    return textwrap.dedent(body).strip() if body != message else message.strip()


# --- the project ----------------------------------------------------------------------------------


@contextlib.contextmanager
def open_project(options: ProjectOptions) -> Iterator[OpenProject]:
    """Open a project as dbt would, connected to its target when it is first asked for something.

    Raises:
        DbtBaseException: the project or its profile cannot be read.
    """
    set_invocation_context(dict(os.environ))
    flags = Flags(args_to_context(["compile", *_SILENT, *options.arguments()]))
    set_flags(flags)
    setup_event_logger(flags)  # what dbt has to say goes to its log file, as in a run
    # Paths in the flags start where the user stands, so they are read before the directory changes.
    profile = load_profile(flags.PROJECT_DIR, flags.VARS, flags.PROFILE, flags.TARGET)
    project = load_project(flags.PROJECT_DIR, flags.VERSION_CHECK, profile, flags.VARS)
    config = RuntimeConfig.from_parts(project, profile, flags)
    # dbt's tasks run in the project's directory; a DuckDB file's path may start there.
    with _working_directory(Path(config.project_root)), adapter_management():
        register_adapter(config, get_mp_context())
        yield OpenProject(config, get_adapter(config))


@contextlib.contextmanager
def _working_directory(path: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


class OpenProject:
    """A project whose profile and adapter are ready."""

    def __init__(self, config: Any, adapter: Any) -> None:
        self._config = config
        self._adapter = adapter

    @contextlib.contextmanager
    def ledgers(self) -> Iterator[list[Ledger]]:
        """Open the ledgers of this target that exist: the default one, and those models name.

        The models' own come from the last ``manifest.json``; without one, only the default one is
        found.

        Raises:
            LedgerVersionError: a newer batchsql wrote one of them.
        """
        if not self._has_database():
            yield []
            return
        with self._adapter.connection_named("batchsql"):
            _, warehouse, _ = open_connections(self._adapter)
            try:
                target_schema = self._config.credentials.schema
                found = {}
                for schema in self._ledger_schemas():
                    ledger = open_ledger(warehouse, target_schema, schema)
                    if ledger.schema not in found and ledger.exists():
                        ledger.check_version()
                        found[ledger.schema] = ledger
                yield list(found.values())
            finally:
                warehouse.close()

    @contextlib.contextmanager
    def ledger(self, schema: str | None, *, must_exist: bool) -> Iterator[Ledger]:
        """Open one ledger of this target.

        Args:
            schema: the schema that holds it; None for the one that the models use.
            must_exist: whether it is an error when there is none yet.

        Raises:
            BatchsqlError: the models use several, or there is none.
        """
        target_schema = self._config.credentials.schema
        if schema is None:
            schemas = list(dict.fromkeys(self._ledger_schemas()))
            schema = schemas[0]
            if len(schemas) > 1:
                names = ", ".join(each or target_schema + DEFAULT_LEDGER_SUFFIX for each in schemas)
                raise BatchsqlError(
                    f"the models of this target use several ledgers ({names}); say with "
                    "--ledger-schema which one is meant"
                )
        missing = BatchsqlError(
            f"there is no ledger in the schema {schema or target_schema + DEFAULT_LEDGER_SUFFIX} "
            "of this target; dbt run makes one, and --ledger-schema names another"
        )
        if must_exist and not self._has_database():
            raise missing
        with self._adapter.connection_named("batchsql"):
            _, warehouse, _ = open_connections(self._adapter)
            try:
                ledger = open_ledger(warehouse, target_schema, schema)
                if must_exist and not ledger.exists():
                    raise missing
                yield ledger
            finally:
                warehouse.close()

    def recover(
        self, nodes: Sequence[Any], since: datetime, on_batch: OnBatch, say: Callable[[str], None]
    ) -> Recovered:
        """Bring back what providers' batches hold for models that were planned; see ``recover``."""
        groups: dict[tuple[str | None, Path], list[tuple[str, Declaration]]] = {}
        for node in nodes:
            declaration = read_declaration(node, self._config)
            place = declaration.ledger_schema, project_root_of(node, self._config)
            groups.setdefault(place, []).append((str(node.unique_id), declaration))
        found = Recovered()
        for (schema, root), members in groups.items():
            with self.ledger(schema or self._ledger_schemas()[0], must_exist=True) as ledger:
                last = {row.enrichment: row for row in LedgerReport(ledger).read_enrichments()}
                wanted = [
                    Wanted(
                        enrichment, last[enrichment].run_id, last[enrichment].spec_version,
                        declaration.model, declaration.engine, shard_settings(declaration),
                    )
                    for enrichment, declaration in members
                ]  # fmt: skip
                collector = Collector(
                    ledger,
                    functools.partial(open_batch_backend, project_root=root),
                    open_prices,
                    owner=f"{process_id()}:recover",
                    say=say,
                    warn=say,
                )
                try:
                    found += recover(ledger, wanted, collector, since, on_batch)
                finally:
                    collector.close()
        return found

    def _has_database(self) -> bool:
        """Whether there is a database to connect to: connecting to a DuckDB file would make it."""
        credentials = self._config.credentials
        if credentials.type != "duckdb":
            return True
        path = str(credentials.path)
        return path.startswith(("md:", "motherduck:")) or "://" in path or Path(path).exists()

    def _ledger_schemas(self) -> list[str | None]:
        overrides = overrides_of(self._config)
        if isinstance(overrides, Mapping) and overrides.get("ledger_schema"):
            return [str(overrides["ledger_schema"])]
        schemas: list[str | None] = [None]
        for _, layers in self._declared():
            for layer in layers:
                if isinstance(layer.get("ledger_schema"), str):
                    schemas.append(layer["ledger_schema"])
        return schemas

    def _declared(self) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
        """Yield each llm model of the last manifest with its defaults and its declaration."""
        for unique_id, node in (self._manifest_nodes or {}).items():
            config = node.get("config") or {}
            if config.get("materialized") != MATERIALIZATION:
                continue
            layers = [(config.get("meta") or {}).get(key) for key in ("llm_defaults", "llm")]
            yield unique_id, [layer for layer in layers if isinstance(layer, Mapping)]

    @functools.cached_property
    def _manifest_nodes(self) -> Mapping[str, Any] | None:
        """The nodes of the last manifest, or None where there is none."""
        manifest = Path(self._config.project_target_path) / "manifest.json"
        if not manifest.is_file():
            return None
        nodes: Mapping[str, Any] = orjson.loads(manifest.read_bytes())["nodes"]
        return nodes

    @property
    def has_foreign_writers(self) -> bool:
        """Whether other processes can write into the warehouse while this one has it open."""
        return str(self._config.credentials.type) != "duckdb"

    @property
    def has_manifest(self) -> bool:
        """Whether there is a manifest that says what the models declare."""
        return self._manifest_nodes is not None

    def _read_declaration(self, enrichment: str) -> Declaration | None:
        """Return what an llm model of the last manifest declares, or None where it has no such.

        Raises:
            SpecError: the declaration is wrong.
            BatchsqlError: there is no manifest.
        """
        if self._manifest_nodes is None:
            raise BatchsqlError(
                "there is no manifest.json that says what the models declare, such as whether rows "
                "may leave; run dbt parse"
            )
        node = self._manifest_nodes.get(enrichment)
        if node is None or node["config"].get("materialized") != MATERIALIZATION:
            return None
        config = SimpleNamespace(
            meta=node["config"].get("meta"), unique_key=node["config"].get("unique_key")
        )
        depends_on = SimpleNamespace(macros=node["depends_on"]["macros"])
        return read_declaration(
            SimpleNamespace(
                name=node["name"], package_name=node["package_name"], config=config,
                depends_on=depends_on,
            ),
            self._config,
        )  # fmt: skip

    def read_on_complete(self) -> dict[str, OnComplete]:
        """Return what each llm model of the last manifest wants to be told of its completion."""
        found = {}
        for unique_id, layers in self._declared():
            overrides = overrides_of(self._config)
            if isinstance(overrides, Mapping):
                layers = [*layers, overrides]
            given = [layer["on_complete"] for layer in layers if "on_complete" in layer]
            with contextlib.suppress(ValueError):  # dbt run says what is wrong with it
                told = read_on_complete(given[-1]) if given else None
                if told is not None:
                    found[unique_id] = told
        return found

    @property
    def root(self) -> Path:
        """The project's folder."""
        return Path(self._config.project_root)

    def has_batches(self, node: Any) -> bool:
        """Return whether the provider of a model offers batches."""
        declaration = read_declaration(node, self._config)
        return has_batches(declaration.model, declaration.engine)

    def plan(self, node: Any) -> ModelPlan:
        """Find and record what a run of a compiled model would send. Sends nothing."""
        name = str(node.name)
        try:
            with self._adapter.connection_named(f"batchsql.{name}"):
                return self._plan(node)
        except BatchsqlError as error:
            message = str(error)
        except DbtBaseException as error:
            message = (
                f"{name}: {explain_error(error)}\n(plan reads the tables that the model selects "
                f"from; to build them: dbt run --select +{name} --exclude {name})"
            )
        return ModelPlan(name, str(node.unique_id), error=message)

    def _plan(self, node: Any) -> ModelPlan:
        with self._recorded(node) as (run, warnings):
            plan = self._read_plan(node, run)
        return replace(plan, warnings=tuple(warnings))

    @contextlib.contextmanager
    def _recorded(self, node: Any) -> Iterator[tuple[EnrichmentRun, list[str]]]:
        """Find and record what a run of a compiled model would send, and give the run.

        The run's candidate is there until the block ends. Its warnings come with it.
        """
        declaration = read_declaration(node, self._config)
        warnings = [describe_interruption(each) for each in declaration.prompt.interrupts()]
        context, close = open_context(
            self._adapter,
            declaration,
            enrichment=str(node.unique_id),
            invocation_id=str(get_invocation_id()),
            project_root=project_root_of(node, self._config),
            column_types={
                column.name: column.data_type
                for column in node.columns.values()
                if column.data_type
            },
        )
        context = replace(context, info=lambda message: None, warn=warnings.append)
        run = EnrichmentRun(declaration, context)
        try:
            try:
                run.prepare(
                    bare_select(node.compiled_code, context.dialect.name),
                    self._merge_target(node, declaration),
                )
                run.record()
                run.reconcile()
                yield run, warnings
            except BaseException as error:
                # The first error is the one to tell, whatever else fails while closing.
                with contextlib.suppress(Exception):
                    run.finish(str(error) or type(error).__name__)
                raise
            run.finish(state="planned")
        finally:
            close()

    def plan_stored(self, ledger: Ledger, spec: DeadSpec, instead: Instead) -> Replay | None:
        """Plan to ask dead letters as they stand in the ledger; None where their models are gone.

        Raises:
            SpecError: a declaration is wrong, or the other model refuses an option.
            SystemicError: one of the models that share these requests lets no row leave.
            BatchsqlError: there is no manifest, so nobody knows whether rows may leave.
        """
        sharing = [
            row.enrichment
            for row in LedgerReport(ledger).read_enrichments()
            if row.spec_version == spec.spec_version
        ]
        declared = {name: self._read_declaration(name) for name in sharing}
        plans = [
            plan_stored(ledger, name, spec.spec_version, each, spec.dead, instead)
            for name, each in declared.items()
            if each is not None
        ]
        return next((plan for plan in plans if plan.enrichment in spec.enrichments), None)

    def plan_rendered(self, node: Any, new: NewPrompt, instead: Instead, keys: set[str]) -> Replay:
        """Plan to ask dead letters with another prompt, from a compiled model's rows as they are.

        Raises:
            SpecError: the prompt does not fit the columns, or the model not its options.
            SystemicError: the rows may not leave.
            DataError: the prompt cannot be rendered for a row.
        """
        with (
            self._adapter.connection_named(f"batchsql.{node.name}"),
            self._recorded(node) as (run, _),
        ):
            return plan_rendered(run, new, instead, keys)

    def _read_plan(self, node: Any, run: EnrichmentRun) -> ModelPlan:
        ledger, counts = run.context.ledger, run.counts
        borrowable = in_progress = in_batches = 0
        if counts.requests_wanted:
            wanted = ledger.count_wanted()
            in_progress, in_batches = wanted.elsewhere, wanted.in_batch
            borrowable = ledger.count_borrowable(
                [run.context.open_ledger(schema) for schema in run.declaration.read_from]
            )
        return ModelPlan(
            name=str(node.name),
            enrichment=str(node.unique_id),
            model=str(run.declaration.model),
            rows=counts.rows,
            reused=counts.reused,
            new=counts.new,
            duplicates=counts.duplicates,
            failed=counts.failed,
            requests=counts.requests_wanted,
            borrowable=borrowable,
            in_progress=in_progress,
            in_batches=in_batches,
            limit=run.declaration.limit,
        )

    def _merge_target(self, node: Any, declaration: Declaration) -> str | None:
        """Return the table that a run would merge into, if the model is incremental and has one."""
        if not declaration.incremental or node.config.full_refresh:
            return None
        place = [("catalog", node.database), ("schema", node.schema), ("name", node.alias)]
        where = " and ".join(
            f"lower(table_{part}) = lower({literal(str(value))})" for part, value in place if value
        )
        _, table = self._adapter.execute(
            f"select count(*) from information_schema.tables where {where} "
            "and table_type = 'BASE TABLE'",
            fetch=True,
        )
        return str(node.relation_name) if table.rows[0][0] else None


# --- plan -----------------------------------------------------------------------------------------


def plan_models(
    options: ProjectOptions, select: str | None, on_step: Callable[[str], None]
) -> list[ModelPlan]:
    """Plan the selected llm models, from their newest files, in the order in which dbt runs them.

    A model that cannot be planned has its error in its plan; the others are planned all the same.

    Args:
        options: the project.
        select: dbt's selection syntax, or None for every llm model.
        on_step: told what is being done.

    Raises:
        DbtBaseException: the project cannot be parsed, or a declaration is wrong.
    """
    on_step("compiling")
    nodes, failed = _compile(options, select)
    plans = []
    if nodes:
        with open_project(options) as project:
            for number, node in enumerate(nodes, start=1):
                on_step(f"{node.name} ({number} of {len(nodes)})")
                plans.append(project.plan(node))
    return [*plans, *failed]


def select_models(options: ProjectOptions, select: str) -> list[str]:
    """Return the unique ids of the selected llm models.

    Raises:
        DbtBaseException: the project cannot be parsed, or a declaration is wrong.
    """
    criteria = [f"{each},config.materialized:{MATERIALIZATION}" for each in select.split()]
    result = dbtRunner().invoke(
        ["ls", *_SILENT, "--no-write-json", *options.arguments(), "--output", "json",
         "--output-keys", "unique_id", "--select", *criteria]
    )  # fmt: skip
    if result.exception is not None:
        raise result.exception
    lines: Sequence[str] = result.result or ()
    return [str(orjson.loads(line)["unique_id"]) for line in lines]


def _compile(options: ProjectOptions, select: str | None) -> tuple[list[Any], list[ModelPlan]]:
    only_llm = f"config.materialized:{MATERIALIZATION}"
    criteria = [f"{each},{only_llm}" for each in select.split()] if select else [only_llm]
    result = dbtRunner().invoke(
        # Without artifacts: `dbt retry` and result selectors look at those of the last run.
        ["compile", *_SILENT, "--no-write-json", *options.arguments(), "--select", *criteria]
    )
    if result.exception is not None:
        raise result.exception
    nodes, failed = [], []
    results: Sequence[Any] = getattr(result.result, "results", ())
    for each in results:
        node = each.node
        if not is_llm_model(node):
            continue
        if str(each.status) in ("success", "pass") and node.compiled_code:
            nodes.append(node)
        else:
            message = _without_kind(str(each.message or f"dbt calls it {each.status}"))
            failed.append(ModelPlan(node.name, node.unique_id, error=f"{node.name}: {message}"))
    return nodes, failed


# --- recover --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recovery:
    """What came of ``recover``: the models whose batches were looked for, and what was found.

    ``without_batches`` names models whose provider offers none; ``failed`` are those that could not
    be planned.
    """

    names: tuple[str, ...]
    without_batches: tuple[str, ...]
    failed: tuple[ModelPlan, ...]
    found: Recovered


def recover_models(
    options: ProjectOptions, select: str, since: datetime, on_step: Callable[[str], None],
    say: Callable[[str], None],
) -> Recovery:  # fmt: skip
    """Plan the selected llm models, so that their requests are known, and bring back their answers.

    Args:
        options: the project.
        select: dbt's selection syntax.
        since: batches created before are not looked at.
        on_step: told what is being done.
        say: told what came of each batch.

    Raises:
        DbtBaseException: the project cannot be parsed, or a declaration is wrong.
        BackendError: a provider cannot be asked for its batches.
    """
    on_step("compiling")
    nodes, failed = _compile(options, select)
    names, without = [], []
    found = Recovered()
    if nodes:
        with open_project(options) as project:
            planned = []
            for number, node in enumerate(nodes, start=1):
                on_step(f"planning {node.name} ({number} of {len(nodes)})")
                if not project.has_batches(node):
                    without.append(str(node.name))
                    continue
                plan = project.plan(node)
                if plan.error is None:
                    planned.append(node)
                    names.append(str(node.name))
                else:
                    failed.append(plan)
            on_step("listing batches")
            found = project.recover(
                planned, since,
                lambda done, total: on_step(f"{done:,} of {total:,} batches"), say,
            )  # fmt: skip
    return Recovery(tuple(names), tuple(without), tuple(failed), found)


# --- replay ---------------------------------------------------------------------------------------


def render_dead_letters(
    options: ProjectOptions, specs: Sequence[DeadSpec], new: NewPrompt, instead: Instead,
    on_step: Callable[[str], None],
) -> list[Replay]:  # fmt: skip
    """Plan to ask dead letters with another prompt, from the rows as they are now. Sends nothing.

    Each request is in one plan only. Those that no row asks any more, or whose model is gone or has
    another declaration by now, are in none.

    Raises:
        DbtBaseException: the project cannot be parsed, or a model that is read is not there.
        SpecError: the prompt does not fit the columns, or the model not its options.
        SystemicError: the rows may not leave.
        BatchsqlError: a model cannot be compiled, or the prompt not be rendered for a row.
    """
    left = {(spec.ledger_schema, each.request_key) for spec in specs for each in spec.dead}
    wanted = {name for spec in specs for name in spec.enrichments}
    on_step("compiling")
    nodes, failed = _compile(options, " ".join(".".join(each.split(".")[2:]) for each in wanted))
    problems = [str(each.error) for each in failed if each.enrichment in wanted]
    if problems:
        raise BatchsqlError("\n".join(problems))
    plans = []
    with open_project(options) as project:
        for node in nodes:
            if str(node.unique_id) not in wanted:
                continue
            on_step(f"rendering {node.name}")
            plan = project.plan_rendered(node, new, instead, {key for _, key in left})
            keys = tuple(key for key in plan.keys if (plan.ledger_schema, key) in left)
            left -= {(plan.ledger_schema, key) for key in keys}
            if keys:
                plans.append(replace(plan, keys=keys))
    return plans
