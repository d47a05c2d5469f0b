"""The dialect suite on PostgreSQL, and what is PostgreSQL's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from batchsql.warehouse.base import Warehouse
from batchsql.warehouse.postgres import (
    PostgresDialect,
    PostgresWarehouse,
    connect_adbc,
)
from tests.contract.base_dialect import BaseDialectTests
from tests.support.sessions import POSTGRES_SCHEMA, Open, postgres_sessions
from tests.support.type_tables import type_rows


@pytest.fixture
def open_session(postgres_uri: str) -> Iterator[Open]:
    with postgres_sessions(postgres_uri) as open_:
        yield open_


@pytest.fixture
def ledger_warehouse(
    open_session: Open, postgres_uri: str
) -> Iterator[Callable[[], tuple[Warehouse, str]]]:
    opened = []

    def open_() -> tuple[Warehouse, str]:
        warehouse = PostgresWarehouse(lambda: connect_adbc(postgres_uri, None), "postgres")
        opened.append(warehouse)
        return warehouse, POSTGRES_SCHEMA

    yield open_
    for warehouse in opened:
        warehouse.close()


class TestPostgresDialect(BaseDialectTests):
    dialect = PostgresDialect()
    heading = "PostgreSQL"
    sessions = (
        {"TimeZone": "UTC"},
        {"TimeZone": "Asia/Kolkata", "DateStyle": "SQL, DMY", "IntervalStyle": "iso_8601",
         "bytea_output": "escape", "extra_float_digits": "-15"},
        {"TimeZone": "America/New_York", "DateStyle": "German", "IntervalStyle": "sql_standard",
         "extra_float_digits": "3", "lc_numeric": "C", "lc_monetary": "C"},
        {"DateStyle": "Postgres, MDY", "IntervalStyle": "postgres_verbose",
         "extra_float_digits": "0", "xmloption": "document"},
    )  # fmt: skip
    key_cases = (
        "'0044-03-15 12:00:00.5+00 BC'::timestamptz",
        "'12345-01-02 03:04:05+00'::timestamptz",
        "'294276-12-31 23:59:59.999999+00'::timestamptz",
        "'-infinity'::timestamptz",
        "'5874897-12-31'::date",
        "array['2024-01-02 00:00:00+00', '0044-03-15 00:00:00+00 BC']::timestamptz[]",
        "array[0.1, 1e300, 'NaN', '-0']::float8[]",
        "array[0.1]::float4[]",
        "array['\\xde'::bytea]",
        "array['1 day 2 hours'::interval]",
        "array['2024-01-02'::date]",
        "array['[2024-01-01,2024-02-01)'::daterange]",
        "array[row('a', '2024-01-02 00:00:00+00', 0.1)::visit]",
        "array['it''s'::mood]",
        "'{[2024-01-01,2024-02-01)}'::datemultirange",
        "'[0.1,0.2)'::float_range",
        "'(0.1,0.3)'::point",
        "'((0.1,0.2),(0.3,0.4))'::polygon",
        "array['(0.1,0.3)'::point]",
        "array['{\"a\": 0.1}'::jsonb]",
    )
    equal = (
        ("'-0'::float8", "'0'::float8"),
        ("'-0'::float4", "'0'::float4"),
        ("'NaN'::float8", "'Infinity'::float8 - 'Infinity'::float8"),
        ("1.50::numeric", "1.5::numeric"),
        ("100.00::numeric", "100::numeric"),
        ("1.50::price", "1.5::numeric"),
        ("'ab'::char(5)", "'ab   '::char(5)"),
        ("'ab'::char(5)", "'ab'::varchar(5)"),
        ("'2024-01-02 03:04:05+00'::timestamptz", "'2024-01-02 08:34:05+05:30'::timestamptz"),
        ('\'{"a": 1, "b": 2}\'::jsonb', '\'{"b":2,"a":1}\'::jsonb'),
        ("'[1,3]'::int4range", "'[1,4)'::int4range"),
        ("5::smallint", "5::bigint"),
        ("'a'::label", "'a'::text"),
    )
    different = (
        ("'a'", "'A'"),
        ("''", "' '"),
        ("'e\u0301'", "'\u00e9'"),
        ("0.1::float8", "0.1::float4::float8"),
        ("'NaN'::numeric", "'Infinity'::numeric"),
        ("'Infinity'::numeric", "'-Infinity'::numeric"),
        ("'NaN'::float8", "'Infinity'::float8"),
        ("'infinity'::date", "'-infinity'::date"),
        ("'0044-03-15 BC'::date", "'0044-03-15'::date"),
        ("'2024-01-02 03:04:05.000001'::timestamp", "'2024-01-02 03:04:05.000002'::timestamp"),
        ("'294276-12-31 23:59:59.999999'::timestamp", "'294276-12-31 23:59:59.999998'::timestamp"),
        ("array['a, b']", "array['a', 'b']"),
        ("array['NULL']", "array[null]::text[]"),
        ("array['{a}']", "array[array['a']]"),
        ("array[[1,2],[3,4]]", "array[1,2,3,4]"),
        ("array[1.01]::float8[]", "array[1.02]::float8[]"),
        ("row('a', null, 1)::visit", "row('a', null, 2)::visit"),
        ("'\\x'::bytea", "null::bytea"),
        ("'empty'::int4range", "'[1,2)'::int4range"),
        ("'null'::jsonb", "null::jsonb"),
        ("'12.34'::money", "'12.35'::money"),
        ("'10.0.0.1/8'::inet", "'10.0.0.1'::inet"),
    )
    refused = ()
    overrides = (
        ("12.5", "numeric(10,2)", "12.50::numeric(10,2)"),
        ("7", "smallint", "7::smallint"),
        ("ok", "mood", "'ok'::mood"),
        (["a", 'b"c', "d,e", "é\u2028", None], "text[]",
         "array['a', 'b\"c', 'd,e', 'é\u2028', null]"),
        ([3, 1, 2], "integer[]", "array[3, 1, 2]"),
        ([], "text[]", "array[]::text[]"),
        ([{"a": 1}, "x"], "jsonb[]", "array['{\"a\": 1}', '\"x\"']::jsonb[]"),
        ({"a": 1}, "text", "'{\"a\": 1}'"),
        ({"a": 1}, "json", "'{\"a\": 1}'"),
    )  # fmt: skip

    def test_item_key_is_the_same_under_every_number_of_float_digits(
        self, open_session: Open
    ) -> None:
        expressions = [row.sql for row in type_rows(self.heading)] + list(self.key_cases)
        session = open_session({})
        plain = session.keys_of(expressions)
        for digits in range(-15, 4):
            session.source.fetch(f"select set_config('extra_float_digits', '{digits}', false)")
            assert session.keys_of(expressions) == plain

    def test_array_of_text_has_one_key_in_every_client_encoding(self, open_session: Open) -> None:
        for cast in ("text[]", "varchar[]", "char(4)[]", "jsonb[]"):
            expression = f"array['\"' || chr(233) || '\"']::{cast}"
            session = open_session({})
            plain = session.keys_of([expression])
            session.source.fetch("select set_config('client_encoding', 'LATIN1', false)")
            assert session.keys_of([expression]) == plain

    def test_array_of_times_prints_in_utc(self, open_session: Open) -> None:
        for settings in self.sessions:
            printed = open_session(settings).printed(
                "array['2024-01-02 00:00:00+05:30'::timestamptz]"
            )
            assert printed == '["2024-01-01T18:30:00+00:00"]'

    def test_bc_time_with_a_fraction_prints_as_the_warehouse_writes_it(
        self, open_session: Open
    ) -> None:
        session = open_session({})
        assert (
            session.printed("'0044-03-15 12:00:00.5 BC'::timestamp") == "0044-03-15T12:00:00.5 BC"
        )

    def test_half_a_character_in_json_is_replaced(self, open_session: Open) -> None:
        assert open_session({}).printed("'[\"\\ud83d\"]'::json") == '["\ufffd"]'

    def test_nul_in_json_reaches_the_template(self, open_session: Open) -> None:
        assert open_session({}).printed("'\"a\\u0000b\"'::json") == "a\x00b"

    @pytest.mark.parametrize(
        ("expression", "type_name", "type_class"),
        [
            ("'a'::short_label", "text", ""),
            ("1.5::price", "numeric", ""),
            ("'ok'::mood", "mood", ""),
            ("row('a', null, 1)::visit", "visit", "composite"),
            ("'[1,2)'::int4range", "int4range", "range"),
            ("'{[1,2)}'::int4multirange", "int4multirange", "multirange"),
            ("array['a'::varchar(3)]", "character varying[]", ""),
            ("'a'::char(3)", "character", ""),
            ("now()", "timestamp with time zone", ""),
            ("null", "text", ""),
        ],
    )
    def test_columns_are_described_by_the_type_under_a_domain(
        self,
        open_session: Open,
        expression: str,
        type_name: str,
        type_class: str,
    ) -> None:
        (column,) = open_session({}).source.describe(f"select {expression} as x")
        assert (column.name, column.type_name, column.type_class) == ("x", type_name, type_class)
