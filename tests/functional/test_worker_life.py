"""How the process of ``batchsql work`` ends: told to by a signal, or with nothing left to do."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from batchsql.cli import work
from tests.support.lean import Job, run_job, wait_for, work_job
from tests.support.project import Project
from tests.support.workers import DETACHED, rows, run, worker, worker_process

ROWS = 10
ANSWERED = 5
"""So many are answered when the signal comes, and the backend has one more in its hands."""


def queued_job(project: Project, gate: Path) -> Job:
    """Queue requests of which the backend answers some, and the rest once the gate is there."""
    job = Job(
        project.target, str(project.sent_log), [f"ticket {n}" for n in range(ROWS)],
        options={"runner": "detached", "flush_rows": 3},
        engine={"gate": str(gate), "gate_after": ANSWERED},
    )  # fmt: skip
    assert run_job(job).requests_sent == 0
    return job


def assert_given_back(job: Job, answered: int) -> None:
    """Check that what was answered is kept, that nothing is held, and that others get the rest."""
    for sql, expected in (
        ("select count(*) from {ledger}.results", answered),
        ("select count(*) from {ledger}.attempts", answered),
        ("select count(*) from {ledger}.claims", 0),
        ("select count(*) from {ledger}.shards where state <> 'finished'", 0),
    ):
        assert job.target.one(sql) == expected, sql
    assert work_job(replace(job, engine={}))["counts"]["ok"] == ROWS - answered


# --- told to end ----------------------------------------------------------------------------------


def test_worker_told_to_end_answers_what_it_has_begun_and_gives_the_rest_back(
    project: Project, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    job = queued_job(project, gate)
    with worker_process(project, "--grace", "120s") as told:
        wait_for((tmp_path / "gate.reached").exists, 60)
        told.tell_to_end()
        gate.touch()
        assert told.wait(60) == 0, told.lines
    begun = ANSWERED + 1
    assert told.lines[-1] == f"{begun} tries: {begun} answers, 0 failures\n"
    assert len(project.sent()) == begun
    assert_given_back(job, begun)
    assert sorted(Counter(project.sent()).values()) == [1] * ROWS


@pytest.mark.parametrize("target", ["postgres"], indirect=True)
def test_worker_told_to_end_does_not_wait_beyond_its_grace(
    project: Project, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    job = queued_job(project, gate)
    with worker_process(project, "--grace", "1s") as told:
        wait_for((tmp_path / "gate.reached").exists, 60)
        told.tell_to_end()
        assert told.wait(30) == 0, told.lines  # or it raises
    assert told.lines[-1] == f"{ANSWERED} tries: {ANSWERED} answers, 0 failures\n"
    assert_given_back(job, ANSWERED)


# --- nothing to do --------------------------------------------------------------------------------


class Clock:
    """Makes a worker's pauses take no time: they are noted, and its clock goes on by as much."""

    def __init__(self, at_first_pause: Callable[[], object] = lambda: None) -> None:
        self.pauses: list[float] = []
        self._at_first_pause = at_first_pause

    def monotonic(self) -> float:
        return time.monotonic() + sum(self.pauses)

    def event(self) -> threading.Event:
        """Return an event for which nobody waits in vain."""
        event = threading.Event()
        event.wait = self._wait  # type: ignore[method-assign]
        return event

    def _wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.pauses.append(timeout)
        assert len(self.pauses) < 100, "the worker does not end"
        if len(self.pauses) == 1:
            self._at_first_pause()
        return False


def put_in_place(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "time", SimpleNamespace(monotonic=clock.monotonic))
    monkeypatch.setattr(
        work, "threading", SimpleNamespace(Event=clock.event, Timer=threading.Timer)
    )


@pytest.mark.parametrize("has_ledger", [False, True], ids=["no ledger yet", "a ledger"])
@pytest.mark.parametrize("target", ["postgres"], indirect=True)
def test_idle_worker_finds_what_is_queued_while_it_pauses(
    project: Project, monkeypatch: pytest.MonkeyPatch, has_ledger: bool
) -> None:
    known = 3 if has_ledger else 0
    if has_ledger:
        project.model("labels", rows(known), llm=DETACHED)
        run(project)
        worker(project)
    project.model("labels", rows(ROWS), llm=DETACHED)
    clock = Clock(lambda: run(project))
    put_in_place(clock, monkeypatch)
    result = worker(project, "--idle-exit", "10m")
    new = ROWS - known
    assert (result.exit_code, result.stdout) == (0, f"{new} tries: {new} answers, 0 failures\n")
    assert len(project.sent()) == ROWS
    # Then it was idle for as long as told, and ended.
    assert sum(clock.pauses[1:]) == pytest.approx(600, abs=30)
    assert max(clock.pauses) == work.LONGEST_PAUSE_SECONDS


@pytest.mark.parametrize("target", ["postgres"], indirect=True)
def test_worker_without_a_ledger_ends_once_it_was_idle_for_as_long_as_told(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    put_in_place(clock, monkeypatch)
    result = worker(project, "--idle-exit", "2m")
    assert (result.exit_code, result.stdout) == (0, "0 tries: 0 answers, 0 failures\n")
    assert sum(clock.pauses) == pytest.approx(120, abs=30)
    assert max(clock.pauses) == work.LONGEST_PAUSE_SECONDS
