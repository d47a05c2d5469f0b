"""Who may write for a shard, and in which order a queue is handed to those who claim from it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import duckdb
import pyarrow as pa
import pytest

from batchsql.types import Outcome, Route
from batchsql.warehouse.ledger import Ledger, SpecRow
from batchsql.warehouse.shards import Attempt, Shard, ShardOrder, process_id
from tests.support.lean import Job, connect
from tests.support.project import Target

NAME = "model.shop.labels"
SPEC = uuid.UUID(int=1).hex
# Positions go down while keys go up, so that no order of keys is taken for that of the run.
KEYS = [uuid.UUID(int=100 - n).hex for n in range(6)]
URGENT = {KEYS[3], KEYS[5]}


def order_of(owner: str) -> ShardOrder:
    return ShardOrder(
        str(uuid.uuid4()), owner, NAME, SPEC, "fake", "fake/m", 60, Route.ENGINE, "", "{}"
    )


@pytest.fixture
def two(target: Target) -> Iterator[tuple[Ledger, Ledger]]:
    """The ledger as two owners have it, with requests that nobody has claimed."""
    job = Job(target, "", ())
    with ExitStack() as stack:
        database = None
        if target.kind == "duckdb":  # a second process would not get at the file
            database = stack.enter_context(duckdb.connect(target.profile["path"]))
        first, second = (
            Ledger(stack.enter_context(connect(job, database))[1], target.ledger) for _ in range(2)
        )
        first.migrate()
        first.write_spec(SpecRow(SPEC, 1, "fake/m", "t", "{}", "[]", "standard", "{}", "[]"))
        first.write_items(
            SPEC,
            pa.table({"item_key": KEYS, "request_key": KEYS, "unique_key": KEYS}),
            pa.table({"request_key": KEYS, "messages": ['[["user","hi"]]'] * len(KEYS)}),
        )
        for ledger in (first, second):
            ledger.load_todo(
                [
                    pa.RecordBatch.from_pydict(
                        {
                            "request_key": KEYS,
                            "position": list(range(1, len(KEYS) + 1)),
                            "is_urgent": [key in URGENT for key in KEYS],
                        }
                    )
                ]
            )
        yield first, second


def claim(ledger: Ledger, order: ShardOrder, after: int, size: int) -> Shard:
    shard, _ = ledger.claim(order, after=after, size=size)
    assert shard is not None
    return shard


def keys_of(shard: Shard) -> list[str]:
    return [claim.request.request_key for claim in shard.claims]


def answers(shard: Shard, by: str) -> list[Attempt]:
    return [
        Attempt(shard.shard_id, key, 1, Outcome.OK, False, f'{{"by": "{by}"}}', "c")
        for key in keys_of(shard)
    ]


def change(ledger: Ledger, shard: Shard, assignment: str) -> None:
    with ledger.warehouse.transaction():
        ledger.warehouse.execute(
            ledger.sql(f"update {{shards}} set {assignment} where shard_id = ?::uuid"),
            [shard.shard_id],
        )


def count(ledger: Ledger, what: str) -> int:
    return int(ledger.warehouse.fetch(ledger.sql(f"select count(*) from {what}"))[0][0])


def test_owner_whose_shard_was_taken_over_writes_nothing_for_it(two: tuple[Ledger, Ledger]) -> None:
    late, other = two
    mine, theirs = order_of(f"{process_id()}:late"), order_of(f"{process_id()}:other")
    lost, kept = claim(late, mine, 0, 2), claim(late, mine, 2, 2)
    epochs = {shard.shard_id: shard.epoch for shard in (lost, kept)}
    change(late, lost, "lease_expires_at = lease_expires_at - interval '1 hour'")
    assert other.free_lost_shards() == 1
    again = claim(other, theirs, 0, 2)
    assert keys_of(again) == keys_of(lost)

    written = answers(lost, "late") + answers(kept, "late")
    done = dict.fromkeys(epochs)
    assert late.flush(written, epochs, mine.run_id, mine.owner, done) == {lost.shard_id}
    assert count(late, "{attempts}") == count(late, "{results}") == 2
    assert count(late, "{claims}") == 2  # of the other one

    written = answers(again, "other")
    epochs = {again.shard_id: again.epoch}
    assert other.flush(written, epochs, theirs.run_id, theirs.owner, {}) == set()
    by_other = "{results} where cast(output as varchar) like '%other%'"
    assert (count(other, "{results}"), count(other, by_other)) == (4, 2)


@pytest.mark.parametrize(
    "assignment",
    ["epoch = epoch + 1", "owner = 'other'", "state = 'abandoned'"],
)
def test_shard_with_another_epoch_owner_or_state_is_not_written_for(
    two: tuple[Ledger, Ledger], assignment: str
) -> None:
    late, other = two
    order = order_of("late")
    shard = claim(late, order, 0, 2)
    epochs = {shard.shard_id: shard.epoch}
    change(other, shard, assignment)
    before = other.warehouse.fetch(other.sql("select * from {shards}"))
    done = {shard.shard_id: "{}"}
    assert late.flush(answers(shard, "late"), epochs, order.run_id, "late", done) == epochs.keys()
    assert late.renew(epochs, "late", 60) == epochs.keys()
    late.finish_shards(epochs, "late")
    assert (count(late, "{attempts}"), count(late, "{results}"), count(late, "{claims}")) == (
        0, 0, 2,
    )  # fmt: skip
    assert other.warehouse.fetch(other.sql("select * from {shards}")) == before


def test_queue_is_claimed_in_the_order_of_the_run_urgent_ones_first(
    two: tuple[Ledger, Ledger],
) -> None:
    run, worker = two
    assert run.enqueue(order_of("run"), None) == len(KEYS)
    worker.list_queue(NAME)
    expected = [key for key in KEYS if key in URGENT] + [key for key in KEYS if key not in URGENT]
    order = order_of("worker")
    assert keys_of(claim(worker, order, 0, 4)) + keys_of(claim(worker, order, 4, 4)) == expected
