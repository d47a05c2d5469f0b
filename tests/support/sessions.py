"""Sources on real warehouses under any session settings, with the reads that a run does."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import duckdb

from batchsql.declare.keys import RequestKeyer, messages_json
from batchsql.declare.normalize import Normalize
from batchsql.declare.prompt import parse_prompt
from batchsql.declare.returns import Returns
from batchsql.types import Message, ModelRef
from batchsql.warehouse.base import ColumnSql, Dialect, Source, column_values, item_key_sql, literal
from batchsql.warehouse.duckdb import DuckDBDialect, DuckDBSource
from batchsql.warehouse.postgres import PostgresDialect, PostgresSource, connect_adbc

SPEC = "5" * 32
MODEL = ModelRef("fake", "labeller")

POSTGRES_SCHEMA = "dialect_tests"

_SETUP = f"""
drop schema if exists {POSTGRES_SCHEMA} cascade;
create schema {POSTGRES_SCHEMA};
set search_path to {POSTGRES_SCHEMA};
create domain label as text check (value <> 'bad');
create domain short_label as label check (length(value) < 100);
create domain price as numeric(10,2);
create type mood as enum ('ok', 'it''s');
create type visit as (page text, at timestamp with time zone, score double precision);
create type float_range as range (subtype = double precision);
"""


@dataclass(frozen=True)
class Session:
    """A source under some session's settings, with the reads that a run does."""

    source: Source
    dialect: Dialect
    candidate: str

    @property
    def text(self) -> str:
        return "varchar" if self.dialect.name == "duckdb" else "text"

    def inputs(self, select: str) -> dict[str, ColumnSql]:
        return {c.name: self.dialect.input_sql(c) for c in self.source.describe(select)}

    def keys(self, select: str) -> list[str]:
        """Return the item key of each row, all columns being inputs."""
        key = item_key_sql(self.dialect, SPEC, list(self.inputs(select).items()))
        rows = self.source.fetch(f"select ({key})::{self.text} from (\n{select}\n) s")
        return [row[0] for row in rows]

    def keys_of(self, expressions: Sequence[str]) -> dict[str, str]:
        """Return for each SQL expression the item key of a row that is only it."""
        columns = ", ".join(f"{each} as c{n}" for n, each in enumerate(expressions))
        select = f"select {columns}"
        keys = [
            f"({item_key_sql(self.dialect, SPEC, [('x', sql)])})::{self.text}"
            for sql in self.inputs(select).values()
        ]
        (row,) = self.source.fetch(f"select {', '.join(keys)} from (\n{select}\n) s")
        return dict(zip(expressions, row, strict=True))

    def values(self, select: str) -> list[tuple[Any, ...]]:
        """Return what a template gets of each row, on the way that a run takes."""
        inputs = self.inputs(select)
        listed = ", ".join(f"{sql.value} as i{n}" for n, sql in enumerate(inputs.values()))
        self.source.create_candidate(self.candidate, select)
        try:
            rows: list[tuple[Any, ...]] = []
            for batch in self.source.stream(f"select {listed} from {self.candidate}", 1000):
                columns = [
                    column_values(batch.column(n), sql.form)
                    for n, sql in enumerate(inputs.values())
                ]
                rows.extend(zip(*columns, strict=True))
            return rows
        finally:
            self.source.drop_candidate(self.candidate)

    def messages(
        self, select: str, template: str = "[{{ x }}]", mode: Normalize = Normalize.NONE
    ) -> list[tuple[Message, ...]]:
        """Return each row's rendered messages."""
        inputs = list(self.inputs(select))
        bound = parse_prompt(template).bind(inputs, mode)
        picked = [inputs.index(name) for name in bound.inputs]
        return [bound.render([row[n] for n in picked]) for row in self.values(select)]

    def values_of(self, expressions: Sequence[str]) -> dict[str, Any]:
        """Return what a template gets of each SQL expression."""
        columns = ", ".join(f"{each} as c{n}" for n, each in enumerate(expressions))
        (row,) = self.values(f"select {columns}")
        return dict(zip(expressions, row, strict=True))

    def printed_of(self, expressions: Sequence[str]) -> dict[str, str]:
        """Return what ``{{ x }}`` prints of each SQL expression."""
        bound = parse_prompt("[{{ x }}]").bind(["x"], Normalize.NONE)
        return {
            expression: bound.render([value])[0].content[1:-1]
            for expression, value in self.values_of(expressions).items()
        }

    def printed(self, expression: str) -> str:
        """Return what ``{{ x }}`` prints of one SQL expression."""
        return self.printed_of([expression])[expression]


Open = Callable[[Mapping[str, str]], Session]
"""Opens a session with the settings given."""


def request_keys(messages: Sequence[tuple[Message, ...]]) -> list[str]:
    keyer = RequestKeyer(MODEL, {}, Returns(()), {}, ())
    return [keyer.key(messages_json(each)) for each in messages]


@contextmanager
def duckdb_sessions() -> Iterator[Open]:
    """Give a function that opens sessions, each on an empty database in memory."""
    with ExitStack() as stack:

        def open_(settings: Mapping[str, str]) -> Session:
            connection = stack.enter_context(closing(duckdb.connect()))
            for name, value in settings.items():
                connection.execute(f"set {name} = {literal(value)}")
            source = DuckDBSource(connection.execute, lambda: connection, lambda: None)
            return Session(source, DuckDBDialect(), "candidate")

        yield open_


@contextmanager
def postgres_sessions(uri: str) -> Iterator[Open]:
    """Give a function that opens sessions in a schema which holds some types of its own.

    The settings are defaults of both connections, as those of a database or a role are.
    """
    import psycopg2

    with ExitStack() as stack:
        setup = stack.enter_context(closing(psycopg2.connect(uri)))
        setup.autocommit = True
        setup.cursor().execute(_SETUP)
        stack.callback(setup.cursor().execute, f"drop schema {POSTGRES_SCHEMA} cascade")

        def open_(settings: Mapping[str, str]) -> Session:
            defaults = {
                "search_path": POSTGRES_SCHEMA, "client_min_messages": "warning", **settings
            }  # fmt: skip
            options = " ".join(
                f"-c{name}={value}".replace(" ", "") for name, value in defaults.items()
            )
            own_uri = f"{uri}&options={urllib.parse.quote(options)}"
            connection = stack.enter_context(closing(psycopg2.connect(own_uri)))
            connection.autocommit = True

            def query(sql: str) -> Any:
                cursor = connection.cursor()
                cursor.execute(sql)
                return cursor

            source = PostgresSource(
                query, lambda: None, lambda: None, lambda: None,
                lambda: connect_adbc(own_uri, None),
            )  # fmt: skip
            return Session(source, PostgresDialect(), f"{POSTGRES_SCHEMA}.candidate")

        yield open_
