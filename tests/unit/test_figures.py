from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from batchsql import figures
from batchsql.figures import FigureLog


class Engine:
    """An engine whose figures a test sets."""

    def __init__(self) -> None:
        self.now: dict[str, float] = {}
        self.reads = 0

    def read(self) -> Mapping[str, float]:
        self.reads += 1
        return self.now

    def at(self, prompt: float, generated: float, **more: float) -> None:
        self.now = {
            "prompt_tokens": prompt, "generated_tokens": generated, "preemptions": 0.0,
            "running": 4.0, "waiting": 1.0, "kv_cache_use": 0.5, "prefix_queried_tokens": prompt,
            "prefix_hit_tokens": prompt / 2, "load_seconds": 20.0, **more,
        }  # fmt: skip


def summed(log: FigureLog, since: float, now: float) -> dict[str, Any]:
    text = log.sum_up(since, now)
    assert text is not None
    found: dict[str, Any] = json.loads(text)
    return found


def test_engine_without_figures_has_none() -> None:
    log = FigureLog(dict)
    log.look(0.0)
    assert log.sum_up(0.0, 100.0) is None


def test_shard_has_what_was_done_in_its_time_only() -> None:
    engine = Engine()
    log = FigureLog(engine.read)
    for second in range(0, 61, 10):
        engine.at(prompt=1000.0 + 100 * second, generated=10.0 * second, running=float(second))
        log.look(float(second))
    found = summed(log, 20.0, 60.0)
    # From the last look before it began, at 10, to the end at 60.
    assert (found["prompt_tokens"], found["generated_tokens"]) == (5000.0, 500.0)
    assert found["seconds"] == 40.0
    assert found["prompt_tokens_per_second"] == 125.0
    assert found["running"] == 35.0  # the mean of 10, 20 … 60
    assert found["prefix_hit_rate"] == 0.5
    assert found["load_seconds"] == 20.0
    over_time = found["over_time"]
    assert over_time["seconds"] == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]
    assert over_time["generated_tokens_per_second"] == [0.0] + [10.0] * 5
    assert over_time["running"] == [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]


def test_rates_are_of_the_time_in_which_the_engine_was_busy() -> None:
    engine = Engine()
    log = FigureLog(engine.read)
    engine.at(0.0, 0.0, busy_seconds=0.0)
    log.look(0.0)
    engine.at(1000.0, 100.0, busy_seconds=10.0)
    found = summed(log, 0.0, 40.0)
    assert (found["prompt_tokens_per_second"], found["generated_tokens_per_second"]) == (
        100.0,
        10.0,
    )


def test_engine_loaded_within_the_shard_counts_from_nothing() -> None:
    engine = Engine()
    log = FigureLog(engine.read)
    log.look(0.0)  # not loaded yet
    engine.at(300.0, 30.0)
    assert summed(log, 0.0, 30.0)["prompt_tokens"] == 300.0


def test_engine_that_was_started_anew_counts_from_nothing() -> None:
    engine = Engine()
    log = FigureLog(engine.read)
    engine.at(900.0, 90.0)
    log.look(0.0)
    engine.at(50.0, 5.0, deaths=1.0)
    assert summed(log, 0.0, 20.0)["prompt_tokens"] == 50.0


def test_looks_are_spaced_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "_MOST_LOOKS", 50)
    engine = Engine()
    log = FigureLog(engine.read)
    for tenth in range(600_000):
        engine.at(float(tenth), 0.0)
        log.look(tenth / 10)
    assert engine.reads <= 600_000 / 10 / figures.LOOK_SECONDS + 1
    found = summed(log, 0.0, 60_000.0)
    assert len(found["over_time"]["seconds"]) <= 51
    assert found["prompt_tokens"] > 590_000


def test_shard_of_a_moment_has_figures_too() -> None:
    engine = Engine()
    log = FigureLog(engine.read)
    engine.at(100.0, 10.0)
    log.look(50.0, figures.SOON_SECONDS)
    engine.at(180.0, 18.0)
    assert summed(log, 50.1, 50.4)["prompt_tokens"] == 80.0
