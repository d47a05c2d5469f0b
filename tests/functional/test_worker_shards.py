"""The shards of a worker: how large they are, and what they say of the engine."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from batchsql.types import Call, Completion, Request
from tests.support import fake, points
from tests.support.lean import Job, run_job, work_job
from tests.support.project import Target

ROWS = 10
PROMPT_TOKENS, GENERATED_TOKENS = 10.0, 3.0
"""What an engine counts for each request."""

GAUGES = {"running": 4.0, "waiting": 2.0, "kv_cache_use": 0.25, "load_seconds": 12.5}


class CountingEngine(fake.FakeBackend):
    """The fake backend as an engine that counts what it does."""

    _answered = 0

    def complete(
        self, requests: Iterator[Request], call: Call, stop: threading.Event
    ) -> Iterator[Completion | None]:
        for completion in super().complete(requests, call, stop):
            self._answered += 1
            yield completion

    def figures(self) -> Mapping[str, float]:
        return {
            "prompt_tokens": PROMPT_TOKENS * self._answered,
            "generated_tokens": GENERATED_TOKENS * self._answered,
            **GAUGES,
        }


def queued_job(target: Target, log: Path, rows: int, shard_requests: int) -> Job:
    """Return a job whose requests wait for a worker with an engine."""
    job = Job(
        target, str(log), [f"ticket {n}" for n in range(rows)],
        engine={"is_engine": True, "shard_requests": shard_requests},
        options={"runner": "detached"},
    )  # fmt: skip
    assert run_job(job).requests_sent == 0
    return job


@pytest.mark.parametrize("ends_after", [ROWS, 4], ids=["answered whole", "told to end"])
def test_closed_shard_says_how_the_engine_did(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends_after: int
) -> None:
    job = queued_job(target, tmp_path / "sent.log", ROWS, ROWS)
    monkeypatch.setattr(fake, "FakeBackend", CountingEngine)
    points.arm(f"answer:{ends_after}", number=signal.SIGTERM)
    try:
        assert work_job(job)["counts"]["ok"] == ends_after
    finally:
        points.arm(None)
    ((state, requests, text),) = target.query("select state, ok, figures from {ledger}.shards")
    assert (state, requests) == ("finished", ends_after)
    figures = json.loads(text)
    assert figures["prompt_tokens"] == PROMPT_TOKENS * ends_after
    assert figures["generated_tokens"] == GENERATED_TOKENS * ends_after
    assert {name: figures[name] for name in GAUGES} == GAUGES
    assert figures["seconds"] > 0


def test_second_shard_is_as_large_as_the_measured_speed_allows(
    target: Target, tmp_path: Path
) -> None:
    first, rows = 100, 350  # a speed is measured over 100 answers
    work_job(queued_job(target, tmp_path / "sent.log", rows, first))
    sizes = target.query("select requests from {ledger}.shards order by created_at")
    # The rest is far less than the work of ten minutes for a backend that answers at once.
    assert sizes == [(first,), (rows - first,)]
