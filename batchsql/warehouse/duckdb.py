"""DuckDB: one process owns the file, so one lock in the process orders all writers of a ledger."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa

from batchsql.declare.returns import ValueKind
from batchsql.warehouse.base import (
    Column,
    ColumnSql,
    UnsupportedColumnTypeError,
    ValueForm,
    literal,
    quote,
)

_LOCKS: dict[str, threading.RLock] = {}
_LOCKS_GUARD = threading.Lock()

_INTEGERS = {
    "TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT",
    "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT", "UHUGEINT",
}  # fmt: skip
_NATIVE_INTEGERS = _INTEGERS - {"HUGEINT", "UHUGEINT"}

# What an enum or a struct calls its members must not be taken for a type.
_QUOTED = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"")

# A member's name is followed by a blank, a type is not.
_TIMES_OF_A_ZONE = re.compile(r"TIMESTAMP WITH TIME ZONE|\b(?:TIMESTAMPTZ_NS|VARIANT)\b(?! )")

_COLUMN_TYPES = {
    ValueKind.TEXT: "VARCHAR",
    ValueKind.INTEGER: "BIGINT",
    ValueKind.NUMBER: "DOUBLE",
    ValueKind.BOOLEAN: "BOOLEAN",
    ValueKind.DATE: "DATE",
    ValueKind.TIMESTAMP: "TIMESTAMP WITH TIME ZONE",
    ValueKind.JSON: "JSON",
}


class DuckDBDialect:
    """SQL fragments for DuckDB 2."""

    name = "duckdb"

    def input_sql(self, column: Column) -> ColumnSql:
        name = quote(column.name, "duckdb")
        kind = _QUOTED.sub("", column.type_name).upper()
        text = f"{name}::varchar"
        if kind == "VARCHAR":
            return ColumnSql(name, name, ValueForm.TEXT)
        if kind in _NATIVE_INTEGERS:
            return ColumnSql(text, name, ValueForm.NATIVE)
        if kind == "BOOLEAN":
            return ColumnSql(text, name, ValueForm.NATIVE)
        if kind in _INTEGERS:  # of 128 bits, as a sum of integers is
            return ColumnSql(text, text, ValueForm.INTEGER)
        if re.fullmatch(r"DECIMAL\(\d+,0\)", kind):
            return ColumnSql(text, text, ValueForm.DECIMAL)
        if re.fullmatch(r"DECIMAL\(\d+,\d+\)", kind):
            # As PostgreSQL's: 1.50 equals 1.5, whatever the declared scale.
            trimmed = f"rtrim(rtrim({text}, '0'), '.')"
            return ColumnSql(trimmed, trimmed, ValueForm.DECIMAL)
        if kind in ("FLOAT", "DOUBLE"):
            # -0 equals 0 and NaNs are all alike; their texts are not.
            key = f"(case when {name} = 0 then '0' when isnan({name}) then 'nan' else {text} end)"
            # By its text, 0.1 of single precision stays 0.1.
            value = f"(case when {name} = 0 then '0' else {text} end)::double"
            return ColumnSql(key, value, ValueForm.NATIVE)
        if kind == "DATE":
            return ColumnSql(text, text, ValueForm.DATE)
        if kind in ("TIMESTAMP", "TIMESTAMP_S", "TIMESTAMP_MS", "TIMESTAMP_NS"):
            return ColumnSql(text, text, ValueForm.TIMESTAMP)
        if kind in ("TIMESTAMP WITH TIME ZONE", "TIMESTAMPTZ_NS"):
            # Not AT TIME ZONE, which reckons in the session's calendar. Infinity has no epoch.
            utc = (
                f"make_timestamp_ns(epoch_ns({name}))"
                if kind == "TIMESTAMPTZ_NS"
                else f"make_timestamp(epoch_us({name}))"
            )
            utc_text = f"coalesce({utc}::varchar, {text})"
            return ColumnSql(utc_text, utc_text, ValueForm.TIMESTAMP_UTC)
        if kind == "BLOB":
            return ColumnSql(f"hex({name})", name, ValueForm.NATIVE)
        if kind == "JSON":
            return ColumnSql(text, text, ValueForm.JSON)
        if _TIMES_OF_A_ZONE.search(kind):
            raise UnsupportedColumnTypeError(
                f"its type {column.type_name} can hold a TIMESTAMP WITH TIME ZONE inside, whose "
                "text depends on the session's time zone; select the parts that the prompt needs "
                "as columns, or cast them to TIMESTAMP inside it"
            )
        if kind.endswith("]") or kind.startswith(("STRUCT", "MAP", "UNION")):
            as_json = f"to_json({name})::varchar"
            return ColumnSql(as_json, as_json, ValueForm.JSON)
        return ColumnSql(text, text, ValueForm.TEXT)  # uuid, enum, times, interval, bit

    def digest_uuid(self, text_sql: str) -> str:
        return f"left(sha256({text_sql}), 32)::uuid"

    def answer_sql(self, answer: str, name: str, kind: ValueKind, type_name: str | None) -> str:
        # The path is always quoted: a bare name that starts with $ or / would be read as a path.
        path = '$."' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
        operator = "->" if kind is ValueKind.JSON else "->>"
        target = type_name or self.column_type(kind)
        value = f"({answer} {operator} {literal(path)})"
        if kind is ValueKind.JSON:
            # As JSON, since a cast of its text to a list or struct would read that differently.
            value = f"nullif({value}::varchar, 'null')::json"
        return f"cast({value} as {target})"

    def column_type(self, kind: ValueKind) -> str:
        return _COLUMN_TYPES[kind]


class DuckDBSource:
    """dbt's own cursor. The candidate is a temporary table, which only this cursor sees.

    An idle cursor costs nothing in a process that owns its file, so nothing is released.
    """

    def __init__(
        self, query: Callable[[str], Any], cursor: Callable[[], Any], commit: Callable[[], None]
    ) -> None:
        """Take what runs SQL on dbt's cursor, the cursor itself, and what commits on it.

        ``query`` must not begin a transaction by itself: an open one would not see what the ledger
        commits meanwhile.
        """
        self._query = query
        self._cursor = cursor
        self._commit = commit

    def describe(self, select_sql: str) -> list[Column]:
        rows = self._query(f"describe select * from (\n{select_sql}\n) q").fetchall()
        return [Column(row[0], row[1]) for row in rows]

    def create_candidate(self, relation: str, select_sql: str) -> None:
        self._query(f"create or replace temporary table {relation} as\n{select_sql}")
        self._commit()

    def drop_candidate(self, relation: str) -> None:
        self._query(f"drop table if exists {relation}")
        self._commit()

    def fetch(self, sql: str) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = self._query(sql).fetchall()
        return rows

    def stream(self, sql: str, batch_rows: int) -> Iterator[pa.RecordBatch]:
        yield from self._cursor().sql(sql).to_arrow_reader(batch_rows)

    def release(self) -> None:
        self._commit()

    def resume(self) -> None:
        return


class DuckDBWarehouse:
    """A cursor of batchsql's own on dbt's database. Writers take turns through one lock."""

    dialect = "duckdb"
    clock = "now()"
    json_type = "json"
    has_foreign_writers = False

    def __init__(self, cursor: Any, database: str, close: Callable[[], None]) -> None:
        """Take a cursor of its own and the database's name (for the lock and the ledger)."""
        self._cursor = cursor
        self._close = close
        self.database = database
        path = cursor.execute(
            "select coalesce(path, database_name) from duckdb_databases() where database_name = ?",
            [database],
        ).fetchone()
        with _LOCKS_GUARD:
            self._lock = _LOCKS.setdefault(path[0] if path else database, threading.RLock())
        self._staged: list[str] = []

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with self._lock:
            self._cursor.begin()
            try:
                yield
                self._cursor.commit()
            except BaseException:
                with suppress(Exception):  # a failed commit has rolled back already
                    self._cursor.rollback()
                raise
            finally:
                for name in self._staged:
                    self._cursor.unregister(name)
                self._staged.clear()

    def execute(self, sql: str, params: Sequence[Any] = ()) -> None:
        self._cursor.execute(sql, list(params))

    def fetch(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = self._cursor.execute(sql, list(params)).fetchall()
        return rows

    def stream(self, sql: str, batch_rows: int) -> Iterator[pa.RecordBatch]:
        yield from self._cursor.sql(sql).to_arrow_reader(batch_rows)

    def stage(self, name: str, table: pa.Table) -> str:
        staged = f"batchsql_stage_{name}"
        self._cursor.register(staged, table)
        self._staged.append(staged)
        return staged

    def insert_new(self, table: str, columns: Sequence[str], select_sql: str) -> None:
        # ON CONFLICT needs an index and was measured 8 times slower than this anti-join. Being
        # materialized, the few new rows are hashed; otherwise it can be the whole table's keys.
        key = columns[0]
        self._cursor.execute(
            f"insert into {table} ({', '.join(columns)}) with n as materialized ({select_sql}) "
            f"select * from n where not exists (select 1 from {table} o where o.{key} = n.{key})"
        )

    def relation_exists(self, schema: str, name: str) -> bool:
        return bool(
            self.fetch(
                "select 1 from duckdb_tables() where lower(database_name) = lower(?) "
                "and lower(schema_name) = lower(?) and lower(table_name) = lower(?)",
                [self.database, schema, name],
            )
        )

    def create_schema(self, schema: str) -> None:
        database = quote(self.database, "duckdb")
        self.execute(f"create schema if not exists {database}.{quote(schema, 'duckdb')}")

    @contextmanager
    def migration_lock(self) -> Iterator[None]:
        with self.transaction():
            yield

    def close(self) -> None:
        self._close()
