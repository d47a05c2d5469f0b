"""Durations and deadlines as users write them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import datetime, time, timedelta, timezone

_NUMBER = r"(\d+(?:\.\d+)?)"
_DURATION = re.compile(rf"(?:{_NUMBER}d)?(?:{_NUMBER}h)?(?:{_NUMBER}m)?(?:{_NUMBER}s)?", re.ASCII)
_UNIT_SECONDS = (86_400, 3_600, 60, 1)
_TIME_OF_DAY = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)(Z?)", re.ASCII)


def parse_seconds(value: object) -> float | None:
    """Return a duration in seconds, or None where it is not understood.

    Accepted are a number of seconds and texts of days, hours, minutes and seconds, in this order;
    never one below 0.

    >>> parse_seconds("1h30m"), parse_seconds(90), parse_seconds("90")
    (5400.0, 90.0, None)
    """
    if isinstance(value, str):
        match = _DURATION.fullmatch("".join(value.split()))
        if match is None or match.lastindex is None:
            return None
        seconds = sum(
            float(number) * unit
            for number, unit in zip(match.groups(default="0"), _UNIT_SECONDS, strict=True)
        )
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except OverflowError:
            return None
    else:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


@dataclass(frozen=True, slots=True)
class Deadline:
    """When the answers of a run are due: some time after its start, or at a time of day.

    Exactly one of ``after_seconds`` and ``time_of_day`` is set. The time of day is in UTC where its
    ``tzinfo`` says so, else in the time zone of the machine.
    """

    after_seconds: float | None = None
    time_of_day: time | None = None

    def seconds_from(self, now: datetime) -> float:
        """Return how long after ``now``, the run's start, the deadline is: always above 0.

        A time of day means the next such moment, a day later where it is that time already. A day
        on which the clocks change is as long as it is.

        Args:
            now: a time with a time zone.
        """
        if self.time_of_day is None:
            return self.after_seconds or 0.0
        zone = self.time_of_day.tzinfo
        today = now.astimezone(zone).date()
        # A time without a zone is taken for the machine's by astimezone(), each day with its own
        # offset, where the zone that astimezone() sets on ``now`` has one offset for ever.
        moments = (
            datetime.combine(today + timedelta(days=days), self.time_of_day).astimezone(
                timezone.utc
            )
            for days in (0, 1)
        )
        return next((moment - now).total_seconds() for moment in moments if moment > now)


def parse_deadline(text: str) -> Deadline | None:
    """Return the deadline that a text means, or None where it is not understood.

    >>> parse_deadline("6h"), parse_deadline("06:30")
    (Deadline(after_seconds=21600.0, time_of_day=None), \
Deadline(after_seconds=None, time_of_day=datetime.time(6, 30)))
    """
    match = _TIME_OF_DAY.fullmatch(text.strip())
    if match is not None:
        zone = timezone.utc if match[3] else None
        return Deadline(time_of_day=time(int(match[1]), int(match[2]), tzinfo=zone))
    seconds = parse_seconds(text)
    return Deadline(after_seconds=seconds) if seconds else None
