"""PostgreSQL: row locks and primary keys order the writers; data moves as Arrow through ADBC."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import count
from typing import Any

import pyarrow as pa

from batchsql.declare.returns import ValueKind
from batchsql.errors import MissingExtraError, WarehouseError
from batchsql.warehouse.base import (
    Column,
    ColumnSql,
    UnsupportedColumnTypeError,
    ValueForm,
    literal,
    quote,
)

_MIGRATION_LOCK = 4_702_111_234_474_983
"""Any number no other program is likely to use for an advisory lock."""

_MAX_BATCH_BYTES = 64 * 1024 * 1024

_COLUMN_TYPES = {
    ValueKind.TEXT: "text",
    ValueKind.INTEGER: "bigint",
    ValueKind.NUMBER: "double precision",
    ValueKind.BOOLEAN: "boolean",
    ValueKind.DATE: "date",
    ValueKind.TIMESTAMP: "timestamp with time zone",
    ValueKind.JSON: "jsonb",
}

# Types whose text depends on the session's settings, with the function that gives their bytes.
_SEND = {
    "money": "cash_send", "interval": "interval_send",
    "point": "point_send", "line": "line_send", "lseg": "lseg_send", "box": "box_send",
    "path": "path_send", "polygon": "poly_send", "circle": "circle_send",
}  # fmt: skip
_SEND_CLASS = {"composite": "record_send", "range": "range_send", "multirange": "multirange_send"}
_TYPE_CLASSES = {"c": "composite", "r": "range", "m": "multirange"}

# Their arrays have one text in every session; other arrays go by their bytes, in which texts are
# in the client's encoding.
_STABLE_ELEMENTS = {
    "text", "character varying", "character", "smallint", "integer", "bigint", "boolean", "uuid",
    "json", "jsonb", "inet", "cidr",
}  # fmt: skip

# What a value looks like must not depend on the user's session, so ours is pinned.
_SESSION = (
    # The ledger's statements must see what others committed while they waited for a lock.
    "set default_transaction_isolation to 'read committed'",
    "set time zone 'UTC'",
    "set datestyle to 'ISO, YMD'",
    "set intervalstyle to 'postgres'",
    "set bytea_output to 'hex'",
    "set extra_float_digits to 1",
    "set client_min_messages to warning",
)


class PostgresDialect:
    """SQL fragments for PostgreSQL 13 and later."""

    name = "postgres"

    def input_sql(self, column: Column) -> ColumnSql:
        name = quote(column.name, "postgres")
        kind = column.type_name.lower()
        text = f"{name}::text"
        if kind.endswith("[]"):
            is_stable = kind.removesuffix("[]") in _STABLE_ELEMENTS
            key = text if is_stable else f"encode(array_send({name}), 'hex')"
            return ColumnSql(key, f"to_json({name})::text", ValueForm.JSON)
        if column.type_class in _SEND_CLASS:
            key = f"encode({_SEND_CLASS[column.type_class]}({name}), 'hex')"
            if column.type_class == "composite":
                return ColumnSql(key, f"to_json({name})::text", ValueForm.JSON)
            return ColumnSql(key, text, ValueForm.TEXT)
        if kind in ("smallint", "integer", "bigint"):
            return ColumnSql(text, name, ValueForm.NATIVE)
        if kind == "boolean":
            return ColumnSql(text, name, ValueForm.NATIVE)
        if kind.startswith("numeric"):
            trimmed = f"trim_scale({name})::text"
            return ColumnSql(trimmed, trimmed, ValueForm.DECIMAL)
        if kind in ("real", "double precision"):
            # -0 equals 0 and NaNs are all alike; their bytes are not.
            key = (
                f"(case when {name} = 0 then '0' when {name} = 'NaN' then 'nan' "
                f"else encode(float8send({name}::float8), 'hex') end)"
            )
            # By its text, 0.1 of single precision stays 0.1.
            value = f"(case when {name} = 0 then '0' else {text} end)::float8"
            return ColumnSql(key, value, ValueForm.NATIVE)
        if kind == "date":
            key = f"encode(date_send({name}), 'hex')"
            return ColumnSql(key, f"to_json({name})#>>'{{}}'", ValueForm.DATE)
        # Not by their epoch, which loses the microseconds of far years.
        if kind == "timestamp with time zone":
            key = f"encode(timestamptz_send({name}), 'hex')"
            utc = f"to_json({name} at time zone 'UTC')#>>'{{}}'"
            return ColumnSql(key, utc, ValueForm.TIMESTAMP_UTC)
        if kind == "timestamp without time zone":
            key = f"encode(timestamp_send({name}), 'hex')"
            return ColumnSql(key, f"to_json({name})#>>'{{}}'", ValueForm.TIMESTAMP)
        if kind == "bytea":
            return ColumnSql(f"encode({name}, 'hex')", name, ValueForm.NATIVE)
        if kind in ("json", "jsonb"):
            return ColumnSql(text, text, ValueForm.JSON)
        if kind in _SEND:
            key = f"encode({_SEND[kind]}({name}), 'hex')"
            if kind == "money":
                return ColumnSql(key, f"{name}::numeric::text", ValueForm.DECIMAL)
            return ColumnSql(key, text, ValueForm.TEXT)
        if kind == "record":
            raise UnsupportedColumnTypeError(
                "an anonymous record has no stable text; select its fields"
            )
        return ColumnSql(text, text, ValueForm.TEXT)  # text, varchar, char, uuid, enum, inet, time

    def digest_uuid(self, text_sql: str) -> str:
        digest = f"sha256(convert_to({text_sql}, 'UTF8'))"
        return f"encode(substr({digest}, 1, 16), 'hex')::uuid"

    def answer_sql(self, answer: str, name: str, kind: ValueKind, type_name: str | None) -> str:
        operator = "->" if kind is ValueKind.JSON else "->>"
        target = type_name or self.column_type(kind)
        value = f"({answer} {operator} {literal(name)})"
        if kind is ValueKind.JSON:
            value = f"nullif({value}, 'null'::jsonb)"
            if target.rstrip().endswith("[]"):  # no cast leads from jsonb to an array
                items = "elements" if target.lower().startswith("json") else "elements_text"
                value = (
                    f"case when {value} is not null then array(select e.item from "
                    f"jsonb_array_{items}({value}) with ordinality as e(item, place) "
                    "order by e.place) end"
                )
        return f"cast({value} as {target})"

    def column_type(self, kind: ValueKind) -> str:
        return _COLUMN_TYPES[kind]


class PostgresSource:
    """dbt's own connection. The candidate is an unlogged table in the ledger's schema.

    A temporary table would be lost when the connection is given back for the time of the model.
    """

    def __init__(
        self,
        query: Callable[[str], Any],
        commit: Callable[[], None],
        release: Callable[[], None],
        resume: Callable[[], None],
        connect: Callable[[], Any],
    ) -> None:
        self._query = query
        self._commit = commit
        self._release = release
        self._resume = resume
        self._connect = connect

    def describe(self, select_sql: str) -> list[Column]:
        cursor = self._query(f"select * from (\n{select_sql}\n) q limit 0")
        described = [(column[0], column[1]) for column in cursor.description]
        if not described:
            return []
        oids = ", ".join(str(int(oid)) for _, oid in described)
        # A domain is described as the type that it restricts.
        types = {
            oid: (type_name, _TYPE_CLASSES.get(type_class, ""))
            for oid, type_name, type_class in self._query(
                "select oid, format_type(oid, null), typtype::text "
                f"from pg_catalog.pg_type where oid in ({oids})"
            ).fetchall()
        }
        return [Column(name, *types[oid]) for name, oid in described]

    def create_candidate(self, relation: str, select_sql: str) -> None:
        self._query(f"drop table if exists {relation}")
        self._query(f"create unlogged table {relation} as\n{select_sql}")
        self._query(f"analyze {relation}")
        self._commit()

    def drop_candidate(self, relation: str) -> None:
        self._query(f"drop table if exists {relation}")
        self._commit()

    def fetch(self, sql: str) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = self._query(sql).fetchall()
        return rows

    def stream(self, sql: str, batch_rows: int) -> Iterator[pa.RecordBatch]:
        with closing(self._connect()) as connection, connection.cursor() as cursor:
            cursor.execute(sql)
            pending: list[pa.RecordBatch] = []
            rows = size = 0
            for batch in cursor.fetch_record_batch():
                pending.append(batch)
                rows += batch.num_rows
                size += batch.nbytes
                if rows >= batch_rows or size >= _MAX_BATCH_BYTES:
                    yield from _combined(pending)
                    pending, rows, size = [], 0, 0
            if rows:
                yield from _combined(pending)

    def release(self) -> None:
        self._commit()
        self._release()

    def resume(self) -> None:
        self._resume()


def _combined(batches: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Return few large batches for many small ones: one, unless its texts pass Arrow's 2 GB."""
    combined: list[pa.RecordBatch] = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return combined


