import math
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone

import pytest

from batchsql.declare.durations import parse_deadline, parse_seconds

UTC = timezone.utc
MINUTE, HOUR, DAY = 60, 3_600, 86_400


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, 0),
        (90, 90),
        (2.5, 2.5),
        ("90s", 90),
        ("30m", 30 * MINUTE),
        ("6h", 6 * HOUR),
        ("2d", 2 * DAY),
        ("1h30m", 90 * MINUTE),
        ("1d2h3m4s", DAY + 2 * HOUR + 3 * MINUTE + 4),
        (" 1h 30m ", 90 * MINUTE),
        ("1.5h", 90 * MINUTE),
        ("0s", 0),
    ],
)
def test_seconds_of_a_duration(value: object, seconds: float) -> None:
    assert parse_seconds(value) == seconds


@pytest.mark.parametrize(
    "value",
    [
        "", " ", "90", "h", "6 hours", "30m1h", "1h1h", "-1h", "1e3s", "٣h", "6H", "forever",
        "9" * 400 + "d", -1, math.nan, math.inf, 10**400, True, None, ["6h"],
    ],
)  # fmt: skip
def test_seconds_of_anything_else_are_none(value: object) -> None:
    assert parse_seconds(value) is None


@pytest.fixture
def central_europe(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the machine where clocks change on the last Sundays of March and October."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize(
    ("text", "now", "seconds"),
    [
        ("6h", datetime(2026, 1, 10, 23, 30, tzinfo=UTC), 6 * HOUR),
        ("1h30m", datetime(2026, 3, 28, 23, 30, tzinfo=UTC), 90 * MINUTE),
        # 00:30 on the machine's clock: the same morning.
        ("06:30", datetime(2026, 1, 10, 23, 30, tzinfo=UTC), 6 * HOUR),
        ("6:30", datetime(2026, 1, 10, 23, 30, tzinfo=UTC), 6 * HOUR),
        ("06:30Z", datetime(2026, 1, 10, 23, 30, tzinfo=UTC), 7 * HOUR),
        # The zone that the start is written in is another matter.
        ("06:30", datetime(2026, 1, 11, 8, 30, tzinfo=timezone(timedelta(hours=9))), 6 * HOUR),
        ("06:30Z", datetime(2026, 1, 11, 8, 30, tzinfo=timezone(timedelta(hours=9))), 7 * HOUR),
        # Tomorrow there already, but still today on the machine.
        ("23:00", datetime(2026, 1, 11, 6, 0, tzinfo=timezone(timedelta(hours=9))), HOUR),
        # At that very moment, and just before it.
        ("06:30Z", datetime(2026, 1, 11, 6, 30, tzinfo=UTC), DAY),
        ("06:30Z", datetime(2026, 1, 11, 6, 29, 59, tzinfo=UTC), 1),
        ("06:30", datetime(2026, 1, 11, 5, 30, tzinfo=UTC), DAY),
        # From 23:00, over the night that is an hour shorter, and the one that is longer.
        ("06:30", datetime(2026, 3, 28, 22, 0, tzinfo=UTC), 6.5 * HOUR),
        ("06:30", datetime(2026, 10, 24, 21, 0, tzinfo=UTC), 8.5 * HOUR),
        # From 07:00 on the day before: the next morning has the other offset.
        ("06:30", datetime(2026, 3, 28, 6, 0, tzinfo=UTC), 22.5 * HOUR),
    ],
)
@pytest.mark.usefixtures("central_europe")
def test_deadline_counts_from_the_start(text: str, now: datetime, seconds: float) -> None:
    deadline = parse_deadline(text)
    assert deadline is not None
    assert deadline.seconds_from(now) == seconds


@pytest.mark.parametrize(
    "text", ["", "soon", "0s", "24:00", "12:60", "6:3", "06:30:00", "06:30 UTC", "-1h", "٠٦:٣٠"]
)
def test_deadline_of_anything_else_is_none(text: str) -> None:
    assert parse_deadline(text) is None
