"""The same values ask the same question on every warehouse, so that answers can be shared."""

from __future__ import annotations

from batchsql.declare.normalize import Normalize
from tests.support.sessions import duckdb_sessions, postgres_sessions, request_keys

# In DuckDB and in PostgreSQL.
VALUES = (
    ("'it''s é 😀'", "'it''s é 😀'"),
    ("null::varchar", "null::text"),
    ("7::bigint", "7::bigint"),
    ("sum(7)", "sum(7)"),
    ("19.90::decimal(10,2)", "19.90::numeric(10,2)"),
    ("1200::decimal(10,0)", "1200::numeric"),
    ("0.1::double", "0.1::float8"),
    ("0.1::float", "0.1::real"),
    ("1e300::double", "1e300::float8"),
    ("-0.0::double", "'-0'::float8"),
    ("'nan'::double", "'NaN'::float8"),
    ("'infinity'::double", "'Infinity'::float8"),
    ("true", "true"),
    ("date '2024-02-29'", "date '2024-02-29'"),
    ("'infinity'::date", "'infinity'::date"),
    ("timestamp '2024-02-29 12:00:00.5'", "timestamp '2024-02-29 12:00:00.5'"),
    ("'2024-02-29 12:00:00+05:30'::timestamptz", "'2024-02-29 12:00:00+05:30'::timestamptz"),
    ("time '03:04:05.5'", "time '03:04:05.5'"),
    ("interval '1 year 2 days 03:04:05.5'", "interval '1 year 2 days 03:04:05.5'"),
    ("'\\xDE\\xAD'::blob", "'\\xdead'::bytea"),
    ("uuid '00000000-0000-4000-8000-00000000000a'", "uuid '00000000-0000-4000-8000-00000000000a'"),
    ("'{\"a\": [1.50, null]}'::json", "'{\"a\": [1.50, null]}'::jsonb"),
    ("['a', null]", "array['a', null]"),
    ("[[1, 2], [3, 4]]", "array[[1, 2], [3, 4]]"),
    ("[0.1::double, 19.90]", "array[0.1, 19.90]::float8[]"),
)


def test_equal_values_make_one_request_on_both_warehouses(postgres_uri: str) -> None:
    duck = ", ".join(f"{one} as c{n}" for n, (one, _) in enumerate(VALUES))
    post = ", ".join(f"{other} as c{n}" for n, (_, other) in enumerate(VALUES))
    template = "{{ row | tojson }} " + " ".join(f"[{{{{ c{n} }}}}]" for n in range(len(VALUES)))
    with duckdb_sessions() as open_duckdb, postgres_sessions(postgres_uri) as open_postgres:
        one = open_duckdb({}).messages(f"select {duck}", template, Normalize.STANDARD)
        other = open_postgres({}).messages(f"select {post}", template, Normalize.STANDARD)
    assert one == other
    assert request_keys(one) == request_keys(other)
