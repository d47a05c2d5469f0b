"""The demo: label the example's tickets with a small model on this machine, twice.

Runs the commands that a user would type, shows them, and ends with a look at the result. Nothing is
sent anywhere: the model runs in the dbt process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import duckdb
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
DATABASE = HERE / "target" / "demo.duckdb"
DBT = Path(sys.executable).with_name("dbt")

LOOK = """
    select ticket_id, channel,
        left(replace(coalesce(nullif(body, ''), subject, ''), chr(10), ' '), 40) as ticket,
        order_number, sentiment, llm_status
    from analytics.ticket_labels order by ticket_id limit 8
"""
AGREEMENT = """
    select label, compared, agreed, round(100 * share) || ' %' as share
    from analytics.label_agreement order by label
"""

console = Console(highlight=False)
if not console.is_terminal:
    console = Console(highlight=False, width=120)


def dbt(*args: str, quiet: bool = False) -> None:
    """Show and run a dbt command; end the demo with its exit code when it fails."""
    console.print(f"\n[bold]$ dbt {' '.join(args)}[/bold]")
    console.file.flush()
    command = [str(DBT), *(["--quiet"] if quiet else []), *args]
    environment = {
        **os.environ,
        "BATCHSQL_DUCKDB_PATH": str(DATABASE),
        "DBT_PROFILES_DIR": str(HERE.parent / "profiles"),
        "DBT_SEND_ANONYMOUS_USAGE_STATS": "false",
    }
    code = subprocess.run(  # noqa: S603  the command is ours
        command, cwd=HERE, env=environment, check=False
    ).returncode
    if code:
        sys.exit(code)


def counts() -> dict[str, int]:
    """Return what the last dbt command reported of the llm model."""
    results = json.loads((HERE / "target" / "run_results.json").read_text())["results"]
    (response,) = (
        r["adapter_response"] for r in results if r["unique_id"].endswith(".ticket_labels")
    )
    return dict(response)


def show(title: str, sql: str) -> None:
    """Print a small query as a table."""
    with duckdb.connect(str(DATABASE), read_only=True) as connection:
        cursor = connection.execute(sql)
        table = Table(title=title, title_justify="left")
        for column in cursor.description:
            table.add_column(column[0])
        for row in cursor.fetchall():
            table.add_row(*("" if value is None else str(value) for value in row))
    console.print()
    console.print(table, markup=False)


def main() -> None:
    DATABASE.parent.mkdir(exist_ok=True)
    for leftover in DATABASE.parent.glob("demo.duckdb*"):
        leftover.unlink()
    dbt("deps", quiet=True)
    dbt("seed", quiet=True)
    started = time.monotonic()
    dbt("run")
    seconds = time.monotonic() - started
    first = counts()
    show("The table, eight rows of it", LOOK)
    show("Agreement with the labels given by hand", AGREEMENT)
    dbt("run")
    second = counts()
    console.print(
        f"\nFirst run: {first['rows']} rows, {first['duplicates']} of them duplicates, "
        f"{first['requests_sent']} requests, {first['failed']} failed, {seconds:.0f} s with dbt's "
        f"start.\nSecond run: [bold]{second['requests_sent']} requests[/bold], "
        f"{second['reused']} answers reused.\n\n"
        f"Look around: {os.path.relpath(DATABASE)}, schemas analytics and analytics_batchsql "
        "(the ledger)."
    )


if __name__ == "__main__":
    main()
