"""What batchsql asks of a warehouse, and the small values that pass to and from one.

Two connections are at work. The *source* is dbt's own connection: it evaluates the user's SELECT
into the candidate and reads it back. The *warehouse* is a connection of batchsql's own: it holds
the ledger, in short transactions, while dbt's connection is idle or closed.
"""

from __future__ import annotations

import datetime as dt
import decimal
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import pyarrow as pa
import sqlglot
from sqlglot import exp

from batchsql.declare.returns import ValueKind

MAX_IDENTIFIER_BYTES = 63
"""PostgreSQL cuts longer names silently, so that two could collide."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the user's SELECT: its name as selected and its type in the warehouse's words."""

    name: str
    type_name: str
    type_class: str = ""
    """``composite``, ``range`` or ``multirange`` for a type whose name may not tell."""


class ValueForm(str, Enum):
    """How a value travels out of the warehouse, and so what a template gets of it."""

    TEXT = "text"
    NATIVE = "native"  # integers, floats, booleans, bytes: Arrow's own
    INTEGER = "integer"  # of more than the 64 bits that Arrow has
    DECIMAL = "decimal"
    DATE = "date"
    TIMESTAMP = "timestamp"
    TIMESTAMP_UTC = "timestamp_utc"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class ColumnSql:
    """SQL for one input column: its canonical text for the key, and its value for a template."""

    key_text: str
    value: str
    form: ValueForm


class UnsupportedColumnTypeError(ValueError):
    """A column's type has no canonical text, so no stable key can be made of it."""


