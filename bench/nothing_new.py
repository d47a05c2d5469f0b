"""A night with nothing new, on a ledger with 30 nights of history, against SQL written by hand.

Two ratios: the enrichment step (evaluate, diff, reconcile) against the same item key and anti-join;
and that step with the build of the table against one CREATE TABLE AS that computes the key and
joins the answers.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import duckdb

from batchsql.runner import EnrichmentRun
from bench.lean import ANSWER, declare, make_tickets, open_run

NIGHTS = 30
SELECT = "select * from tickets"
ANSWERS = (
    "a.output->>'$.category' as category, cast(a.output->>'$.urgency' as bigint) as urgency, "
    "a.output->>'$.summary' as summary"
)


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def fill_ledger(connection: duckdb.DuckDBPyConnection, rows: int) -> str:
    """Fill the ledger as 30 nights of runs would have; return the SQL of the item key."""
    make_tickets(connection, 1)
    first = open_run(connection, declare())
    first.prepare(SELECT)
    first.finish()
    key = first.candidate.item_key_sql()
    make_tickets(connection, rows)
    spec = first.spec_version
    connection.execute(
        f"insert into ledger.items select k, k, '{spec}', id::varchar, night from (select {key} as "
        f"k, id, now() - interval (30 - id * {NIGHTS} // {rows}) day as night from tickets) "
        "order by night"
    )
    connection.execute(
        f"insert into ledger.requests select item_key, '{spec}', '[[\"user\",\"a ticket\"]]', "
        "first_seen_at from ledger.items"
    )
    connection.execute(
        f"insert into ledger.results select request_key, '{ANSWER}', left(md5('x'), 32), "
        "request_key, 'accepted', first_seen_at from ledger.items"
    )
    connection.execute(
        "insert into ledger.attempts (attempt_id, request_key, run_id, attempt_number, outcome, "
        "is_final, recorded_at) select uuid(), request_key, uuid(), 1, 'ok', false, first_seen_at "
        "from ledger.items"
    )
    return key


def measure(rows: int, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        connection = duckdb.connect(str(Path(folder) / "bench.duckdb"))
        key = fill_ledger(connection, rows)
        keyed = f"(select *, {key} as k from tickets)"
        by_hand_diff = (
            f"select count(*) from {keyed} s where not exists "
            "(select 1 from ledger.items i where i.item_key = s.k)"
        )
        by_hand_table = (
            f"create or replace table by_hand as select s.id, s.subject, s.body, {ANSWERS}, "
            "'ok' as llm_status, replace(a.request_key::varchar, '-', '') as llm_request_id "
            f"from {keyed} s left join (select i.item_key, i.request_key, r.output from "
            "ledger.items i join ledger.results r on r.request_key = i.request_key) a "
            "on a.item_key = s.k"
        )
        step, table, diff, whole = [], [], [], []
        for _ in range(repeats):
            diff.append(timed(lambda: connection.execute(by_hand_diff).fetchall()))
            runs: list[EnrichmentRun] = []

            def enrich(runs: list[EnrichmentRun] = runs) -> None:
                run = open_run(connection, declare())
                run.prepare(SELECT)
                run.record()
                run.ship()
                run.reconcile()
                runs.append(run)

            step.append(timed(enrich))
            run = runs[0]
            build = f"create or replace table built as {run.candidate.build_sql()}"
            whole.append(step[-1] + timed(lambda build=build: connection.execute(build)))
            if run.counts.reused != rows:
                sys.exit(f"expected {rows} reused rows, got {run.counts}")
            run.finish()
            table.append(timed(lambda: connection.execute(by_hand_table)))
        connection.close()
    for label, ours, theirs in (
        ("enrichment step / key and anti-join by hand", step, diff),
        ("step and table / one CREATE TABLE AS by hand", whole, table),
    ):
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        print(
            f"nothing new, {rows:>10,} rows: {label}: {statistics.median(ratios):.2f} "
            f"({statistics.median(ours):.2f} s / {statistics.median(theirs):.2f} s; bar 1.5)"
        )


def main() -> None:
    for rows in (
        (int(arg) for arg in sys.argv[1:]) if len(sys.argv) > 1 else (1_000_000, 10_000_000)
    ):
        measure(rows, 5 if rows <= 1_000_000 else 3)


if __name__ == "__main__":
    main()
