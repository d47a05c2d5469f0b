"""Provider batches: the whole way through OpenAI's against a script over the SDK without any state.

100,000 rows, a fifth of them duplicates, against a server on this machine that has answered at
once. Ours is diff, submit, collect, validate and build on DuckDB, without the start of the
process. The script writes, uploads, polls, downloads and parses, and keeps nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb

from bench.lean import PROMPT, RETURNS, declare, open_run

MODEL = "gpt-5-mini"
MAX_LINES = 50_000
DUCKDB_MEMORY = os.environ.get("BENCH_DUCKDB_MEMORY", "256MB")


@contextmanager
def serving() -> Iterator[str]:
    """Start the server in a process of its own; yield its base URL."""
    with subprocess.Popen(
        [sys.executable, "-m", "bench.batch_server"], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        try:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()


def make_rows(
    connection: duckdb.DuckDBPyConnection, rows: int, distinct: int | None = None
) -> None:
    """Make tickets of about 300 characters; unless told otherwise a fifth are repetitions."""
    distinct = distinct or rows * 4 // 5
    connection.execute(
        f"create table tickets as select i as id, 'ticket ' || (i % {distinct}) as subject, "
        "repeat('the invoice of last month came twice and nobody answers ', 5) || "
        f"(i % {distinct}) as body from range({rows}) t(i)"
    )


def run_ours(url: str, path: Path, batch_requests: int) -> tuple[float, dict[str, Any]]:
    import openai  # noqa: F401  of the process's start, for the script as well

    with duckdb.connect(str(path)) as connection:
        # What DuckDB keeps of the table in its cache is not ours to count.
        connection.execute(f"set memory_limit = '{DUCKDB_MEMORY}'")
        declaration = declare(
            model=f"openai/{MODEL}", route="batch", wait="forever",
            max_batch_requests=batch_requests,
            engine={"base_url": url, "api_key_env": "BENCH_KEY"},
        )  # fmt: skip
        started = time.perf_counter()
        run = open_run(connection, declaration)
        run.collect()
        run.prepare("select * from tickets")
        run.record()
        if run.counts.requests_wanted:
            run.ship()
        run.reconcile()
        connection.execute(f"create or replace table labels as {run.candidate.build_sql()}")
        run.finish()
        seconds = time.perf_counter() - started
        run.close()
        ok = connection.execute("select count(*) from labels where llm_status = 'ok'").fetchone()
        batches = connection.execute("select count(*) from ledger.shards").fetchone()
        counts = {"ok": ok[0], "sent": run.counts.requests_sent, "batches": batches[0]}
        return seconds, counts


def run_script(url: str, path: Path) -> float:
    """Do what a script over the SDK does: everything of it counts, but reading the rows."""
    import openai

    with duckdb.connect(str(path)) as connection:
        rows = connection.execute("select id, subject, body from tickets").fetchall()
    client = openai.OpenAI(base_url=url, api_key="bench")
    schema = {
        "type": "object", "properties": RETURNS, "required": list(RETURNS),
        "additionalProperties": False,
    }  # fmt: skip
    system = PROMPT.split("\n")[1]
    started = time.perf_counter()
    answers = {}
    for first in range(0, len(rows), MAX_LINES):
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl", delete=False) as file:
            for row_id, subject, body in rows[first : first + MAX_LINES]:
                messages = [
                    {"role": "system", "content": system},
                    {"role": "user", "content": f"{subject}\n{body}"},
                ]
                line = {
                    "custom_id": str(row_id), "method": "POST", "url": "/v1/chat/completions",
                    "body": {
                        "model": MODEL, "messages": messages, "max_completion_tokens": 300,
                        "response_format": {
                            "type": "json_schema",
                            "json_schema": {"name": "answer", "strict": True, "schema": schema},
                        },
                    },
                }  # fmt: skip
                file.write(json.dumps(line) + "\n")
        with Path(file.name).open("rb") as content:
            uploaded = client.files.create(file=content, purpose="batch")
        batch = client.batches.create(
            input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        while (batch := client.batches.retrieve(batch.id)).status != "completed":
            time.sleep(1)
        assert batch.output_file_id is not None
        for line in client.files.content(batch.output_file_id).content.split(b"\n"):
            if line:
                result = json.loads(line)
                text = result["response"]["body"]["choices"][0]["message"]["content"]
                answers[result["custom_id"]] = json.loads(text)
        Path(file.name).unlink()
    seconds = time.perf_counter() - started
    assert len(answers) == len(rows)
    return seconds


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rows", type=int, default=100_000)
    arguments.add_argument("--only", choices=["ours", "script"])
    arguments.add_argument("--batch-requests", type=int, default=MAX_LINES)
    arguments.add_argument("--url")
    given = arguments.parse_args()
    os.environ["BENCH_KEY"] = "bench"
    if given.only:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "bench.duckdb"
            with duckdb.connect(str(path)) as connection:
                make_rows(connection, given.rows)
            if given.only == "script":
                print(json.dumps({"seconds": run_script(given.url, path)}))
            else:
                first, counts = run_ours(given.url, path, given.batch_requests)
                again, _ = run_ours(given.url, path, given.batch_requests)
                print(json.dumps({"seconds": first, "again": again, "mb": peak_mb(), **counts}))
        return

    def measure(which: str, rows: int) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "bench.batch", "--only", which, "--rows", str(rows),
             "--url", url],
            check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return found

    with serving() as url:
        script = measure("script", given.rows)
        ours = measure("ours", given.rows)
        large = measure("ours", given.rows * 10)
    seconds, again = ours["seconds"], ours["again"]
    of_script, of_first = seconds / script["seconds"], again / seconds
    of_memory = large["mb"] / ours["mb"]
    print(f"batches, {given.rows:,} rows, {ours['sent']:,} requests")
    print(f"  script over the SDK  {script['seconds']:6.2f} s")
    print(f"  ours, first run      {seconds:6.2f} s   {of_script:.2f} of the script (bar 2)")
    print(f"  ours, nothing new    {again:6.2f} s   {of_first:.2f} of the first run (bar 0.3)")
    print(f"  peak memory          {ours['mb']:6.0f} MB")
    print(f"  of ten times the rows{large['mb']:6.0f} MB  {of_memory:.2f} of that (bar 1.3)")


if __name__ == "__main__":
    main()
