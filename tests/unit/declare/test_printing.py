import json
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from batchsql.declare.printing import print_value
from batchsql.declare.prompt import RenderError
from tests.support.prompts import render, text_of

PLUS_TWO = timezone(timedelta(hours=2))

PRINT_CASES: list[tuple[Any, str]] = [
    ("text", "text"),
    (True, "true"),
    (False, "false"),
    (None, ""),
    (7, "7"),
    (2**80, str(2**80)),
    (0.1, "0.1"),
    (1e20, "1e+20"),
    (Decimal("12.50"), "12.50"),
    (Decimal("1E+3"), "1000"),
    (Decimal("1E-9"), "0.000000001"),
    (date(2024, 1, 31), "2024-01-31"),
    (datetime(2024, 1, 31, 12), "2024-01-31T12:00:00"),
    (datetime(2024, 1, 31, 12, 0, 0, 5), "2024-01-31T12:00:00.000005"),
    (datetime(2024, 1, 31, 14, tzinfo=PLUS_TWO), "2024-01-31T12:00:00Z"),
    (datetime(2024, 1, 31, 14, 0, 0, 5, tzinfo=PLUS_TWO), "2024-01-31T12:00:00.000005Z"),
    (time(12, 30), "12:30:00"),
    (timedelta(days=1, seconds=2), "1 day, 0:00:02"),
    (b"\x00\xab", "00ab"),
    (UUID("12345678-1234-5678-1234-567812345678"), "12345678-1234-5678-1234-567812345678"),
    ({"b": 1, "a": [True, None, "é<&'"]}, '{"b":1,"a":[true,null,"é<&\'"]}'),
    (["x", date(2024, 1, 31)], '["x","2024-01-31"]'),
    ([datetime(2024, 1, 31, 14, tzinfo=PLUS_TWO)], '["2024-01-31T12:00:00Z"]'),
    ([Decimal("12.50"), Decimal("NaN"), b"\xab"], '[12.50,null,"ab"]'),
    ({2: "x", True: [2**64]}, '{"2":"x","true":[18446744073709551616]}'),
    ({date(2024, 1, 31): 2**70}, '{"2024-01-31":1180591620717411303424}'),
    ((), "[]"),
]


@pytest.mark.parametrize(("value", "expected"), PRINT_CASES)
def test_value_prints_as_promised(value: Any, expected: str) -> None:
    assert print_value(value) == expected
    assert text_of("[{{ v }}]", v=value) == f"[{expected}]"


def test_tojson_is_compact_and_keeps_html() -> None:
    value = {"b": "<é>'&", "a": [1, None, Decimal("1.10")]}
    assert text_of("{{ v | tojson }}", v=value) == '{"b":"<é>\'&","a":[1,null,1.10]}'
    assert text_of("{{ v | tojson }}", v='a"b') == '"a\\"b"'
    assert json.loads(text_of("{{ v | tojson(indent=2) }}", v={"a": 1})) == {"a": 1}


def test_text_operations_see_times_in_utc() -> None:
    row = {"at": datetime(2024, 1, 31, 1, tzinfo=PLUS_TWO)}
    assert (
        text_of("{{ at.strftime('%d %H') }} {{ at ~ '' }}", **row)
        == "30 23 2024-01-30 23:00:00+00:00"
    )


def test_range_prints_as_a_list() -> None:
    assert text_of("{{ range(n) }}", n=3) == "[0,1,2]"


@pytest.mark.parametrize(
    "source", ["{{ x | map('upper') }}", "{{ x.upper }}", "{{ dict }}{{ x }}{{ cycler(x) }}"]
)
def test_value_without_a_text_of_its_own_is_refused(source: str) -> None:
    with pytest.raises(RenderError, match="cannot be printed"):
        render(source, x="abc", dict="d")
