"""A run killed with SIGKILL at any point: the next one loses nothing and asks little twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.crash.conftest import MakeTarget
from tests.support import fake
from tests.support.lean import Forks, Job, run_job
from tests.support.project import Project, Target

ROWS = 8
FLUSH_ROWS = 3


def job_on(target: Target, log: Path) -> Job:
    return Job(
        target,
        str(log),
        [f"ticket {n}" for n in range(ROWS)],
        # No flush and no renewal by the clock, so that every run passes the same points.
        options={"flush_rows": FLUSH_ROWS, "flush_seconds": 600},
        lease_seconds=600,
    )


def run_after_kill(job: Job) -> None:
    """Run a job again; the lease of the run that died has just run out."""
    target = job.target
    if target.kind == "postgres" and target.query(
        "select 1 from pg_tables where schemaname = '{ledger}' and tablename = 'shards'"
    ):
        target.query(
            "update {ledger}.shards set lease_expires_at = clock_timestamp() "
            "where state = 'running'"
        )
    run_job(job)


def assert_nothing_lost(target: Target, sent: Counter[str], where: str) -> None:
    """Check a table and its ledger after the run that followed a kill."""
    assert target.query("select llm_status, count(*) from {schema}.labels group by 1") == [
        ("ok", ROWS)
    ], where
    assert len(sent) == ROWS, where
    assert max(sent.values()) <= 2, where
    assert sum(times == 2 for times in sent.values()) <= FLUSH_ROWS, where
    assert target.one("select count(*) from {ledger}.claims") == 0, where
    assert target.one("select count(*) from {ledger}.shards where state = 'running'") == 0, where
    assert target.query(
        "select count(*), count(distinct request_key) from {ledger}.attempts where outcome = 'ok'"
    ) == [(ROWS, ROWS)], where


def test_kill_at_every_durable_step_loses_nothing(
    make_target: MakeTarget, forks: Forks, tmp_path: Path
) -> None:
    whole = forks.run(job_on(make_target(), tmp_path / "whole.log")).finish()
    points = whole["points"]
    assert points["ledger"] >= 24
    assert points["candidate"] >= 2
    assert points["answer"] == ROWS
    assert points["build"] == 2

    twice = []
    for number in range(1, points["any"] + 1):
        target = make_target()
        job = job_on(target, tmp_path / f"{number}.log")
        where = f"killed at point {number} of {points['any']}"
        assert forks.run(job, f"any:{number}").wait() == -9, where
        run_after_kill(job)
        sent = Counter(fake.sent(Path(job.log)))
        assert_nothing_lost(target, sent, where)
        twice.append(sum(times == 2 for times in sent.values()))
    # The points lie where they should: some kills do lose answers that were not written yet.
    assert max(twice) == FLUSH_ROWS
    assert twice[0] == 0
    assert twice[-1] == 0


def test_two_kills_in_a_row_send_no_answered_request_again(
    make_target: MakeTarget, forks: Forks, tmp_path: Path
) -> None:
    target = make_target()
    job = job_on(target, tmp_path / "sent.log")
    assert forks.run(job, "answer:6").wait() == -9  # three are written, three are under way
    written = {
        str(key).replace("-", "")
        for (key,) in target.query("select request_key::text from {ledger}.results")
    }
    assert len(written) == FLUSH_ROWS
    if target.kind == "postgres":
        target.query("update {ledger}.shards set lease_expires_at = clock_timestamp()")
    assert forks.run(job, "answer:3").wait() == -9
    run_after_kill(job)
    sent = Counter(fake.sent(tmp_path / "sent.log"))
    assert len(sent) == ROWS
    assert all(sent[key] == 1 for key in written)
    assert target.one("select count(*) from {schema}.labels where llm_status = 'ok'") == ROWS


@pytest.mark.parametrize("at", ["answer:6", "build:1", "build:2"])
def test_kill_of_dbt_loses_nothing(project: Project, at: str) -> None:
    rows = " union all ".join(f"select {n} as id, 'ticket {n}' as body" for n in range(ROWS))
    project.model("labels", rows, llm={"flush_rows": FLUSH_ROWS, "lease_seconds": 1})
    killed = project.finish(project.process("run", env={"BATCHSQL_TEST_KILL_AT": at}))
    assert killed.returncode == -9, killed.output
    # In this process: the pid, and so the owner of the leases, is another one.
    again = project.run("run")
    assert again.ok, again.output
    assert_nothing_lost(project.target, Counter(project.sent()), at)
