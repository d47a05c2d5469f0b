"""``batchsql status`` and ``failed``: what the ledger knows."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchsql.cli.options import (
    EXIT_OPEN_WORK,
    ReadableFailure,
    exit_code_option,
    json_option,
    opens_project,
)
from batchsql.cli.screen import ago, number, print_json, print_table, say
from batchsql.progress import format_seconds

if TYPE_CHECKING:
    from batchsql.dbt_project import OpenProject, ProjectOptions
    from batchsql.declare.routing import OnComplete
    from batchsql.warehouse.ledger import Ledger
    from batchsql.warehouse.queue import Queue
    from batchsql.warehouse.report import DeadLetterCause, EnrichmentRow, LedgerReport, OpenShardRow

NO_LEDGER = "no ledger yet; dbt run makes one"
SHOWN_CHARACTERS = 200
QUEUES_SINCE = 3  # the version of the ledger


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A ledger and those of its enrichments that were asked for."""

    ledger: Ledger
    report: LedgerReport
    enrichments: list[EnrichmentRow]
    project: OpenProject
    root: Path
    on_complete: Mapping[str, OnComplete]

    @property
    def spec_versions(self) -> list[str]:
        """The specs in force, each once: two models with one declaration share their requests."""
        return list(dict.fromkeys(row.spec_version for row in self.enrichments))

    def names_of(self, spec_version: str) -> list[str]:
        """Return the models that use a spec."""
        return [
            model_name(row.enrichment)
            for row in self.enrichments
            if row.spec_version == spec_version
        ]


def model_name(enrichment: str) -> str:
    """Return the model's name in a dbt unique id, with its version where it has one."""
    return ".".join(enrichment.split(".")[2:]) or enrichment


def is_named(enrichment: str, names: Sequence[str]) -> bool:
    name = model_name(enrichment)
    return not names or bool({enrichment, name, name.partition(".")[0]} & set(names))


@contextlib.contextmanager
def found_ledgers(options: ProjectOptions, names: Sequence[str]) -> Iterator[list[Found]]:
    """Open the target's ledgers with the enrichments asked for; none where there is no ledger."""
    from batchsql.dbt_project import open_project
    from batchsql.warehouse.report import LedgerReport

    with open_project(options) as project, project.ledgers() as ledgers:
        on_complete = project.read_on_complete()
        reports = [(ledger, LedgerReport(ledger)) for ledger in ledgers]
        known = [(ledger, report, report.read_enrichments()) for ledger, report in reports]
        everything = [row.enrichment for _, _, rows in known for row in rows]
        unknown = [name for name in names if not any(is_named(each, [name]) for each in everything)]
        if unknown and ledgers:
            there = ", ".join(sorted(map(model_name, everything))) or "none"
            raise ReadableFailure(
                f"the ledger knows no enrichment named {', '.join(unknown)}; it knows: {there}"
            )
        yield [
            Found(
                ledger,
                report,
                [row for row in rows if is_named(row.enrichment, names)],
                project,
                project.root,
                on_complete,
            )
            for ledger, report, rows in known
        ]


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@json_option
@exit_code_option("a row or request is pending or failed, or a shard is open")
@opens_project
@click.pass_context
def status(
    context: click.Context, *, options: ProjectOptions, names: tuple[str, ...], as_json: bool,
    use_exit_code: bool,
) -> None:  # fmt: skip
    """Show where each llm model stands.

    That is its last run, its rows, its requests, what waits for workers, and the shards that are
    open.

    Rows are those that the last finished run (or plan) counted. Requests are those of the
    declaration that was used last. NAME is the name of a dbt model.

    Only reads the ledger; never sends a request, never writes.

    \b
    Example:
      batchsql status ticket_labels
    """
    with found_ledgers(options, names) as found:
        documents = [_status_document(each, row) for each in found for row in each.enrichments]
        shards = [
            shard
            for each in found
            for shard in each.report.read_open_shards()
            if is_named(shard.enrichment, names)
        ]
        queues = [
            queue
            for each in found
            for queue in _read_queues(each.ledger)
            if is_named(queue.enrichment, names)
        ]
    if as_json:
        print_json(
            {
                "enrichments": documents,
                "shards": [dataclasses.asdict(each) for each in shards],
                "queues": [_queue_document(each) for each in queues],
            }
        )
    elif not found:
        say(NO_LEDGER)
    else:
        _print_status(documents, shards, queues)
    is_open = bool(shards) or any(
        document["rows"][key] or document["requests"][other]
        for document in documents
        for key, other in (("pending", "waiting"), ("failed", "dead"))
    )
    if use_exit_code and is_open:
        context.exit(EXIT_OPEN_WORK)


