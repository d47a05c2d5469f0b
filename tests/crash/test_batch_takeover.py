"""Several processes and the batches of one ledger: each is submitted and collected once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest

from batchsql.backends import registry
from batchsql.backends.batch import BatchBackend
from batchsql.emulate import Durations
from batchsql.pricing import open_prices
from batchsql.rounds import Rounds
from batchsql.types import Call, ModelRef, Request
from batchsql.warehouse.ledger import Ledger
from tests.support.lean import TEMPLATE, Child, Forks, Job, connect, run_job, wait_for
from tests.support.project import Target
from tests.support.rehearsed import (
    Conduct,
    RehearsedProvider,
    assert_paid_once,
    attempts,
    let_time_pass,
    quicken,
    run_conducted,
    run_to_the_end,
    shard_states,
    shards,
)

AN_HOUR = Durations(0, 3600, 0, 0)
ROUNDS = 50
ROWS = 6

# Another template, another spec, the same requests.
RENAMED = TEMPLATE.replace("{{ body }}", "{% if body %}{{ body }}{% endif %}")

only_postgres = pytest.mark.parametrize("target", ["postgres"], indirect=True)


@contextmanager
def stopped(child: Child, stop_file: Path) -> Iterator[None]:
    """Wait until a run has stopped at its point, and let it go on in the end."""
    wait_for(stop_file.exists)
    os.kill(child.pid, signal.SIGSTOP)  # it is about to do so itself
    try:
        yield
    finally:
        os.kill(child.pid, signal.SIGCONT)


# --- a run that is silent for too long ------------------------------------------------------------


@only_postgres
@pytest.mark.parametrize("provider", ["openai", "anthropic", "google", "bedrock"], indirect=True)
def test_run_stopped_before_a_creation_submits_nothing_late(
    target: Target, provider: RehearsedProvider, forks: Forks, tmp_path: Path
) -> None:
    create_seconds = 2.0
    conduct = Conduct(
        die_at="create:1", stop_file=tmp_path / "stopped", create_seconds=create_seconds,
        environment=provider.environment,
    )  # fmt: skip
    with provider.rehearsal(AN_HOUR) as emulator:
        job = provider.job(target, emulator)
        slow = forks.start(run_conducted, job, conduct)
        with stopped(slow, tmp_path / "stopped"):
            too_late = time.monotonic() + create_seconds / 2
            assert shard_states(target) == ["submitting"]
            let_time_pass(target)
            messages: list[str] = []
            counts = run_job(job, say=messages.append)
            assert any("was never created" in message for message in messages)
            assert counts.requests_sent == 8
            assert shard_states(target) == ["abandoned", "submitted", "submitted"]
            before = shards(target)
            wait_for(lambda: time.monotonic() > too_late)
        report = slow.finish()
        assert provider.creations(emulator) == 2
        assert shards(target) == before
        assert sum("taken over" in message for message in report["messages"]) == 1
        assert report["counts"]["requests_sent"] == 0
        assert report["counts"]["pending"] == 8
        emulator.finish()
        run_to_the_end(job)
        assert_paid_once(job, emulator)


@only_postgres
@pytest.mark.parametrize("provider", ["openai", "anthropic"], indirect=True)
def test_run_stopped_after_a_creation_leaves_the_batch_to_who_found_it(
    target: Target, provider: RehearsedProvider, forks: Forks, tmp_path: Path
) -> None:
    conduct = Conduct(
        die_at="create:2", stop_file=tmp_path / "stopped", environment=provider.environment
    )
    with provider.rehearsal() as emulator:
        job = provider.job(target, emulator)
        slow = forks.start(run_conducted, job, conduct)
        with stopped(slow, tmp_path / "stopped"):
            assert any("found the batch" in message for message in run_to_the_end(job))
            before = attempts(target), shards(target)
        report = slow.finish()
        assert (attempts(target), shards(target)) == before
        assert sum("taken over" in message for message in report["messages"]) == 1
        assert report["counts"]["requests_sent"] == 0
        assert report["counts"]["ok"] == 8
        assert provider.creations(emulator) == 2
        assert_paid_once(job, emulator)


@only_postgres
@pytest.mark.parametrize("provider", ["openai", "anthropic"], indirect=True)
def test_collection_stopped_before_a_flush_writes_nothing_after_takeover(
    target: Target, provider: RehearsedProvider, forks: Forks, tmp_path: Path
) -> None:
    conduct = Conduct(
        die_at="line:4", stop_file=tmp_path / "stopped", environment=provider.environment
    )
    with provider.rehearsal() as emulator:
        job = provider.job(target, emulator)
        run_job(job)
        slow = forks.start(run_conducted, job, conduct)
        with stopped(slow, tmp_path / "stopped"):
            assert len(attempts(target)) == 2
            assert run_job(job).ok == 2 + 4  # not the rest, which somebody looks after
            let_time_pass(target)
            assert run_job(job).ok == 8
            before = attempts(target), shards(target)
        report = slow.finish()
        assert (attempts(target), shards(target)) == before
        assert sum("taken over" in message for message in report["messages"]) == 1
        # Of its own: the two that it wrote before it was stopped.
        assert report["counts"]["requests_ok"] == 2
        assert report["counts"]["ok"] == 8
        assert_paid_once(job, emulator)


@only_postgres
@pytest.mark.parametrize("provider", ["openai"], indirect=True)
def test_collection_writes_nothing_while_its_new_owner_is_at_it(
    target: Target, provider: RehearsedProvider, forks: Forks, tmp_path: Path
) -> None:
    old_file, new_file = tmp_path / "old", tmp_path / "new"
    of_the_shard = (
        "select s.epoch, s.owner, s.ok, count(*) from {ledger}.shards s join {ledger}.attempts a "
        "on a.shard_id = s.shard_id where s.state = 'ended' group by 1, 2, 3"
    )
    with provider.rehearsal() as emulator:
        job = provider.job(target, emulator)
        run_job(job)
        old = forks.start(
            run_conducted, job, Conduct("line:4", old_file, None, provider.environment)
        )
        with stopped(old, old_file):
            let_time_pass(target)
            conduct = Conduct("line:3", new_file, None, provider.environment)
            new = forks.start(run_conducted, job, conduct)
            wait_for(new_file.exists)
            before = target.query(of_the_shard)
        with stopped(new, new_file):
            report = old.finish()
            assert target.query(of_the_shard) == before
        assert before[0][2:] == (2, 2)
        assert sum("taken over" in message for message in report["messages"]) == 1
        assert report["counts"]["ok"] == 2 + 4  # the other batch is whoever's comes first
        assert new.finish()["counts"]["ok"] == 8
        assert_paid_once(job, emulator)


# --- at the same time -----------------------------------------------------------------------------


def meet_before_claim(backend: BatchBackend, meet: Callable[[], object]) -> BatchBackend:
    """Let a backend wait for the other run right before this one claims requests for a batch."""
    encoder = backend.encoder
    has_met = False

    def met(call: Call) -> Callable[[str, Request], bytes]:
        nonlocal has_met
        if not has_met:
            has_met = True
            meet()
        return encoder(call)

    backend.encoder = met  # type: ignore[method-assign]
    return backend


def unheard(message: str) -> None:
    pass


def in_round(job: Job, number: int) -> Job:
    return replace(job, bodies=[f"round {number} ticket {n}" for n in range(ROWS)])


def run_rounds(
    job: Job, together: Any, pair: Any, environment: Mapping[str, str], database: Any = None
) -> list[int]:
    """Run a model once a round, each time together with the other one; return what each sent."""
    os.environ.update(environment)
    quicken()

    def open_meeting(model: ModelRef, engine: Mapping[str, Any]) -> BatchBackend | None:
        backend = registry.open_batch_backend(model, engine, Path())
        return backend and meet_before_claim(backend, lambda: pair.wait(60))

    sent = []
    for number in range(ROUNDS):
        together.wait(60)
        counts = run_job(in_round(job, number), database, open_batch_backend=open_meeting)
        sent.append(counts.requests_sent)
    return sent


def collect_rounds(
    job: Job, together: Any, environment: Mapping[str, str], database: Any = None
) -> list[str]:
    """Collect while the two run; return the errors of batches."""
    os.environ.update(environment)
    quicken()
    errors = []
    with connect(job, database) as (_, warehouse, _, _):
        for _ in range(ROUNDS):
            together.wait(60)
            ledger = Ledger(warehouse, job.target.ledger)
            ledger.migrate()
            rounds = Rounds(
                ledger,
                open_batch_backend=lambda m, e: registry.open_batch_backend(m, e, Path()),
                open_backend=lambda m, e: registry.open_backend(m, e, Path()),
                open_prices=open_prices, stop=threading.Event(), say=unheard, warn=unheard,
            )  # fmt: skip
            for _ in range(3):
                errors += [str(error) for error in rounds.make().errors]
            rounds.close()
    return errors


@pytest.mark.parametrize("provider", ["openai"], indirect=True)
def test_two_runs_and_a_collector_send_each_request_once(
    target: Target, provider: RehearsedProvider, forks: Forks
) -> None:
    with provider.rehearsal() as emulator:
        first = provider.job(target, emulator, name="first")
        second = replace(first, name="second", template=RENAMED)
        sent: Sequence[Sequence[int]]
        if target.kind == "duckdb":
            together, pair = threading.Barrier(3), threading.Barrier(2)
            with duckdb.connect(target.profile["path"]) as database, ThreadPoolExecutor(3) as pool:
                shared = provider.environment, database
                runs = [
                    pool.submit(run_rounds, job, together, pair, *shared) for job in (first, second)
                ]
                errors = pool.submit(collect_rounds, first, together, *shared).result()
                sent = [run.result() for run in runs]
        else:
            barriers = forks.context.Barrier(3), forks.context.Barrier(2)
            env = provider.environment
            runners = [forks.start(run_rounds, j, *barriers, env) for j in (first, second)]
            collector = forks.start(collect_rounds, first, barriers[0], env)
            sent = [runner.finish(240) for runner in runners]  # type: ignore[misc]
            errors = collector.finish()  # type: ignore[assignment]
        assert errors == []
        assert all(sum(each) == ROWS for each in zip(*sent, strict=True))
        # They did work at the same time: in most rounds, both sent a share.
        assert sum(own > 0 and others > 0 for own, others in zip(*sent, strict=True)) > ROUNDS / 2
        whole = [body for n in range(ROUNDS) for body in in_round(first, n).bodies]
        finals = [replace(job, bodies=whole) for job in (first, second)]
        for job in finals:  # each brings home what its last batches hold, also for the other
            assert run_job(job).requests_sent == 0
        for job in finals:
            assert run_job(job).requests_sent == 0
            assert_paid_once(job, emulator)
