from __future__ import annotations

import pytest

from batchsql.progress import Progress, format_seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (61, "1 min 01 s"), (3600, "1 h 00 min"), (7_830, "2 h 10 min")],
)
def test_duration_is_written_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (Progress(1_200, 3_080, 100.0), "1,200 of 3,080 requests (38 %), 12.0/s, 2 min 37 s left"),
        (Progress(3, 3_080, 10.0), "3 of 3,080 requests (0 %), 0.3/s"),
        (Progress(0, 3_080, 0.0), "0 of 3,080 requests (0 %), 0.0/s"),
        (Progress(3_080, 3_080, 10.0), "3,080 of 3,080 requests (100 %), 308.0/s"),
        (Progress(50, 100, 5.0, "rows"), "50 of 100 rows (50 %), 10.0/s, 5 s left"),
        (Progress(50, None, 5.0), "50 requests, 10.0/s"),
    ],
)
def test_progress_says_how_much_is_left_once_it_can_tell(progress: Progress, text: str) -> None:
    assert str(progress) == text