class Source(Protocol):
    """dbt's own connection, on which the user's SELECT is evaluated once."""

    def describe(self, select_sql: str) -> list[Column]:
        """Return the columns of a SELECT without running it over its rows."""
        ...

    def create_candidate(self, relation: str, select_sql: str) -> None:
        """Store the rows of a SELECT as a table of this run, and commit."""
        ...

    def drop_candidate(self, relation: str) -> None:
        """Drop the candidate, if it is there, and commit."""
        ...

    def fetch(self, sql: str) -> list[tuple[Any, ...]]:
        """Return all rows of a small query."""
        ...

    def stream(self, sql: str, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a query in batches, holding only a few batches in memory."""
        ...

    def release(self) -> None:
        """Give the connection back where holding it would cost the warehouse something."""
        ...

    def resume(self) -> None:
        """Take a connection again after ``release``."""
        ...


class Warehouse(Protocol):
    """A connection of batchsql's own, for the ledger."""

    dialect: str
    database: str
    clock: str
    """SQL for the warehouse's own time now, which moves within a transaction where it can."""

    json_type: str
    """Type of the column that holds a validated answer."""

    has_foreign_writers: bool
    """Whether another process may write the ledger at the same time."""

    def transaction(self) -> AbstractContextManager[None]:
        """Run the block in one transaction: committed at its end, rolled back on any error."""
        ...

    def execute(self, sql: str, params: Sequence[Any] = ()) -> None: ...

    def fetch(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]: ...

    def stream(self, sql: str, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a query in batches. Nothing else may be asked before its end."""
        ...

    def stage(self, name: str, table: pa.Table) -> str:
        """Make an Arrow table readable under the returned name until the transaction ends."""
        ...

    def insert_new(self, table: str, columns: Sequence[str], select_sql: str) -> None:
        """Insert the selected rows whose key (the first column) is not in the table yet.

        The selection holds each key once.
        """
        ...

    def relation_exists(self, schema: str, name: str) -> bool: ...

    def create_schema(self, schema: str) -> None:
        """Create the schema unless it is there.

        Raises:
            WarehouseError: the user may not, with the GRANT that would allow it.
        """
        ...

    def migration_lock(self) -> AbstractContextManager[None]:
        """Hold a lock that keeps others from changing tables; commit after the block."""
        ...

    def close(self) -> None: ...


class Dialect(Protocol):
    """SQL fragments of one warehouse: what transpiling gets wrong is written by hand."""

    name: str

    def input_sql(self, column: Column) -> ColumnSql:
        """Return the fragments for an input column.

        Raises:
            UnsupportedColumnTypeError: no text of this type is stable across sessions.
        """
        ...

    def digest_uuid(self, text_sql: str) -> str:
        """Return SQL for the first 128 bits of the SHA-256 of a text, as a uuid."""
        ...

    def answer_sql(self, answer: str, name: str, kind: ValueKind, type_name: str | None) -> str:
        """Return SQL that takes one field out of an answer and casts it."""
        ...

    def column_type(self, kind: ValueKind) -> str:
        """Return the column type for a kind of value (the table is in docs/types.md)."""
        ...


def quote(name: str, dialect: str) -> str:
    """Quote an identifier, whatever letters it holds."""
    return exp.to_identifier(name, quoted=True).sql(dialect=dialect)


def literal(text: str) -> str:
    """Write a text as a standard SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def bare_select(sql: str, dialect: str) -> str:
    """Return a statement without a semicolon at its end, and what is commented behind that."""
    try:
        tokens = sqlglot.tokenize(sql, dialect)
    except sqlglot.errors.SqlglotError:  # the warehouse will say what is wrong with it
        return sql.rstrip().rstrip(";")
    end = len(sql)
    while tokens and tokens[-1].token_type is sqlglot.TokenType.SEMICOLON:
        end = tokens.pop().start
    return sql[:end]


def fit_identifier(name: str) -> str:
    """Shorten a name of our own to what every warehouse keeps, with a digest against collisions."""
    encoded = name.encode()
    if len(encoded) <= MAX_IDENTIFIER_BYTES:
        return name
    digest = hashlib.sha256(encoded).hexdigest()[:12]
    kept = encoded[: MAX_IDENTIFIER_BYTES - len(digest) - 1].decode(errors="ignore")
    return f"{kept}_{digest}"


def item_key_sql(
    dialect: Dialect, spec_version: str, inputs: Sequence[tuple[str, ColumnSql]]
) -> str:
    """Return SQL that computes the item key of a row.

    The key is the digest of the spec version and of each input as name, length and text, so that
    no two different rows share a text; NULL differs from the empty text. Inputs are sorted by
    name, so the order of columns in the SELECT does not matter.
    """
    parts = [literal(f"{spec_version}|")]
    for name, sql in sorted(inputs, key=lambda pair: pair[0]):
        label = literal(f"{len(name)}:{name}=")
        text = sql.key_text
        parts.append(f"{label} || coalesce(length({text}) || ':' || {text}, '-') || ';'")
    return dialect.digest_uuid(" || ".join(parts))


def _parse_date(text: str) -> Any:
    try:
        return dt.date.fromisoformat(text)
    except ValueError:  # infinity, years BC or beyond 9999: they stay as the warehouse writes them
        return text


def _parse_timestamp(text: str) -> Any:
    # Python 3.10 reads neither a blank for the T nor one to five digits of a second.
    head, _, fraction = text.replace(" ", "T", 1).partition(".")
    try:
        stamp = dt.datetime.fromisoformat(head)
        return stamp.replace(microsecond=int(fraction[:6].ljust(6, "0"))) if fraction else stamp
    except ValueError:
        return text


def _parse_timestamp_utc(text: str) -> Any:
    stamp = _parse_timestamp(text)
    return stamp.replace(tzinfo=dt.timezone.utc) if isinstance(stamp, dt.datetime) else stamp


def _parse_json(text: str) -> Any:
    value = json.loads(text)
    return _without_surrogates(value) if "\\ud" in text or "\\uD" in text else value


def _without_surrogates(value: Any) -> Any:
    """Replace what is half a character in a JSON text: it can be neither stored nor sent."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    return value


_PARSERS: dict[ValueForm, Callable[[str], Any]] = {
    ValueForm.INTEGER: int,
    ValueForm.DECIMAL: decimal.Decimal,
    ValueForm.DATE: _parse_date,
    ValueForm.TIMESTAMP: _parse_timestamp,
    ValueForm.TIMESTAMP_UTC: _parse_timestamp_utc,
    ValueForm.JSON: _parse_json,
}


def column_values(column: pa.Array, form: ValueForm) -> list[Any]:
    """Turn one Arrow column into the values that a template gets; NULL is None."""
    values: list[Any] = column.to_pylist()
    parse = _PARSERS.get(form)
    if parse is None:
        return values
    return [None if value is None else parse(value) for value in values]
