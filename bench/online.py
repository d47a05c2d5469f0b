"""An online endpoint that takes 50 ms: the whole way against a bare loop over the same SDK.

10,000 rows through a run on DuckDB, 64 requests at once, against a server in a process of its own.
The loop does what users of the SDK do: it calls ``chat.completions.create`` under a semaphore,
parses the answer, and keeps nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb

from bench.batch import MODEL, make_rows
from bench.lean import PROMPT, RETURNS, declare, open_run

CONCURRENCY = 64
ROUNDS = 3


@contextmanager
def serving() -> Iterator[str]:
    """Start the server in a process of its own; yield its base URL."""
    with subprocess.Popen(
        [sys.executable, "-m", "bench.online_server"], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        try:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()


def run_ours(url: str, path: Path) -> float:
    with duckdb.connect(str(path)) as connection:
        run = open_run(
            connection,
            declare(
                model=f"openai/{MODEL}", route="online",
                engine={
                    "base_url": url, "api_key_env": "BENCH_KEY", "max_concurrency": CONCURRENCY,
                },
            ),
        )  # fmt: skip
        started = time.perf_counter()
        run.prepare("select * from tickets")
        run.record()
        run.ship()
        run.reconcile()
        seconds = time.perf_counter() - started
        run.finish()
        run.close()
        return seconds


def run_loop(url: str, path: Path) -> float:
    import openai

    with duckdb.connect(str(path)) as connection:
        rows = connection.execute("select subject, body from tickets").fetchall()
    schema = {
        "type": "object", "properties": RETURNS, "required": list(RETURNS),
        "additionalProperties": False,
    }  # fmt: skip
    system = PROMPT.split("\n")[1]

    async def ask_all() -> list[Any]:
        client = openai.AsyncOpenAI(base_url=url, api_key="bench")
        places = asyncio.Semaphore(CONCURRENCY)

        async def ask(subject: str, body: str) -> Any:
            async with places:
                reply = await client.chat.completions.create(
                    model=MODEL,
                    messages=[
                        {"role": "system", "content": system},
                        {"role": "user", "content": f"{subject}\n{body}"},
                    ],
                    max_completion_tokens=300,
                    response_format={
                        "type": "json_schema",
                        "json_schema": {"name": "answer", "strict": True, "schema": schema},
                    },
                )
            return json.loads(reply.choices[0].message.content or "")

        return await asyncio.gather(*(ask(*row) for row in rows))

    started = time.perf_counter()
    answers = asyncio.run(ask_all())
    seconds = time.perf_counter() - started
    assert len(answers) == len(rows)
    return seconds


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rows", type=int, default=10_000)
    arguments.add_argument("--only", choices=["ours", "loop"])
    arguments.add_argument("--url")
    given = arguments.parse_args()
    os.environ["BENCH_KEY"] = "bench"
    if given.only:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "bench.duckdb"
            with duckdb.connect(str(path)) as connection:
                make_rows(connection, given.rows, distinct=given.rows)
            run = run_ours if given.only == "ours" else run_loop
            print(given.rows / run(given.url, path))
        return

    def measure(which: str) -> float:
        done = subprocess.run(
            [sys.executable, "-m", "bench.online", "--only", which, "--rows", str(given.rows),
             "--url", url],
            check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        return float(done.stdout.strip().splitlines()[-1])

    with serving() as url:
        pairs = [(measure("loop"), measure("ours")) for _ in range(ROUNDS)]
    loop, ours = (sorted(each)[ROUNDS // 2] for each in zip(*pairs, strict=True))
    print(
        f"online, {given.rows:,} rows, a reply in 50 ms, {CONCURRENCY} at once, median of {ROUNDS}"
    )
    print(f"  bare loop over the SDK  {loop:7.1f} rows/s")
    print(
        f"  ours                    {ours:7.1f} rows/s   {ours / loop:.2f} of the loop (bar 0.95)"
    )


if __name__ == "__main__":
    main()
