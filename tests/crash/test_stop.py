"""Ctrl-C and SIGTERM in the middle of a ``dbt run``: it ends soon and keeps its answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.lean import wait_for
from tests.support.project import ROOT, Project

ROWS = 10
ANSWERED = 6


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_dbt_and_keeps_what_was_answered(
    project: Project, tmp_path: Path, number: signal.Signals
) -> None:
    gate = tmp_path / "gate"
    rows = " union all ".join(f"select {n} as id, 'ticket {n}' as body" for n in range(ROWS))
    project.model(
        "labels", rows,
        llm={"flush_rows": 100, "lease_seconds": 600,
             "engine": {"gate": str(gate), "gate_after": ANSWERED}},
    )  # fmt: skip
    process = project.process("run")
    wait_for((tmp_path / "gate.reached").exists, 60)
    started = time.monotonic()
    os.kill(process.pid, number)
    process.wait(10)
    seconds = time.monotonic() - started
    stopped = project.finish(process)
    assert seconds < 4, stopped.output  # about one on an idle machine
    assert stopped.returncode > 0
    assert "Traceback" not in stopped.output
    assert "what was answered until now is kept" in stopped.output
    assert len(project.sent()) == ANSWERED

    target = project.target
    assert target.one("select count(*) from {ledger}.results") == ANSWERED
    assert target.one("select count(*) from {ledger}.claims") == 0
    assert target.one("select count(*) from {ledger}.shards where state = 'running'") == 0
    ((state, error),) = target.query("select state, error from {ledger}.runs")
    assert state == "failed"
    assert f"stopped; {ANSWERED} answers are kept" in error

    gate.touch()
    # A lease of ten minutes that had to run out would not let this end in time.
    again = project.run("run")
    assert again.ok, again.output
    assert Counter(project.sent()).most_common(1)[0][1] == 1
    assert len(project.sent()) == ROWS
    assert target.query("select llm_status, count(*) from {schema}.labels group by 1") == [
        ("ok", ROWS)
    ]


@pytest.mark.parametrize("target", ["duckdb"], indirect=True)
def test_signal_after_dbt_has_returned_does_what_it_did_before(project: Project) -> None:
    # A program that calls dbt, such as a scheduler, must still be ended by SIGTERM.
    project.model("labels", "select 1 as id, 'one' as body", llm={})
    host = (
        "import os, signal, sys; from tests.support import dbt_main; code = dbt_main.main(); "
        "print('dbt ended with', code, flush=True); os.kill(os.getpid(), signal.SIGTERM)"
    )
    done = subprocess.run(
        [sys.executable, "-c", host, "run", *project._flags()],
        capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
    )  # fmt: skip
    assert "dbt ended with 0" in done.stdout, done.stdout
    assert done.returncode == -signal.SIGTERM
