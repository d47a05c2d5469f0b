"""The dialect suite on DuckDB, and what is DuckDB's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import duckdb
import pytest

from batchsql.warehouse.base import UnsupportedColumnTypeError, Warehouse, literal
from batchsql.warehouse.duckdb import DuckDBDialect, DuckDBWarehouse
from tests.contract.base_dialect import BaseDialectTests
from tests.support.sessions import Open, duckdb_sessions


@pytest.fixture
def open_session() -> Iterator[Open]:
    with duckdb_sessions() as open_:
        yield open_


@pytest.fixture
def ledger_warehouse() -> Iterator[Callable[[], tuple[Warehouse, str]]]:
    connection = duckdb.connect()
    yield lambda: (DuckDBWarehouse(connection.cursor(), "memory", lambda: None), "ledger")
    connection.close()


class TestDuckDBDialect(BaseDialectTests):
    dialect = DuckDBDialect()
    heading = "DuckDB"
    sessions = (
        {"TimeZone": "UTC"},
        {"TimeZone": "Asia/Kolkata", "Calendar": "buddhist", "default_collation": "nocase"},
        {"TimeZone": "America/New_York", "Calendar": "japanese", "arrow_large_buffer_size": "true",
         "produce_arrow_string_view": "true", "arrow_lossless_conversion": "true"},
    )  # fmt: skip
    key_cases = (
        "'0044-03-15 (BC) 12:00:00.5+00'::timestamptz",
        "'12345-01-02 03:04:05+00'::timestamptz",
        "'-infinity'::timestamptz",
        "'2024-01-02 03:04:05.123456789+00'::timestamptz_ns",
        "'5000000-01-01'::date",
        "'-infinity'::date",
        "'12345-01-01'::timestamp_s",
        "'infinity'::timestamp_ms",
        "'infinity'::timestamp_ns",
        "['nan'::double, -0.0::double]",
        "{'at': timestamp '2024-01-02 03:04:05', 'day': date '2024-01-02'}",
        "'a' || chr(0) || 'b'",
    )
    equal = (
        ("-0.0::double", "0.0::double"),
        ("-0.0::float", "0.0::float"),
        ("'nan'::double", "'-nan'::double"),
        ("0.1::float", "0.1::float"),
        ("1.5::decimal(10,1)", "1.50::decimal(10,2)"),
        ("100::decimal(10,0)", "100.00::decimal(10,2)"),
        ("0.00::decimal(10,2)", "0::decimal(3,0)"),
        ("'2024-01-02 03:04:05+00'::timestamptz", "'2024-01-02 08:34:05+05:30'::timestamptz"),
        ("timestamp '2024-01-02 03:04:05'", "timestamp_s '2024-01-02 03:04:05'"),
        ("5::tinyint", "5::ubigint"),
    )
    different = (
        ("'a'", "'A'"),
        ("''", "' '"),
        ("'a'", "'a' || chr(0)"),
        ("chr(0)", "''"),
        ("'e\u0301'", "'\u00e9'"),
        ("0.1::double", "0.1::float::double"),
        ("1e300::double", "'infinity'::double"),
        ("'nan'::double", "0::double"),
        ("'infinity'::date", "'-infinity'::date"),
        ("'0044-03-15 (BC)'::date", "'0044-03-15'::date"),
        ("timestamp '2024-01-02 03:04:05.000001'", "timestamp '2024-01-02 03:04:05.000002'"),
        (
            "'2024-01-02 03:04:05.000000001'::timestamp_ns",
            "'2024-01-02 03:04:05.000000002'::timestamp_ns",
        ),
        (
            "170141183460469231731687303715884105727::hugeint",
            "170141183460469231731687303715884105726::hugeint",
        ),
        ("['a, b']", "['a', 'b']"),
        ("['a']", "[null]"),
        ("[null]", "['null']"),
        ("[1234567890123456789.45::decimal(38,2)]", "[1234567890123456789.46::decimal(38,2)]"),
        ("[170141183460469231731687303715884105727]", "[170141183460469231731687303715884105726]"),
        ("['\\xAA'::blob]", "['\\x5CxAA'::blob]"),
        ("{'a': null::integer}", "null::struct(a integer)"),
        ("map {'a': 1}", "map {'a': 2}"),
        (
            "union_value(a := 1)::union(a integer, b integer)",
            "union_value(b := 1)::union(a integer, b integer)",
        ),
        ("'{\"a\": 1}'::json", "'{\"a\": 2}'::json"),
        ("'null'::json", "null::json"),
        ("''::blob", "null::blob"),
        ("100::decimal(10,0)", "1::decimal(10,0)"),
    )  # fmt: skip
    refused = (
        "['2024-01-02 00:00:00+00'::timestamptz]",
        "{'a': {'b': '2024-01-02 00:00:00+00'::timestamptz}}",
        "map {'a': '2024-01-02 00:00:00+00'::timestamptz}",
        "['2024-01-02 00:00:00+00'::timestamptz_ns]",
        "1::variant",
    )
    overrides = (
        ("12.5", "decimal(10,2)", "12.50::decimal(10,2)"),
        ("7", "smallint", "7::smallint"),
        (["a", 'b"c', "d,e", "é\u2028"], "varchar[]", "['a', 'b\"c', 'd,e', 'é\u2028']"),
        ([1, 2], "integer[]", "[1, 2]"),
        ([], "varchar[]", "[]::varchar[]"),
        ({"a": 1, "b": "x,y"}, "struct(a integer, b varchar)", "{'a': 1, 'b': 'x,y'}"),
        ({"a": 1}, "varchar", "'{\"a\":1}'"),
    )
    more_texts = ("\x00", "a\x00b", "\x00\x00")

    def sql_text(self, text: str) -> str:
        return " || chr(0) || ".join(literal(part) for part in text.split("\x00"))

    def test_names_inside_a_type_are_no_types(self, open_session: Open) -> None:
        session = open_session({})
        for expression, printed in (
            ("'a'::enum('a', 'timestamp with time zone', 'it''s]')", "a"),
            (
                """{'timestamptz': 1, 'a"b timestamptz': 2}""",
                '{"timestamptz":1,"a\\"b timestamptz":2}',
            ),
        ):
            assert session.printed(expression) == printed

    def test_refusal_names_the_type_and_the_way_out(self, open_session: Open) -> None:
        with pytest.raises(UnsupportedColumnTypeError) as caught:
            open_session({}).inputs("select ['2024-01-02 00:00:00+00'::timestamptz] as x")
        assert "TIMESTAMP WITH TIME ZONE[]" in str(caught.value)
        assert "cast them to TIMESTAMP" in str(caught.value)

    def test_duplicate_columns_are_described_as_they_are_stored(self, open_session: Open) -> None:
        session = open_session({})
        select = "select 1 as a, 2 as a"
        described = [column.name for column in session.source.describe(select)]
        assert described == ["a", "a_1"]
        assert session.values(select) == [(1, 2)]
