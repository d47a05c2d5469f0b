"""How an engine does while it works: looked at now and then, and summed up for each shard."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

LOOK_SECONDS = 10.0
"""How often an engine's figures are read while it works."""

SOON_SECONDS = 1.0
"""How often at most, where a shard begins or ends."""

_MOST_LOOKS = 400
_RATES = ("prompt_tokens", "generated_tokens")
_GAUGES = ("running", "waiting", "kv_cache_use")
_TOTALS = ("prompt_tokens", "generated_tokens", "preemptions", "deaths", "busy_seconds")


@dataclass(frozen=True, slots=True)
class _Look:
    at: float
    figures: Mapping[str, float]


@dataclass
class FigureLog:
    """Keeps what an engine's figures were over time.

    ``read`` returns totals since the engine was loaded and gauges of now, by the names that
    ``VllmBackend.figures`` has; nothing where there are none. Times are of one monotonic clock.
    """

    read: Callable[[], Mapping[str, float]]
    _looks: list[_Look] = field(default_factory=list)

    def look(self, now: float, soonest: float = LOOK_SECONDS) -> None:
        """Read the figures unless the last look is fewer than ``soonest`` seconds ago."""
        if self._looks and now - self._looks[-1].at < soonest:
            return
        if found := self.read():
            self._looks.append(_Look(now, dict(found)))
        if len(self._looks) > _MOST_LOOKS:  # over a long stream every other look will do
            self._looks = self._looks[::2]

    def sum_up(self, since: float, now: float) -> str | None:
        """Return the figures between two times as JSON text, None where the engine has none.

        Totals are of that time, gauges are their means, and ``over_time`` holds one value for each
        look. The engine may have worked on other shards at the same time; they are counted in.
        """
        has_looked = bool(self._looks) and self._looks[-1].at >= since
        self.look(now, SOON_SECONDS if has_looked else 0.0)
        first = next((n for n, each in enumerate(self._looks) if each.at >= since), None)
        if first is None:
            return None
        looks = self._looks[max(0, first - 1) :]
        return orjson.dumps(_sum_up(looks, now - since), option=orjson.OPT_SORT_KEYS).decode()


def _sum_up(looks: list[_Look], seconds: float) -> dict[str, Any]:
    begin, end = looks[0].figures, looks[-1].figures
    if len(looks) == 1:  # loaded since: its totals are of this time
        begin = {}
    found: dict[str, Any] = {"seconds": round(seconds, 3)}
    for name in _TOTALS:
        if name in end:
            found[name] = _growth(begin, end, name)
    for name in _RATES:
        if name in end:
            busy = found.get("busy_seconds") or seconds
            found[f"{name}_per_second"] = round(found[name] / busy, 3) if busy else 0.0
    for name in _GAUGES:
        if name in end:
            found[name] = round(sum(each.figures.get(name, 0.0) for each in looks) / len(looks), 4)
    queried = _growth(begin, end, "prefix_queried_tokens")
    if queried:
        found["prefix_hit_rate"] = round(_growth(begin, end, "prefix_hit_tokens") / queried, 4)
    if "load_seconds" in end:
        found["load_seconds"] = round(end["load_seconds"], 3)
    found["over_time"] = _over_time(looks)
    return found


def _growth(begin: Mapping[str, float], end: Mapping[str, float], name: str) -> float:
    """Return by how much a total grew; an engine that was started anew counts from 0 again."""
    before, after = begin.get(name, 0.0), end.get(name, 0.0)
    return round(after - before if after >= before else after, 3)


def _over_time(looks: list[_Look]) -> dict[str, list[float]]:
    start = looks[0].at
    found: dict[str, list[float]] = {"seconds": [round(each.at - start, 1) for each in looks]}
    for name in _GAUGES:
        found[name] = [round(each.figures.get(name, 0.0), 4) for each in looks]
    for name in _RATES:
        found[f"{name}_per_second"] = [0.0] + [
            round(_growth(one.figures, two.figures, name) / (two.at - one.at), 1)
            for one, two in itertools.pairwise(looks)
        ]
    return found
