"""A job of 100,000 rows goes through provider batches in shards, with flat memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from bench.batch import serving
from tests.support.project import ROOT

pytest.importorskip("openai")

ROWS = 100_000


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with serving() as url:
        yield url


def run(url: str, rows: int) -> dict[str, Any]:
    """Run a job in a process of its own, so that its memory is its own."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.batch", "--only", "ours", "--rows", str(rows),
         "--batch-requests", "10000", "--url", url],
        check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        # Little for DuckDB's cache, which would grow with the table.
        env={**os.environ, "PYTHONPATH": str(ROOT), "BENCH_DUCKDB_MEMORY": "64MB"},
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_a_large_job_goes_through_in_shards_with_flat_memory(server_url: str) -> None:
    small, large = run(server_url, ROWS // 5), run(server_url, ROWS)
    assert (large["ok"], large["sent"], large["batches"]) == (ROWS, ROWS * 4 // 5, 8)
    assert large["mb"] <= small["mb"] * 1.3
