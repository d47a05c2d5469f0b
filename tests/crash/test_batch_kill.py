"""A run killed at any point of a batch's life: no row is lost, and none is paid for twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from batchsql.emulate import Behaviour, Durations, Emulator, Rule
from tests.crash.conftest import MakeTarget
from tests.support.lean import Forks, Job, run_job
from tests.support.project import Target
from tests.support.rehearsed import (
    Conduct,
    RehearsedProvider,
    assert_nothing_lost,
    assert_paid_once,
    let_time_pass,
    quickened,
    run_conducted,
    run_to_the_end,
    shard_states,
)

AN_HOUR = Durations(0, 3600, 0, 0)
FLUSH_ROWS = 3
IN_FLIGHT = 4  # two at once, and two more to keep the places filled

on_both = pytest.mark.parametrize(
    ("make_target", "provider"),
    [
        ("duckdb", "openai"),
        ("postgres", "openai"),
        ("duckdb", "anthropic"),
        ("postgres", "anthropic"),
        ("duckdb", "google"),
        ("postgres", "google"),
        ("duckdb", "bedrock"),
        ("postgres", "bedrock"),
    ],
    indirect=True,
)


def nth(trace: Sequence[str], name: str, number: int) -> int:
    """Return the number among all points of the so-many-th with a name."""
    return [n for n, each in enumerate(trace, 1) if each == name][number - 1]


def durable(trace: Sequence[str], first: int, last: int) -> list[int]:
    """Return the points from one to another between which something becomes durable.

    Of the two points of a transaction the one before its commit: after it, nothing is done until
    the next one's.
    """
    numbers, transactions = [], 0
    for number, name in enumerate(trace, 1):
        transactions += name == "ledger"
        is_after_commit = name == "ledger" and transactions % 2 == 0
        if first <= number <= last and name != "line" and not is_after_commit:
            numbers.append(number)
    return numbers


def submission_points(trace: Sequence[str], provider: str) -> list[int]:
    """Return where to kill a run around its second batch, one being at the provider already."""
    created = nth(trace, "create", 4)
    if provider in ("openai", "anthropic"):
        return durable(trace, nth(trace, "create", 2) + 1, len(trace))
    # Intent written, intent committed, about to create, created, record written, recorded.
    return list(range(created - 3, created + 3))


def collection_points(trace: Sequence[str], provider: str) -> list[int]:
    """Return where to kill a run that collects two batches, in all of the first one's end."""
    if provider in ("openai", "anthropic"):
        return durable(trace, 1, nth(trace, "line", 5) - 1)
    # The end is recorded, the first two answers and then the others are written or not.
    third, fifth = nth(trace, "line", 3), nth(trace, "line", 5)
    ended, closing = nth(trace, "line", 1) - 1, durable(trace, third, fifth)
    return [ended, *durable(trace, ended + 1, third), *closing]


@on_both
def test_kill_around_a_submission_pays_nothing_twice(
    make_target: MakeTarget, provider: RehearsedProvider, forks: Forks
) -> None:
    conduct = Conduct(environment=provider.environment)
    with provider.rehearsal() as emulator:
        whole = forks.start(run_conducted, provider.job(make_target(), emulator), conduct).finish()
    trace = whole["trace"]
    names = Counter(trace)
    assert (names["upload"], names["create"], names["build"]) == (4, 4, 2)
    for number in submission_points(trace, provider.name):
        where = f"killed at point {number} of {len(trace)}, {trace[number - 1]}"
        with provider.rehearsal() as emulator:
            job = provider.job(make_target(), emulator)
            child = forks.start(run_conducted, job, replace(conduct, die_at=f"any:{number}"))
            assert child.wait() == -9, where
            run_to_the_end(job)
            assert_paid_once(job, emulator, where)


@on_both
def test_kill_while_collecting_pays_nothing_twice(
    make_target: MakeTarget, provider: RehearsedProvider, forks: Forks
) -> None:
    conduct = Conduct(environment=provider.environment)
    with provider.rehearsal() as emulator:
        job = provider.job(make_target(), emulator)
        run_job(job)
        trace = forks.start(run_conducted, job, conduct).finish()["trace"]
    assert Counter(trace)["line"] == 8
    for number in collection_points(trace, provider.name):
        where = f"killed at point {number} of {len(trace)}, {trace[number - 1]}"
        with provider.rehearsal() as emulator:
            job = provider.job(make_target(), emulator)
            assert run_job(job).pending == 8
            child = forks.start(run_conducted, job, replace(conduct, die_at=f"any:{number}"))
            assert child.wait() == -9, where
            run_to_the_end(job)
            assert_paid_once(job, emulator, where)
            assert provider.creations(emulator) == 2, where


