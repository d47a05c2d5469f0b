"""``batchsql export``, ``import`` and ``recover``: keep what was paid for when a ledger is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import click

from batchsql.cli.options import Duration, ReadableFailure, json_option, opens_project
from batchsql.cli.screen import bars, number, print_json, print_table, say, working

if TYPE_CHECKING:
    from batchsql.dbt_project import ProjectOptions, Recovery

_ledger_schema = click.option(
    "--ledger-schema", metavar="SCHEMA",
    help="The schema that holds the ledger. Default: the one that the models use.",
)  # fmt: skip


# --- export ---------------------------------------------------------------------------------------


@click.command("export")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--since", "since_seconds", type=Duration(), metavar="DURATION",
    help="In a first export, leave out rows older than this, such as 90d. Default: none.",
)  # fmt: skip
@_ledger_schema
@json_option
@opens_project
def export_command(
    *, options: ProjectOptions, folder: Path, since_seconds: float | None,
    ledger_schema: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Write the ledger as Parquet files into DIR.

    Losing the ledger means paying again, so keep a copy elsewhere, or carry it to another
    warehouse with `batchsql import`. The first export into a folder writes everything, each later
    one only what is new. When it is killed, the folder still holds the export before.

    Only reads the ledger; never sends a request, never removes a file that it did not write.

    \b
    Example:
      batchsql export backup/ledger
    """
    from batchsql.carrying.exporting import export_ledger
    from batchsql.dbt_project import open_project

    folder = folder.absolute()
    with (
        open_project(options) as project,
        project.ledger(ledger_schema, must_exist=True) as ledger,
        bars() as on_rows,
    ):
        done = export_ledger(ledger, folder, since_seconds=since_seconds, on_rows=on_rows)
    if as_json:
        print_json({"folder": str(folder), **dataclasses.asdict(done)})
        return
    _print_rows(done.rows, "written")
    say(f"{'' if done.is_first else 'Added to the export in '}{folder}"
        f"{' holds the ledger' if done.is_first else ''}")  # fmt: skip
    if done.working:
        say(
            f"{number(done.working, 'shard')} of running work will end later: export once more then"
        )


def _print_rows(rows: Mapping[str, int], what: str) -> None:
    print_table(["table", f">rows {what}"], sorted(rows.items()))


# --- import ---------------------------------------------------------------------------------------


@click.command("import")
@click.argument(
    "folder", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@_ledger_schema
@json_option
@opens_project
def import_command(
    *, options: ProjectOptions, folder: Path, ledger_schema: str | None, as_json: bool
) -> None:
    """Merge an export into the ledger of this target, which is made if need be.

    What is there already stays as it is, so the command can be repeated, and goes on after it was
    killed. It does not matter from which kind of warehouse the export is.

    Batches that are still at a provider are taken over: this ledger collects their answers. So do
    not run models against the old ledger any more.

    Never sends a request, never changes an answer that is there.

    \b
    Example:
      batchsql import backup/ledger --target prod
    """
    from batchsql.carrying.importing import import_ledger
    from batchsql.dbt_project import open_project

    folder = folder.absolute()
    with (
        open_project(options) as project,
        project.ledger(ledger_schema, must_exist=False) as ledger,
        bars() as on_rows,
    ):
        done = import_ledger(ledger, folder, on_rows=on_rows)
    if as_json:
        print_json({"folder": str(folder), **dataclasses.asdict(done)})
        return
    _print_rows(done.rows, "added")
    if done.open_batches:
        say(
            f"{number(done.open_batches, 'batch', 'batches')} with "
            f"{number(done.in_batches, 'request')} are at the provider and belong to this ledger "
            "now: run nothing against the old one any more"
        )


# --- recover --------------------------------------------------------------------------------------


@click.command()
@click.option("--select", "-s", metavar="SELECTOR", required=True,
              help="The llm models, in dbt's selection syntax.")  # fmt: skip
@click.option(
    "--since", "since_seconds", type=Duration(), metavar="DURATION", default="30d",
    show_default=True, help="How far back to look for batches.",
)  # fmt: skip
@json_option
@opens_project
def recover(*, options: ProjectOptions, select: str, since_seconds: float, as_json: bool) -> None:
    """Bring back answers that providers still keep in finished batches.

    For the day on which the ledger is lost and there is no export. Renders the requests of the
    selected models anew, as `batchsql plan` does, looks through the batches of their accounts, and
    writes the answers to requests that have none. Providers keep results for about a month.
    Answers that did not come by batch are not kept by anybody.

    A batch that has not ended is left alone: run the command again when it has. Batches that the
    ledger knows are left to it.

    Never sends a request to a model, never pays for anything, never writes an answer twice.

    \b
    Example:
      batchsql recover --select ticket_labels --since 14d
    """
    from batchsql.dbt_project import recover_models

    since = datetime.now(timezone.utc) - timedelta(seconds=since_seconds)
    messages: list[str] = []
    with working() as on_step:
        done = recover_models(options, select, since, on_step, messages.append)
    if as_json:
        print_json(
            {"models": done.names, "without_batches": done.without_batches,
             **dataclasses.asdict(done.found)}
        )  # fmt: skip
    else:
        _print_recovery(done, messages)
    errors = [*(str(each.error) for each in done.failed), *done.found.errors]
    if errors:
        raise ReadableFailure("\n".join(errors))


def _print_recovery(done: Recovery, messages: list[str]) -> None:
    for name in done.without_batches:
        say(f"{name}: its provider offers no batches")
    if not done.names:
        say("no llm model with batches is selected")
        return
    for message in messages:
        say(message)
    found = done.found
    say(f"{number(found.batches, 'batch', 'batches')} in the account")
    for count, what in (
        (found.recovered, "recovered"),
        (found.known, "in the ledger already"),
        (found.open, "not over yet"),
        (found.gone, "without results, or with none any more"),
        (found.foreign, "with nothing that is wanted"),
    ):
        if count:
            say(f"  {count:,} {what}")
    say(f"{number(found.answers, 'answer')} written")
    for count, what in (
        (found.failures, "failures written as tries"),
        (found.answered, "lines whose request has an answer already"),
        (found.claimed, "lines whose request is being asked now"),
        (found.unmatched, "lines of requests that the selected models do not ask now"),
        (found.others, "lines that are not of batchsql"),
    ):
        if count:
            say(f"  {count:,} {what}")
