"""Rows seen for the first time: diff, render, key and record, without sending anything.

Prints rows a second, and the peak memory of 100,000 against 1,000,000 rows. Each size runs in a
process of its own, with DuckDB's memory held to a fixed limit, so that what grows is ours.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import duckdb

from bench.lean import declare, make_tickets, open_run

SIZES = (100_000, 1_000_000)
DUCKDB_MEMORY = "256MB"


def measure(rows: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        connection = duckdb.connect(str(Path(folder) / "bench.duckdb"))
        connection.execute(f"set memory_limit = '{DUCKDB_MEMORY}'")
        make_tickets(connection, rows)
        run = open_run(connection, declare())
        started = time.perf_counter()
        run.prepare("select * from tickets")
        run.record()
        seconds = time.perf_counter() - started
        if run.counts.requests_wanted != rows:
            sys.exit(f"expected {rows} wanted requests, got {run.counts}")
        run.finish()
        connection.close()
    print(f"{seconds} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}")


def main() -> None:
    peaks = []
    for rows in SIZES:
        output = subprocess.run(
            [sys.executable, "-m", "bench.first_sight", str(rows)],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        seconds, peak = output.split()
        peaks.append(int(peak))
        print(
            f"first sight, {rows:>9,} rows: {rows / float(seconds):,.0f} rows/s (bar 25,000), "
            f"peak {int(peak) // 1024:,} MiB with DuckDB held to {DUCKDB_MEMORY}"
        )
    print(
        f"first sight, peak memory of 1,000,000 / 100,000 rows: {peaks[1] / peaks[0]:.2f} (bar 1.5)"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(int(sys.argv[1]))
    else:
        main()
