from __future__ import annotations

import pytest

from batchsql.sizing import MOST_REQUESTS, SHARD_SECONDS, batch_size, shard_size
from batchsql.warehouse.batch_shards import PastBatch


@pytest.mark.parametrize(
    ("handled", "seconds", "expected"),
    [
        (0, 0.0, 1000),  # nothing is known yet
        (50, 1.0, 1000),  # too few to tell
        (1000, 100.0, 10 * SHARD_SECONDS),  # ten a second
        (200, 2000.0, 64),  # a slow one still gets what fills its slots
        (10_000, 10.0, MOST_REQUESTS),  # a fast one no more than memory is for
    ],
)
def test_shard_holds_ten_minutes_of_work(handled: int, seconds: float, expected: float) -> None:
    size = shard_size(1000, 64, handled=handled, seconds=seconds, free=10**6, others=0)
    assert size == expected


@pytest.mark.parametrize(
    ("free", "others", "expected"),
    [
        (10**6, 3, 6000),  # far from the end
        (8000, 1, 2000),  # half of an even share
        (8000, 3, 1000),
        (100, 3, 64),  # the last ones, enough for the slots
        (0, 3, 64),
    ],
)
def test_last_shards_are_shared_with_others(free: int, others: int, expected: int) -> None:
    size = shard_size(1000, 64, handled=1000, seconds=100.0, free=free, others=others)
    assert size == expected


FULL, LARGE = "queue_full", "too_large"


@pytest.mark.parametrize(
    ("past", "expected"),
    [
        ([], 1000),
        ([(1000, None, True)], 1000),
        # Nothing of ours was there, so it does not fit by itself.
        ([(1000, FULL, True)], 500),
        ([(1000, FULL, True), (500, FULL, True)], 250),
        # There is room again when the others end.
        ([(1000, FULL, False)], 1000),
        ([(1000, None, True), (1000, FULL, False), (1000, FULL, False)], 1000),
        # What is taken shows that more may be.
        ([(1000, FULL, True), (500, FULL, True), (250, None, True)], 500),
        ([(64, FULL, True), (32, FULL, True), (16, None, True), (32, None, False)], 64),
        ([(8, FULL, True), (4, FULL, True), (2, FULL, True), (1, FULL, True)], 1),
        # A file that is too large is so on every day.
        ([(1000, LARGE, True), (500, None, True)], 500),
        ([(1000, LARGE, False)], 500),
        # Another fault says nothing of the size.
        ([(1000, "transient", True), (1000, "", True)], 1000),
    ],
)
def test_batch_is_as_large_as_those_before_it_allow(
    past: list[tuple[int, str | None, bool]], expected: int
) -> None:
    assert batch_size([PastBatch(*each) for each in past], most=1000, least=1) == expected


def test_batch_is_never_smaller_than_its_provider_takes() -> None:
    assert batch_size([PastBatch(120, FULL, True)], most=1000, least=100) == 100
