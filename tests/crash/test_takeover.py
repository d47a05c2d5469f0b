"""A run that is silent for longer than its lease: another one takes over, and it writes no more."""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import fake
from tests.support.lean import Forks, Job, run_job, wait_for
from tests.support.project import Target

ROWS = 12


@pytest.mark.parametrize("target", ["postgres"], indirect=True)
@pytest.mark.parametrize(
    ("flush_rows", "gate_after"),
    [
        (100, 2),  # stopped in its first shard, nothing flushed
        (3, 5),  # three of its answers are written, two more are not
    ],
)
def test_stopped_run_writes_nothing_after_takeover(
    target: Target, forks: Forks, tmp_path: Path, flush_rows: int, gate_after: int
) -> None:
    gate = tmp_path / "gate"
    job = Job(
        target, str(tmp_path / "sent.log"), [f"ticket {n}" for n in range(ROWS)],
        options={"flush_rows": flush_rows},
        engine={"gate": str(gate), "gate_after": gate_after}, lease_seconds=1,
    )  # fmt: skip
    stopped = forks.run(job)
    wait_for((tmp_path / "gate.reached").exists)
    kept = target.one("select count(*) from {ledger}.results")
    (slow_run,) = target.query("select run_id::text from {ledger}.runs")[0]
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        finished = forks.run(replace(job, engine={}, options={})).finish()
        assert any("took over" in message for message in finished["messages"])
        before = target.query("select * from {ledger}.attempts order by attempt_id")
    finally:
        gate.touch()
        os.kill(stopped.pid, signal.SIGCONT)
    report = stopped.finish()

    assert any("taken over by another run" in message for message in report["messages"])
    assert report["counts"]["ok"] == ROWS
    assert report["counts"]["requests_sent"] == kept
    assert target.query("select * from {ledger}.attempts order by attempt_id") == before
    assert finished["counts"]["ok"] == ROWS
    assert finished["counts"]["requests_sent"] == ROWS - kept
    assert target.query("select count(*), count(distinct request_key) from {ledger}.results") == [
        (ROWS, ROWS)
    ]
    # The shards that were taken over stay as the second run left them.
    assert target.query(
        "select distinct state, epoch from {ledger}.shards "
        f"where run_id = '{slow_run}'::uuid and state <> 'finished'"
    ) == [("abandoned", 2)]
    assert target.query("select state, count(*) from {ledger}.runs group by 1") == [("finished", 2)]
    sent = Counter(fake.sent(tmp_path / "sent.log"))
    assert len(sent) == ROWS
    # Twice: what was answered but not written, and the one request it was holding.
    assert sum(times == 2 for times in sent.values()) <= gate_after - kept + 1


@pytest.mark.parametrize("target", ["postgres"], indirect=True)
def test_slow_answers_do_not_lose_the_lease(target: Target, forks: Forks, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    job = Job(
        target, str(tmp_path / "sent.log"), ["a", "b", "c"],
        engine={"gate": str(gate), "gate_after": 1}, lease_seconds=2,
    )  # fmt: skip
    slow = forks.run(job)
    wait_for((tmp_path / "gate.reached").exists)
    # Older than its first lease would have lasted, and still the owner.
    wait_for(
        lambda: target.one(
            "select clock_timestamp() > min(created_at) + interval '2.5 seconds' "
            "from {ledger}.shards"
        )
    )

    def open_gate_when_waiting(message: str) -> None:
        if "another run is answering" in message:
            gate.touch()

    second = run_job(replace(job, engine={}), say=open_gate_when_waiting)
    assert second.requests_sent == 0
    assert slow.finish()["counts"]["requests_sent"] == 3
    assert set(Counter(fake.sent(tmp_path / "sent.log")).values()) == {1}
