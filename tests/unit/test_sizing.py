from __future__ import annotations

import pytest

from batchsql.sizing import MOST_REQUESTS, SHARD_SECONDS, shard_size


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