def connect_adbc(conninfo: str, role: str | None) -> Any:
    """Open a PostgreSQL connection that speaks Arrow, with its session settings pinned.

    ``role`` is SQL for a role's name, as it is in dbt's profile: a mixed case one is in quotes.

    Raises:
        MissingExtraError: the driver is not installed.
        WarehouseError: the server refused the connection, or the role.
    """
    try:
        import adbc_driver_postgresql.dbapi as adbc
    except ImportError as error:
        raise MissingExtraError(
            "PostgreSQL needs a driver that is not installed; run: pip install 'batchsql[postgres]'"
        ) from error
    try:
        connection = adbc.connect(conninfo)
        try:
            with connection.cursor() as cursor:
                for statement in ((f"set role {role}",) if role else ()) + _SESSION:
                    cursor.execute(statement)
            connection.commit()
        except BaseException:
            connection.close()
            raise
    except adbc.Error as error:
        # Not chained: the driver's own error may repeat the connection string, password and all.
        raise WarehouseError(
            "PostgreSQL refused batchsql's own connection for the ledger: "
            f"{without_password(str(error))}. dbt's was accepted, so look for a connection limit "
            "or a pg_hba rule"
        ) from None
    return connection


def without_password(text: str) -> str:
    """Return the text with the passwords of connection strings left out."""
    return re.sub(r"password\s*=\s*('(?:[^'\\]|\\.)*'|\S+)", "password=...", text)