def _status_document(found: Found, row: EnrichmentRow) -> dict[str, Any]:
    requests = found.ledger.count_requests(row.spec_version)
    started = datetime.fromtimestamp(row.started_at_epoch, timezone.utc)
    return {
        "name": model_name(row.enrichment),
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


def _read_queues(ledger: Ledger) -> list[Queue]:
    """Return the queues; none in a ledger from before there were any, which is not migrated."""
    return ledger.read_queues() if ledger.check_version() >= QUEUES_SINCE else []


def _queue_document(queue: Queue) -> dict[str, Any]:
    return {
        "enrichment": queue.enrichment,
        "model": queue.model,
        "free": queue.free,
        "claimed": queue.claimed,
        "workers": queue.workers,
        "age_seconds": queue.age_seconds,
    }


def _print_status(
    documents: Sequence[dict[str, Any]], shards: Sequence[OpenShardRow], queues: Sequence[Queue]
) -> None:
    print_table(
        ["model", "last run", "state", ">rows ok", ">pending", ">failed", ">answered", ">dead",
         ">in progress", ">waiting"],
        [
            (each["name"], ago(each["last_run"]["age_seconds"]), each["last_run"]["state"],
             each["rows"]["ok"], each["rows"]["pending"], each["rows"]["failed"],
             each["requests"]["answered"], each["requests"]["dead"],
             each["requests"]["in_progress"], each["requests"]["waiting"])
            for each in documents
        ],
    )  # fmt: skip
    for each in documents:
        if each["last_run"]["error"]:
            error = each["last_run"]["error"].removeprefix(f"{each['name']}: ")
            say(f"{each['name']}: the last run said: {error}")
    if queues:
        say("")
        print_table(
            ["queue", "answered by", "queued", ">free", ">claimed", ">workers"],
            [
                (model_name(each.enrichment), each.model, ago(each.age_seconds), each.free,
                 each.claimed, each.workers)
                for each in queues
            ],
        )  # fmt: skip
    streams = [each for each in shards if not each.is_batch]
    if streams:
        say("")
        print_table(
            ["open shard", "model", "backend", "state", "lease", "made", ">requests", ">ok",
             ">failed"],
            [
                (each.shard_id, model_name(each.enrichment), each.backend, each.state,
                 _lease(each.lease_seconds), ago(each.age_seconds), each.requests, each.ok,
                 each.failed)
                for each in streams
            ],
        )  # fmt: skip
    batches = [each for each in shards if each.is_batch]
    if batches:
        say("")
        print_table(
            ["open batch", "model", "backend", "state", "age", "results", ">requests", ">done",
             ">failed"],
            [
                (each.provider_batch_id or f"shard {each.shard_id}", model_name(each.enrichment),
                 each.backend, each.provider_state or each.state, _age(each), _vanishing(each),
                 each.requests, each.provider_ok, each.provider_failed)
                for each in batches
            ],
        )  # fmt: skip
        for batch in batches:
            if batch.error:
                say(f"{batch.provider_batch_id or batch.shard_id}: {batch.error}")


def _age(shard: OpenShardRow) -> str:
    """Say how old a batch is, against the age at which its provider ends it."""
    age = format_seconds(shard.age_seconds)
    if shard.window_seconds is None:
        return age
    return f"{age} of {format_seconds(shard.window_seconds)}"


def _vanishing(shard: OpenShardRow) -> str:
    if shard.vanish_seconds is None:
        return "kept"
    if shard.vanish_seconds < 0:
        return f"gone {ago(-shard.vanish_seconds)}"
    return f"kept {format_seconds(shard.vanish_seconds)}"


def _lease(seconds: float) -> str:
    if seconds < 0:
        return f"ran out {ago(-seconds)}"
    return f"{format_seconds(seconds)} left"


@click.command()
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
@json_option
@exit_code_option("there are dead letters")
@opens_project
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
    with found_ledgers(options, names) as found:
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
        say(f"{number(total - shown, 'more dead letter')} of rarer causes (--limit shows more)")
    say(
        "To send them once more: batchsql replay, then dbt run, or batchsql replay --model "
        "PROVIDER/NAME"
    )
