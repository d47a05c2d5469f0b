"""How many requests the next shard holds."""

from __future__ import annotations

import math
from collections.abc import Iterable

from batchsql.backends.batch import BatchFault
from batchsql.warehouse.batch_shards import PastBatch

SHARD_SECONDS = 600.0
"""The work that a shard should hold: between the overhead of many and the unfairness of few."""

MOST_REQUESTS = 20_000
"""A shard's requests are in memory while it is worked on."""

_ENOUGH_TO_MEASURE = 100


def shard_size(
    least: int, slots: int, *, handled: int, seconds: float, free: int, others: int
) -> int:
    """Return how many requests to claim next, from the speed until now.

    With others at work on the same requests it is at most half of what would be this one's even
    share, so that all end at about the same time, but enough to keep the slots full.

    Args:
        least: the size as long as the speed is not known.
        slots: how many requests the engine works on at once.
        handled: how many were answered.
        seconds: the time that took.
        free: how many wanted requests nobody claims.
        others: how many others work on them.
    """
    size = least
    if handled >= _ENOUGH_TO_MEASURE and seconds > 0:
        size = min(MOST_REQUESTS, max(slots, round(handled / seconds * SHARD_SECONDS)))
    if others:
        size = min(size, max(slots, math.ceil(free / (others + 1) / 2)))
    return max(1, size)


def batch_size(past: Iterable[PastBatch], *, most: int, least: int) -> int:
    """Return how many requests the next batch may hold, from how those before it went.

    What is too large stays too large. A queue that is full while others of ours are in it has room
    again when they end, so the size stays; one that refuses the only batch is too small for it, or
    full of somebody else's: then half is tried, and double again after each that was taken.

    Args:
        past: batches of the same model, the oldest first.
        most: the size where none was refused.
        least: the fewest that the provider takes.
    """
    size = most
    for each in past:
        half = max(least, each.requests // 2, 1)
        if each.fault is None:
            size = max(size, min(most, 2 * each.requests))
        elif each.fault == BatchFault.TOO_LARGE.value:
            most = min(most, half)
            size = min(size, most)
        elif each.fault == BatchFault.QUEUE_FULL.value and each.was_alone:
            size = min(size, half)
    return max(least, size)
