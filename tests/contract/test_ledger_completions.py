"""Who is told that an enrichment is complete: one process at a time, and until it has been done."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import duckdb
import pyarrow as pa
import pytest

from batchsql.warehouse.ledger import Ledger, OpenCompletion, SpecRow
from tests.support.lean import Job, connect
from tests.support.project import Target

NAME = "model.shop.labels"
SPEC = str(uuid.UUID(int=1))
KEY = uuid.UUID(int=100).hex
ROUNDS = 10


@pytest.fixture
def two(target: Target) -> Iterator[tuple[Ledger, Ledger]]:
    """The ledger as two processes have it, with an enrichment of which somebody is to be told."""
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
        first.open_completion(NAME, SPEC)
        yield first, second


def take(ledger: Ledger) -> list[OpenCompletion]:
    return ledger.take_completions({NAME})


def pass_time(ledger: Ledger, seconds: int) -> None:
    """Let time pass since completions were taken."""
    with ledger.warehouse.transaction():
        ledger.warehouse.execute(
            ledger.sql(
                "update {completions} set telling_until = telling_until - "
                f"interval '{seconds} seconds'"
            )
        )


def test_completion_that_one_has_taken_is_not_given_to_another(two: tuple[Ledger, Ledger]) -> None:
    first, second = two
    (taken,) = take(first)
    assert (taken.enrichment, taken.requests.total) == (NAME, 0)
    assert take(second) == []
    assert take(first) == []  # nor to itself: its command may run another of the same
    first.close_completion(taken)
    pass_time(first, 2 * 3600)
    assert take(second) == []
    first.open_completion(NAME, SPEC)  # by the next run
    assert len(take(second)) == 1


def test_completion_that_is_given_back_is_for_anybody(two: tuple[Ledger, Ledger]) -> None:
    first, second = two
    (taken,) = take(first)
    first.give_back_completion(taken)
    (again,) = take(second)
    assert take(first) == []
    second.close_completion(again)
    assert take(first) == []


def test_completion_is_another_s_an_hour_after_it_was_taken(two: tuple[Ledger, Ledger]) -> None:
    first, second = two
    take(first)
    pass_time(first, 3600 - 60)
    assert take(second) == []
    pass_time(first, 120)
    assert len(take(second)) == 1
    assert take(first) == []  # its time begins anew


def test_one_of_two_that_ask_at_once_tells(two: tuple[Ledger, Ledger]) -> None:
    meeting = threading.Barrier(2)

    def ask(ledger: Ledger) -> list[OpenCompletion]:
        meeting.wait(30)
        return take(ledger)

    with ThreadPoolExecutor(2) as threads:
        for _ in range(ROUNDS):
            two[0].open_completion(NAME, SPEC)
            asking = [threads.submit(ask, each) for each in two]
            assert sum(len(each.result(30)) for each in asking) == 1


def test_nobody_is_told_while_answers_are_missing(two: tuple[Ledger, Ledger]) -> None:
    first, second = two
    first.write_items(
        SPEC,
        pa.table({"item_key": [KEY], "request_key": [KEY], "unique_key": ["1"]}),
        pa.table({"request_key": [KEY], "messages": ['[["user","hi"]]']}),
    )
    assert take(first) == take(second) == []