@pytest.mark.parametrize("provider", ["openai", "anthropic"], indirect=True)
def test_two_kills_in_a_row_pay_nothing_twice(
    make_target: MakeTarget, provider: RehearsedProvider, forks: Forks
) -> None:
    conduct = Conduct(environment=provider.environment)
    with provider.rehearsal() as emulator:
        job = provider.job(make_target(), emulator)
        # Created and not recorded; found by the second run, which dies over its results.
        for point in ("create:2", "line:3"):
            child = forks.start(run_conducted, job, replace(conduct, die_at=point))
            assert child.wait() == -9
            let_time_pass(job.target)
        assert job.target.one("select count(*) from {ledger}.results") == 2
        said = run_to_the_end(job)
        assert not any("lines that" in message for message in said)
        assert_paid_once(job, emulator)
        assert provider.creations(emulator) == 2


@pytest.mark.parametrize("provider", ["openai", "anthropic", "google", "bedrock"], indirect=True)
@pytest.mark.parametrize(
    ("target", "behaviour", "create_seconds"),
    [("duckdb", Behaviour.LOST_REPLY, None), ("postgres", Behaviour.SLOW, 4.0)],
    indirect=["target"],
)
def test_batch_whose_creation_got_no_reply_is_found_later(
    target: Target, provider: RehearsedProvider, behaviour: Behaviour, create_seconds: float | None
) -> None:
    with provider.rehearsal(AN_HOUR) as emulator, quickened(create_seconds=create_seconds):
        emulator.misbehave(
            Rule(behaviour=behaviour, endpoint=f"{provider.name}.batches.create", count=1)
        )
        job = provider.job(target, emulator)
        messages: list[str] = []
        assert run_job(job, say=messages.append).pending == 8
        assert sum("was lost" in message for message in messages) == 1
        emulator.release()
        for _ in range(2):  # too early to tell
            assert run_job(job).pending == 8
            assert shard_states(target) == ["submitted", "submitting"]
        let_time_pass(target)
        assert run_job(job).pending == 8
        # Anthropic shows whose requests are in a batch only when it has ended.
        is_found = provider.name != "anthropic"
        assert shard_states(target) == ["submitted", "submitted" if is_found else "submitting"]
        emulator.finish()
        assert run_job(job).ok == 8
        assert_paid_once(job, emulator)
        assert provider.creations(emulator) == 2


@pytest.mark.parametrize("provider", ["openai"], indirect=True)
def test_kill_of_an_online_run_pays_little_twice(
    make_target: MakeTarget, provider: RehearsedProvider, forks: Forks
) -> None:
    rows = 12
    conduct = Conduct(environment=provider.environment)

    def online(emulator: Emulator) -> Job:
        job = provider.job(
            make_target(), emulator, bodies=[f"ticket {n}" for n in range(rows)],
            options={"route": "online", "flush_rows": FLUSH_ROWS, "flush_seconds": 600},
        )  # fmt: skip
        return replace(job, engine={**job.engine, "max_concurrency": 2})

    twice = []
    with provider.rehearsal() as emulator:
        job = online(emulator)
        trace = forks.start(run_conducted, job, conduct).finish()["trace"]
    # Every other point: after what was written, before it is committed; from the first claim on.
    for number in range(len(trace) - 23, len(trace) + 1, 2):
        where = f"killed at point {number} of {len(trace)}, {trace[number - 1]}"
        with provider.rehearsal() as emulator:
            job = online(emulator)
            child = forks.start(run_conducted, job, replace(conduct, die_at=f"any:{number}"))
            assert child.wait() == -9, where
            run_to_the_end(job)
            assert_nothing_lost(job, where)
            paid = emulator.bill.by_prompt
            assert len(paid) == rows, where
            assert max(paid.values()) <= 2, where
            assert len(emulator.bill.paid_twice) <= FLUSH_ROWS + IN_FLIGHT, where
            twice.append(len(emulator.bill.paid_twice))
    # The points lie where they should: some kills do lose answers that were not written yet.
    assert max(twice) >= FLUSH_ROWS
    assert twice[-1] == 0
