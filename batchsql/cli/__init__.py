"""The command line: arguments, printing and exit codes. What it shows, other modules find out."""

from __future__ import annotations

import click

from batchsql.cli import batches, carry, init, ledger, plan, rehearsal, replay, work
from batchsql.version import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="batchsql")
def main() -> None:
    """LLM-answered columns for dbt models: look ahead, look back, collect, work, and set up.

    The answers themselves are asked for by `dbt run` and `dbt build`; what these left in a
    provider's batches, `batchsql collect` brings home, and what they queued, `batchsql work`
    answers.

    Exit codes: 0 good, 1 an error, 2 wrong usage, 3 work is open, where --exit-code asks for it.
    """


for command in (
    plan.plan, batches.collect, batches.cancel, work.work, ledger.status, ledger.failed,
    replay.replay, carry.export_command, carry.import_command, carry.recover, init.init,
    rehearsal.emulate,
):  # fmt: skip
    main.add_command(command)
