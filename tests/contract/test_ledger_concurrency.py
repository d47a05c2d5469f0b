"""Several runs on one ledger at once: each request is sent once, and nobody waits for strangers."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from batchsql.declare.spec import Declaration
from batchsql.errors import LedgerVersionError
from batchsql.types import Call, Completion, Outcome, Request
from batchsql.warehouse.ledger import Ledger, SpecRow
from batchsql.warehouse.postgres import connect_adbc
from batchsql.warehouse.shards import Attempt, ShardOrder
from batchsql.warehouse.tables import LEDGER_VERSION
from tests.support import fake
from tests.support.lean import TEMPLATE, Forks, Job, connect, run_job, wait_for
from tests.support.project import Target, postgres_target

ROUNDS = 50
ROWS = 10

# Another template, another spec, the same requests.
RENAMED = TEMPLATE.replace("{{ body }}", "{% if body %}{{ body }}{% endif %}")


class MeetingBackend(fake.FakeBackend):
    """Waits for the other run of its round before the first claim, and before the first answer."""

    def __init__(self, engine: Mapping[str, Any], barrier: Any) -> None:
        super().__init__(engine)
        self._barrier = barrier
        self._has_met = False

    def complete(
        self, requests: Iterator[Request], call: Call, stop: threading.Event
    ) -> Iterator[Completion | None]:
        if self._has_met:
            yield from super().complete(requests, call, stop)
            return
        self._has_met = True
        self._barrier.wait(30)
        yield from super().complete(self._meet_once_more(requests), call, stop)

    def _meet_once_more(self, requests: Iterator[Request]) -> Iterator[Request]:
        for number, request in enumerate(requests):
            if number == 0:
                self._barrier.wait(30)
            yield request


def jobs_of(target: Target, tmp_path: Path) -> tuple[Job, Job]:
    """Two models with templates of their own that render the same requests."""
    first = Job(target, str(tmp_path / "sent.log"), (), "first", options={"flush_rows": 3})
    return first, replace(first, name="second", template=RENAMED)


def in_round(job: Job, number: int) -> Job:
    return replace(job, bodies=[f"round {number} ticket {n}" for n in range(ROWS)])


def run_rounds(job: Job, barrier: Any, database: Any = None) -> list[int]:
    """Run a model once a round, each time together with the other one; return what each sent."""

    def open_backend(declaration: Declaration) -> MeetingBackend:
        return MeetingBackend(declaration.engine, barrier)

    return [
        run_job(in_round(job, number), database, open_backend).requests_sent
        for number in range(ROUNDS)
    ]


def test_two_runs_at_once_send_each_request_once(
    target: Target, forks: Forks, tmp_path: Path
) -> None:
    jobs = jobs_of(target, tmp_path)
    sent_by: list[list[int]]
    if target.kind == "duckdb":
        meeting = threading.Barrier(2)
        with duckdb.connect(target.profile["path"]) as database, ThreadPoolExecutor(2) as threads:
            runs = [threads.submit(run_rounds, job, meeting, database) for job in jobs]
            sent_by = [run.result() for run in runs]
    else:
        barrier = forks.context.Barrier(2)
        children = [forks.start(run_rounds, job, barrier) for job in jobs]
        sent_by = [child.finish(120) for child in children]  # type: ignore[misc]

    # The backend's own count, not the ledger's.
    sent = Counter(fake.sent(tmp_path / "sent.log"))
    assert len(sent) == ROUNDS * ROWS
    assert set(sent.values()) == {1}
    # They did work at the same time: in each round, both sent a share.
    assert all(
        own and others and own + others == ROWS for own, others in zip(*sent_by, strict=True)
    )
    for name in ("first", "second"):
        assert target.query(
            f"select llm_status, count(*), count(category) from {{schema}}.{name} group by 1"
        ) == [("ok", ROWS, ROWS)]
    assert target.query("select count(*), count(distinct request_key) from {ledger}.results") == [
        (ROUNDS * ROWS, ROUNDS * ROWS)
    ]
    assert target.one("select count(*) from {ledger}.attempts") == ROUNDS * ROWS
    assert target.one("select count(*) from {ledger}.claims") == 0
    assert target.one("select count(*) from {ledger}.shards where state <> 'finished'") == 0


def test_unrelated_run_does_not_wait(target: Target, forks: Forks, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    slow = Job(
        target, str(tmp_path / "slow.log"), ["slow 1", "slow 2", "slow 3"], "slow",
        engine={"gate": str(gate), "gate_after": 1},
    )  # fmt: skip
    other = Job(target, str(tmp_path / "other.log"), ["other 1", "other 2"], "other")
    reached = tmp_path / "gate.reached"
    if target.kind == "duckdb":
        with duckdb.connect(target.profile["path"]) as database, ThreadPoolExecutor(1) as threads:
            run = threads.submit(run_job, slow, database)
            wait_for(reached.exists)
            counts = run_job(other, database)
            assert not run.done()
            gate.touch()
            slow_sent = run.result(30).requests_sent
    else:
        child = forks.run(slow)
        wait_for(reached.exists)
        counts = run_job(other)
        assert child.process.is_alive()
        assert (
            target.query(
                "select query from pg_stat_activity where state like 'idle in transaction%'"
            )
            == []
        )  # while it waits for its model
        gate.touch()
        slow_sent = child.finish()["counts"]["requests_sent"]
    assert (counts.ok, counts.requests_sent, slow_sent) == (2, 2, 3)


def test_run_waits_for_answers_another_run_is_getting(
    target: Target, forks: Forks, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    slow = Job(
        target, str(tmp_path / "sent.log"), ["a", "b", "c"], "slow",
        engine={"gate": str(gate), "gate_after": 1},
    )  # fmt: skip
    same = replace(slow, name="same", engine={})
    said: list[str] = []

    def say(message: str) -> None:
        said.append(message)
        if "another run is answering" in message:
            gate.touch()

    if target.kind == "duckdb":
        with duckdb.connect(target.profile["path"]) as database, ThreadPoolExecutor(1) as threads:
            run = threads.submit(run_job, slow, database)
            wait_for((tmp_path / "gate.reached").exists)
            counts = run_job(same, database, say=say)
            run.result(30)
    else:
        child = forks.run(slow)
        wait_for((tmp_path / "gate.reached").exists)
        counts = run_job(same, say=say)
        child.finish()
    assert any("another run is answering" in message for message in said)
    assert (counts.ok, counts.requests_sent) == (3, 0)
    assert set(Counter(fake.sent(tmp_path / "sent.log")).values()) == {1}


def test_answer_borrowed_while_another_run_asks_adds_up(
    target: Target, forks: Forks, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    log = str(tmp_path / "sent.log")
    known = replace(target, schema=f"{target.schema}_known")
    slow = Job(
        target, log, ["a", "b", "c"], "slow", engine={"gate": str(gate), "gate_after": 1},
    )  # fmt: skip
    borrower = replace(slow, name="borrower", engine={}, options={"read_from": known.ledger})
    if target.kind == "duckdb":
        with duckdb.connect(target.profile["path"]) as database, ThreadPoolExecutor(1) as threads:
            run_job(Job(known, str(tmp_path / "known.log"), ["a", "b", "c"]), database)
            run = threads.submit(run_job, slow, database)
            wait_for((tmp_path / "gate.reached").exists)
            counts = run_job(borrower, database)
            gate.touch()
            slow_ok = run.result(30).ok
    else:
        try:
            run_job(Job(known, str(tmp_path / "known.log"), ["a", "b", "c"]))
            child = forks.run(slow)
            wait_for((tmp_path / "gate.reached").exists)
            counts = run_job(borrower)
            gate.touch()
            slow_ok = child.finish()["counts"]["ok"]
        finally:
            known.drop()
    assert (counts.ok, counts.requests_borrowed, counts.requests_sent) == (3, 3, 0)
    assert slow_ok == 3
    assert target.one("select count(*) from {ledger}.results") == 3


def test_ledger_sees_what_others_commit_whatever_the_default_isolation(postgres_uri: str) -> None:
    profile = postgres_target(postgres_uri).profile
    connection = connect_adbc(
        f"host={profile['host']} user=postgres dbname=postgres "
        "options='-c default_transaction_isolation=serializable'",
        None,
    )
    try:
        with connection.cursor() as cursor:
            cursor.execute("select current_setting('transaction_isolation')")
            assert cursor.fetchall() == [("read committed",)]
    finally:
        connection.close()


def migrate_together(job: Job, barrier: Any, database: Any = None) -> bool:
    with connect(job, database) as (_, warehouse, _, _):
        ledger = Ledger(warehouse, job.target.ledger)
        barrier.wait(30)
        ledger.migrate()
        return ledger.exists()


def test_first_use_by_eight_at_once_makes_one_ledger(
    target: Target, forks: Forks, tmp_path: Path
) -> None:
    job = Job(target, str(tmp_path / "sent.log"), ())
    if target.kind == "duckdb":
        meeting = threading.Barrier(8)
        with duckdb.connect(target.profile["path"]) as database, ThreadPoolExecutor(8) as threads:
            runs = [threads.submit(migrate_together, job, meeting, database) for _ in range(8)]
            assert all(run.result() for run in runs)
    else:
        barrier = forks.context.Barrier(8)
        children = [forks.start(migrate_together, job, barrier) for _ in range(8)]
        assert all(child.finish() for child in children)
    versions = [(step,) for step in range(1, LEDGER_VERSION + 1)]
    assert target.query("select ledger_version from {ledger}.meta order by 1") == versions


def test_newer_ledger_is_refused(target: Target, tmp_path: Path) -> None:
    job = Job(target, str(tmp_path / "sent.log"), ["a"])
    run_job(job)
    target.query(f"update {{ledger}}.meta set ledger_version = {LEDGER_VERSION + 1}")
    with pytest.raises(LedgerVersionError, match=f"version {LEDGER_VERSION + 1}.*newer.*Upgrade"):
        run_job(replace(job, bodies=["a", "b"]))
    assert len(fake.sent(tmp_path / "sent.log")) == 1


def test_table_of_the_users_named_like_a_working_table_is_left_alone(
    target: Target, tmp_path: Path
) -> None:
    names = ("todo", "borrowed")
    default_schema = {"duckdb": "main", "postgres": "public"}[target.kind]
    for name in names:
        target.query(f"create table {default_schema}.{name} as select 1 as precious")
    try:
        run_job(Job(target, str(tmp_path / "sent.log"), ["a", "b"]))
        for name in names:
            assert target.query(f"select precious from {default_schema}.{name}") == [(1,)]
    finally:
        for name in names:
            target.query(f"drop table if exists {default_schema}.{name}")


@pytest.mark.parametrize("target", ["postgres"], indirect=True)
def test_leftover_candidate_is_dropped_once_its_run_is_surely_over(
    target: Target, forks: Forks, tmp_path: Path
) -> None:
    log = str(tmp_path / "sent.log")
    gate = tmp_path / "gate"
    alive = forks.run(Job(target, log, ["a", "b"], "alive", engine={"gate": str(gate)}))
    wait_for((tmp_path / "gate.reached").exists)
    assert forks.run(Job(target, log, ["c"], "dead"), "answer:1").wait() == -9
    target.query("create unlogged table {ledger}.candidate_profiles as select 1 as precious")

    def candidates() -> set[str]:
        found = target.query(
            "select enrichment from pg_tables t join {ledger}.runs r on t.tablename = "
            "'candidate_' || replace(r.run_id::text, '-', '') where t.schemaname = '{ledger}'"
        )
        return {name.removeprefix("model.shop.") for (name,) in found}

    run_job(Job(target, log, ["d"], "third"))
    assert candidates() == {"alive", "dead"}
    target.query("update {ledger}.runs set started_at = started_at - interval '2 days'")
    target.query(
        "update {ledger}.shards set lease_expires_at = now() - interval '1 day' where run_id = "
        "(select run_id from {ledger}.runs where enrichment = 'model.shop.dead')"
    )
    run_job(Job(target, log, ["e"], "fourth"))
    assert candidates() == {"alive"}
    gate.touch()
    assert alive.finish()["counts"]["ok"] == 2
    assert target.query("select state, count(*) from {ledger}.runs group by 1 order by 1") == [
        ("finished", 3), ("interrupted", 1),
    ]  # fmt: skip
    assert target.one("select precious from {ledger}.candidate_profiles") == 1


@pytest.mark.parametrize("target", ["postgres"], indirect=True)
def test_claim_that_waited_for_an_answer_being_written_is_given_up(
    target: Target, tmp_path: Path
) -> None:
    job = Job(target, str(tmp_path / "sent.log"), ())
    key, spec = "a" * 32, "b" * 32
    order = ShardOrder(str(uuid.uuid4()), "o", "e", spec, "fake", "fake/m", 60)
    todo = pa.RecordBatch.from_pydict({"request_key": [key], "position": [1], "is_urgent": [False]})
    with (
        connect(job) as (_, first_warehouse, _, _),
        connect(job) as (_, second_warehouse, _, _),
        ThreadPoolExecutor(1) as threads,
    ):
        first, second = (
            Ledger(warehouse, target.ledger) for warehouse in (first_warehouse, second_warehouse)
        )
        first.migrate()
        first.write_spec(SpecRow(spec, 1, "fake/m", "t", "{}", "[]", "standard", "{}", "[]"))
        first.write_items(
            spec,
            pa.table({"item_key": [key], "request_key": [key], "unique_key": ["1"]}),
            pa.table({"request_key": [key], "messages": ['[["user","hi"]]']}),
        )
        first.load_todo([todo])
        second.load_todo([todo])
        shard, _ = first.claim(order, after=0, size=5)
        assert shard is not None
        attempt = Attempt(shard.shard_id, key, 1, Outcome.OK, False, "{}", "c")
        with first_warehouse.transaction():
            first._write_attempts([attempt], order.run_id, 0)
            # The second one sees no answer yet, and waits for the claim that is about to go.
            claiming = threads.submit(second.claim, order, after=0, size=5)
            wait_for(
                lambda: target.one(
                    "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
                )
            )
        assert claiming.result(30) == (None, 1)
    assert target.one("select count(*) from {ledger}.claims") == 0
