"""How far a run is, in words."""

from __future__ import annotations

from dataclasses import dataclass

PROGRESS_SECONDS = 5.0
"""How often a run says how far it is."""

FEWEST_FOR_AN_ESTIMATE = 20
"""Before so many are done, the time that an engine takes to start would spoil the estimate."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is with its requests, or with what ``noun`` names.

    Without a ``total`` others work on them too, so how many are this one's is not known.
    """

    done: int
    total: int | None
    seconds: float
    noun: str = "requests"

    def __str__(self) -> str:
        rate = self.done / self.seconds if self.seconds else 0.0
        if self.total is None:
            return f"{self.done:,} {self.noun}, {rate:.1f}/s"
        share = f"{100 * self.done // self.total} %" if self.total else "100 %"
        text = f"{self.done:,} of {self.total:,} {self.noun} ({share}), {rate:.1f}/s"
        if self.done >= self.total or self.done < FEWEST_FOR_AN_ESTIMATE:
            return text
        return f"{text}, {format_seconds((self.total - self.done) / rate)} left"


def format_seconds(seconds: float) -> str:
    """Write a duration for people: ``42 s``, ``3 min 05 s``, ``2 h 10 min``, ``29 d 3 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
