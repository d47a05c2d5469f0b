from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import duckdb
import pyarrow as pa
import pytest
import sqlglot

from batchsql.warehouse.base import (
    MAX_IDENTIFIER_BYTES,
    ValueForm,
    bare_select,
    column_values,
    fit_identifier,
    literal,
    quote,
)

AT = dt.datetime(2024, 1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("form", "given", "expected"),
    [
        (ValueForm.TEXT, "1", "1"),
        (ValueForm.NATIVE, 1, 1),
        (ValueForm.NATIVE, b"\x00\xff", b"\x00\xff"),
        (ValueForm.INTEGER, str(2**127), 2**127),
        (ValueForm.DECIMAL, "1.5", Decimal("1.5")),
        (ValueForm.DECIMAL, "-Infinity", Decimal("-Infinity")),
        (ValueForm.DATE, "2024-02-29", dt.date(2024, 2, 29)),
        (ValueForm.DATE, "0001-01-01", dt.date(1, 1, 1)),
        (ValueForm.DATE, "12345-01-02", "12345-01-02"),
        (ValueForm.DATE, "294276-12-31", "294276-12-31"),
        (ValueForm.DATE, "infinity", "infinity"),
        (ValueForm.DATE, "0044-03-15 BC", "0044-03-15 BC"),
        (ValueForm.TIMESTAMP, "2024-01-02 03:04:05", dt.datetime(2024, 1, 2, 3, 4, 5)),
        (ValueForm.TIMESTAMP, "2024-01-02T03:04:05.5", dt.datetime(2024, 1, 2, 3, 4, 5, 500_000)),
        (ValueForm.TIMESTAMP, "2024-01-02 03:04:05.000001", dt.datetime(2024, 1, 2, 3, 4, 5, 1)),
        (ValueForm.TIMESTAMP, "2024-01-02 03:04:05.1234567", AT.replace(microsecond=123456)),
        (ValueForm.TIMESTAMP, "0044-03-15T12:00:00.5 BC", "0044-03-15T12:00:00.5 BC"),
        (ValueForm.TIMESTAMP, "0044-03-15 (BC) 12:00:00.5", "0044-03-15 (BC) 12:00:00.5"),
        (ValueForm.TIMESTAMP, "12345-01-02 03:04:05", "12345-01-02 03:04:05"),
        (ValueForm.TIMESTAMP, "290011-11-02 03:04:05", "290011-11-02 03:04:05"),
        (ValueForm.TIMESTAMP, "-infinity", "-infinity"),
        (ValueForm.TIMESTAMP_UTC, "2024-01-02 03:04:05", AT.replace(tzinfo=dt.timezone.utc)),
        (ValueForm.TIMESTAMP_UTC, "infinity", "infinity"),
        (ValueForm.JSON, '{"b": 1, "a": [null, 1.5]}', {"b": 1, "a": [None, 1.5]}),
        (ValueForm.JSON, "null", None),
        (ValueForm.JSON, r'"\ud83d\ude00 \u0000"', "😀 \x00"),
        (ValueForm.JSON, r'{"\uD83D": ["a\uDE00b", 1]}', {"\ufffd": ["a\ufffdb", 1]}),
    ],
)  # fmt: skip
def test_column_values_are_what_a_template_works_with(
    form: ValueForm, given: Any, expected: Any
) -> None:
    values = column_values(pa.array([given, None]), form)
    assert values == [expected, None]
    assert type(values[0]) is type(expected)


def test_every_form_keeps_null() -> None:
    for form in ValueForm:
        assert column_values(pa.array([None], pa.string()), form) == [None]


@pytest.mark.parametrize(
    "name", ["a", 'a"b', "a b", "größe", "a\\b", "select", "A", "a.b", "it's", "%s", "?", "{x}"]
)  # fmt: skip
def test_quoted_names_are_read_back(name: str) -> None:
    for dialect in ("duckdb", "postgres"):
        (column,) = sqlglot.parse_one(f"select {quote(name, dialect)}", dialect=dialect).expressions
        assert column.name == name
    assert duckdb.sql(f"select 1 as {quote(name, 'duckdb')}").columns == [name]


@pytest.mark.parametrize("text", ["", "it's", "''", "\\", "\\'", '"', "$$", "a\nb", "%s", "{x}"])
def test_literals_are_read_back(text: str) -> None:
    assert duckdb.sql(f"select {literal(text)}").fetchall() == [(text,)]


def test_short_names_are_kept() -> None:
    for name in ("a", "x" * MAX_IDENTIFIER_BYTES, "ü" * 31):
        assert fit_identifier(name) == name


def test_long_names_are_cut_and_stay_apart() -> None:
    names = ["x" * 64, "x" * 65, "x" * 63 + "y", "ü" * 32, "ü" * 31 + "öö", "a" + "😀" * 20]
    fitted = [fit_identifier(name) for name in names]
    assert len(set(fitted)) == len(names)
    for name, short in zip(names, fitted, strict=True):
        assert len(short.encode()) <= MAX_IDENTIFIER_BYTES
        assert short == fit_identifier(name)
        assert name.startswith(short.rpartition("_")[0])


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("select 1", "select 1"),
        ("select 1;", "select 1"),
        ("select 1 ;;\n", "select 1 "),
        ("select 1 -- one", "select 1 -- one"),
        ("select 1; -- one;", "select 1"),
        ("select 1; /* one */ ;\n-- two", "select 1"),
        ("select ';' as a", "select ';' as a"),
        ("select 'never closed;", "select 'never closed"),
    ],
)
def test_bare_select_has_no_semicolon_at_its_end(sql: str, expected: str) -> None:
    assert {bare_select(sql, dialect) for dialect in ("duckdb", "postgres")} == {expected}
