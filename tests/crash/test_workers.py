"""Workers that are told to end, killed or stopped: nothing is lost, and little is asked twice."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.crash.conftest import MakeTarget
from tests.support import fake
from tests.support.lean import Forks, Job, run_job, wait_for
from tests.support.project import Target

ROWS = 24
FLUSH_ROWS = 3
SEEDS = 12


def queued_job(target: Target, log: Path, rows: int = ROWS, lease_seconds: float = 600) -> Job:
    """Return a job whose requests wait for workers."""
    job = Job(
        target, str(log), [f"ticket {n}" for n in range(rows)],
        # No flush by the clock, so that a worker passes the same points each time.
        options={"runner": "detached", "flush_rows": FLUSH_ROWS, "flush_seconds": 600},
        lease_seconds=lease_seconds,
    )  # fmt: skip
    assert run_job(job).requests_sent == 0
    return job


def assert_each_answered_once(job: Job, may_be_asked_twice: int, where: str = "") -> None:
    """Check the ledger after all workers have ended, and the table that the next run builds."""
    target, rows = job.target, len(job.bodies)
    sent = Counter(fake.sent(Path(job.log)))
    assert len(sent) == rows, where
    assert sum(sent.values()) - rows <= may_be_asked_twice, where
    for sql, expected in (
        ("select count(*) from {ledger}.claims", 0),
        ("select count(*) from {ledger}.shards where state = 'running'", 0),
        ("select count(*) from {ledger}.results", rows),
        ("select count(*) from {ledger}.attempts", rows),
        ("select count(distinct request_key) from {ledger}.attempts where outcome = 'ok'", rows),
    ):
        assert target.one(sql) == expected, (where, sql)
    built = run_job(job)
    assert (built.ok, built.requests_sent) == (rows, 0), where


def let_leases_run_out(target: Target) -> None:
    if target.kind == "postgres":
        target.query(
            "update {ledger}.shards set lease_expires_at = clock_timestamp() "
            "where state = 'running'"
        )


def let_leases_run_out_of_others(target: Target) -> None:
    """Let the lease of the shard that was claimed first run out."""
    target.query(
        "update {ledger}.shards set lease_expires_at = clock_timestamp() where shard_id = "
        "(select shard_id from {ledger}.shards where state = 'running' "
        "order by created_at limit 1)"
    )


def test_kill_at_every_durable_step_loses_nothing(
    make_target: MakeTarget, forks: Forks, tmp_path: Path
) -> None:
    rows = 6
    whole = forks.work(queued_job(make_target(), tmp_path / "whole.log", rows)).finish()
    assert whole["points"]["answer"] == rows
    assert whole["points"]["ledger"] >= 14
    for number in range(1, whole["points"]["any"] + 1):
        target = make_target()
        job = queued_job(target, tmp_path / f"{number}.log", rows)
        where = f"killed at point {number} of {whole['points']['any']}"
        assert forks.work(job, f"any:{number}").wait() == -9, where
        let_leases_run_out(target)
        forks.work(job).finish()
        assert_each_answered_once(job, FLUSH_ROWS, where)


@pytest.mark.parametrize("target", ["postgres"], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_at_any_moment_with_two_workers_on_one_queue(
    target: Target, forks: Forks, tmp_path: Path, number: signal.Signals
) -> None:
    for seed in range(SEEDS):
        rng = random.Random(seed)
        job = queued_job(
            replace(target, schema=f"{target.schema}_{seed}"), tmp_path / f"{seed}.log",
            lease_seconds=1,
        )  # fmt: skip
        where = f"seed {seed}"
        # Each gets its signal while it has work, most times; the other may have taken all.
        points = [f"any:{rng.randint(1, 40)}" for _ in range(2)]
        workers = [forks.work(job, at, number) for at in points]
        codes = [worker.wait() for worker in workers]
        assert set(codes) <= {0, -number if number is signal.SIGKILL else 0}, where
        forks.work(job).finish()
        killed = codes.count(-signal.SIGKILL)
        # One that is told to end answers what it had begun, and gives the rest back.
        assert_each_answered_once(job, killed * FLUSH_ROWS, where)
        job.target.drop()


@pytest.mark.parametrize("target", ["duckdb"], indirect=True)
def test_worker_that_is_told_to_end_frees_its_claims_and_exits_well(
    target: Target, forks: Forks, tmp_path: Path
) -> None:
    job = queued_job(target, tmp_path / "sent.log")
    ended = forks.work(job, "answer:7", signal.SIGTERM).finish()
    # The one it was at is answered and written; nothing else is begun.
    assert ended["counts"]["ok"] == 7
    assert target.one("select count(*) from {ledger}.claims") == 0
    assert target.query("select state, count(*) from {ledger}.shards group by 1") == [
        ("finished", 2)
    ]
    forks.work(job).finish()
    assert_each_answered_once(job, 0)


@pytest.mark.parametrize("clock_seconds", [0.0, -86_400.0, 86_400.0])
@pytest.mark.parametrize("target", ["postgres"], indirect=True)
def test_worker_that_was_silent_for_too_long_writes_nothing(
    target: Target, forks: Forks, tmp_path: Path, clock_seconds: float
) -> None:
    gate = tmp_path / "gate"
    job = queued_job(target, tmp_path / "sent.log", lease_seconds=1)
    silent = forks.work(
        replace(job, engine={"gate": str(gate), "gate_after": 5}), clock_seconds=clock_seconds
    )
    wait_for((tmp_path / "gate.reached").exists)
    kept = target.one("select count(*) from {ledger}.results")
    os.kill(silent.pid, signal.SIGSTOP)
    try:
        finished = forks.work(job).finish()
        before = target.query("select * from {ledger}.attempts order by attempt_id")
    finally:
        gate.touch()
        os.kill(silent.pid, signal.SIGCONT)
    report = silent.finish()

    assert any("taken over by another run" in message for message in report["messages"])
    assert report["counts"]["ok"] == kept
    assert finished["counts"]["ok"] == ROWS - kept
    assert target.query("select * from {ledger}.attempts order by attempt_id") == before
    # Twice: what was answered but not written, and the one that it was holding.
    assert_each_answered_once(job, 5 - kept + 1)


@pytest.mark.parametrize("target", ["postgres"], indirect=True)
def test_claims_of_a_lost_worker_are_asked_before_what_is_later_in_the_queue(
    target: Target, forks: Forks, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    job = queued_job(target, tmp_path / "sent.log")
    engine = {"is_engine": True}
    # The first dies over the first four; the second has the next four and waits within them.
    assert forks.work(replace(job, engine=engine), "answer:1").wait() == -9
    busy = forks.work(replace(job, engine={**engine, "gate": str(gate), "gate_after": 2}))
    wait_for((tmp_path / "gate.reached").exists)
    let_leases_run_out_of_others(target)
    gate.touch()
    busy.finish()
    order = list(dict.fromkeys(fake.sent(Path(job.log))[1:]))
    assert len(order) == ROWS
    # Right after the shard that it was at, which holds four.
    assert fake.sent(Path(job.log))[0] in order[4:8]


@pytest.mark.parametrize("target", ["postgres"], indirect=True)
def test_queue_replaced_under_a_worker_is_left_at_the_next_shard(
    target: Target, forks: Forks, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    job = queued_job(target, tmp_path / "sent.log")
    busy = forks.work(replace(job, engine={"gate": str(gate), "gate_after": 2}))
    wait_for((tmp_path / "gate.reached").exists)
    fewer = replace(job, bodies=job.bodies[:6])
    run_job(fewer)
    gate.touch()
    busy.finish()
    asked: Callable[[], int] = lambda: len(set(fake.sent(tmp_path / "sent.log")))  # noqa: E731
    assert 6 <= asked() <= 6 + 4  # of the shard that it was at, which holds four
    assert run_job(fewer).ok == 6
