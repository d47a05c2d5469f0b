"""How many requests the next shard of an engine holds."""

from __future__ import annotations

import math

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