class PostgresWarehouse:
    """A connection of batchsql's own, on which every transaction is short."""

    dialect = "postgres"
    clock = "clock_timestamp()"
    json_type = "jsonb"
    has_foreign_writers = True

    def __init__(self, connect: Callable[[], Any], database: str) -> None:
        self._connection = connect()
        self._in_transaction = False
        self.database = database

    @contextmanager
    def transaction(self) -> Iterator[None]:
        if self._in_transaction:
            raise RuntimeError("transactions do not nest")
        self._in_transaction = True
        try:
            yield
            self._connection.commit()
        except BaseException:
            with suppress(Exception):  # a connection that is lost cannot; the first error tells why
                self._connection.rollback()
            raise
        finally:
            self._in_transaction = False

    def execute(self, sql: str, params: Sequence[Any] = ()) -> None:
        self._run(sql, params, lambda cursor: None)

    def fetch(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = self._run(sql, params, lambda cursor: cursor.fetchall())
        return rows

    def _run(self, sql: str, params: Sequence[Any], take: Callable[[Any], Any]) -> Any:
        if not self._in_transaction:  # or a mere read would leave a transaction open
            with self.transaction():
                return self._run(sql, params, take)
        with self._connection.cursor() as cursor:
            cursor.execute(_numbered(sql), tuple(params) or None)
            return take(cursor)

    def stream(self, sql: str, batch_rows: int) -> Iterator[pa.RecordBatch]:
        with self.transaction(), self._connection.cursor() as cursor:
            cursor.execute(sql)
            yield from cursor.fetch_record_batch()

    def stage(self, name: str, table: pa.Table) -> str:
        staged = f"batchsql_stage_{name}"
        with self._connection.cursor() as cursor:
            # Made anew in each transaction: one that was rolled back would have taken it along.
            cursor.execute(f"drop table if exists pg_temp.{staged}")
            cursor.adbc_ingest(staged, table, mode="create", temporary=True)
        return f"pg_temp.{staged}"

    def insert_new(self, table: str, columns: Sequence[str], select_sql: str) -> None:
        # Ordered by key, so that two writers of the same keys wait for each other, not in a ring.
        self.execute(
            f"insert into {table} ({', '.join(columns)}) select * from ({select_sql}) n "
            f"order by n.{columns[0]} on conflict do nothing"
        )

    def relation_exists(self, schema: str, name: str) -> bool:
        return bool(
            self.fetch(
                "select 1 from pg_catalog.pg_class c join pg_catalog.pg_namespace n "
                "on n.oid = c.relnamespace where n.nspname = ? and c.relname = ?",
                [schema, name],
            )
        )

    def create_schema(self, schema: str) -> None:
        # CREATE SCHEMA IF NOT EXISTS wants the privilege even when the schema exists.
        if self.fetch("select 1 from pg_catalog.pg_namespace where nspname = ?", [schema]):
            return
        if not self.fetch("select has_database_privilege(current_database(), 'CREATE')")[0][0]:
            user = str(self.fetch("select current_user::text")[0][0])
            raise WarehouseError(
                f"the user {user} may not create the ledger's schema {schema}. Either run, as the "
                f"database's owner: GRANT CREATE ON DATABASE {quote(self.database, 'postgres')} TO "
                f"{quote(user, 'postgres')}; or set ledger_schema to a schema in which {user} may "
                "create tables"
            )
        self.execute(f"create schema if not exists {quote(schema, 'postgres')}")

    @contextmanager
    def migration_lock(self) -> Iterator[None]:
        with self.transaction():
            self.execute(f"select pg_advisory_xact_lock({_MIGRATION_LOCK})")
            yield

    def close(self) -> None:
        self._connection.close()


def _numbered(sql: str) -> str:
    """Turn ``?`` placeholders into PostgreSQL's ``$1``, ``$2``, but none in a quoted name."""
    numbers = count(1)
    return re.sub(
        r'"[^"]*"|\?', lambda match: f"${next(numbers)}" if match[0] == "?" else match[0], sql
    )
