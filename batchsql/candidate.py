"""The rows of one run, evaluated once, and the SQL that finds out what they need and have."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from batchsql.context import RunContext
from batchsql.declare.prompt import BoundPrompt
from batchsql.declare.spec import Declaration, check_columns
from batchsql.errors import DataError, Mistake, SpecError
from batchsql.validate.structure import safe_text
from batchsql.warehouse.base import (
    Column,
    ColumnSql,
    UnsupportedColumnTypeError,
    item_key_sql,
    quote,
)

ITEM_KEY = "__batchsql_item_key"
REQUEST_KEY = "__batchsql_request_key"
OUTPUT = "__batchsql_output"
STATUS_COLUMN = "llm_status"
REQUEST_COLUMN = "llm_request_id"

LONGEST_FIRST = 16
"""So many of the longest requests are given to an engine before all others."""


class Candidate:
    """A table of what a model's SELECT returned, each row with its item key, and with its request
    and its answer as far as they were known then. Everything later reads it instead of the SELECT.

    ``bind`` comes first, then ``create``. On DuckDB it is a temporary table of dbt's connection, on
    PostgreSQL a table beside the ledger.
    """

    def __init__(self, declaration: Declaration, context: RunContext, run_id: str) -> None:
        self.columns: list[Column] = []
        self.inputs: dict[str, ColumnSql] = {}
        """How each column that the prompt reads is read, in the order of ``prompt.inputs``."""
        self.rows = self.answered = 0
        self._declaration = declaration
        self._context = context
        self._is_duckdb = context.dialect.name == "duckdb"
        self._text = "varchar" if self._is_duckdb else "text"
        self._prompt: BoundPrompt | None = None
        self._spec_version = ""
        name = f"candidate_{run_id.replace('-', '')}"
        self.name = (
            quote(f"batchsql_{name}", "duckdb")
            if self._is_duckdb
            else context.ledger.relation(name)
        )

    @property
    def prompt(self) -> BoundPrompt:
        if self._prompt is None:
            raise RuntimeError("bind comes first")
        return self._prompt

    @property
    def is_answered(self) -> bool:
        """Whether every row had its answer from the beginning."""
        return self.rows == self.answered

    @property
    def unique_key(self) -> list[str]:
        """The columns of the declared unique key, named as the SELECT does."""
        by_name = {column.name: column.name for column in self.columns}
        folded = {column.name.casefold(): column.name for column in self.columns}
        return [by_name.get(key) or folded[key.casefold()] for key in self._declaration.unique_key]

    # --- making it ----------------------------------------------------------------------------

    def bind(self, select_sql: str) -> None:
        """Look at the columns of the model's SELECT and bind the declaration to them.

        Raises:
            SpecError: with every mistake that needs the columns to be seen.
        """
        declaration = self._declaration
        self.columns = self._context.source.describe(select_sql)
        # Sorted, so that a prompt which takes the whole row sees one order of columns.
        self._prompt = check_columns(declaration, sorted(column.name for column in self.columns))
        by_name = {column.name: column for column in self.columns}
        mistakes = []
        for name in self._prompt.inputs:
            try:
                self.inputs[name] = self._context.dialect.input_sql(by_name[name])
            except UnsupportedColumnTypeError as error:
                mistakes.append(Mistake(f"column {name}", str(error)))
        mistakes += self._check_urgent_when(select_sql)
        if mistakes:
            raise SpecError(declaration.subject, mistakes)

    def _check_urgent_when(self, select_sql: str) -> list[Mistake]:
        """Have the warehouse read the condition, so that its error is told with the key's name."""
        if self._declaration.urgent_when is None:
            return []
        picked = f"select {self._urgent_sql()} as urgent from (\n{select_sql}\n) q"
        try:
            self._context.source.describe(picked)
        except Exception as error:  # noqa: BLE001 - each warehouse has its own
            # The same SELECT was fine a moment ago without the condition.
            reason = " ".join(str(error).split("LINE ")[0].split())
            return [Mistake("urgent_when", f"the warehouse refuses the condition: {reason}")]
        return []

    def _urgent_sql(self) -> str:
        condition = self._declaration.urgent_when
        return "false" if condition is None else f"coalesce(bool_or((\n{condition}\n)), false)"

    def create(self, select_sql: str, target: str | None, spec_version: str) -> None:
        """Evaluate the SELECT into the table, and count its rows.

        Args:
            select_sql: the model's SELECT.
            target: for an incremental run, the table to merge into: its rows without an answer join
                the candidate, though the SELECT no longer returns them.
            spec_version: what the item keys are made for.

        Raises:
            DataError: the target is no table of batchsql's.
        """
        source = self._context.source
        self._spec_version = spec_version
        source.create_candidate(self.name, self._sql(select_sql, target))
        rows, answered = source.fetch(f"select count(*), count({OUTPUT}) from {self.name}")[0]
        self.rows, self.answered = int(rows), int(answered)

    def check_unique_key(self) -> None:
        """Look whether the declared unique key is one.

        Raises:
            DataError: it is not unique, or NULL.
        """
        keys = self.unique_key
        if not keys:
            return
        quoted = ", ".join(self._quote(key) for key in keys)
        label = ", ".join(keys)
        is_null = " or ".join(f"{self._quote(key)} is null" for key in keys)
        fetch = self._context.source.fetch
        nulls = fetch(f"select count(*) from {self.name} where {is_null}")[0][0]
        if nulls:
            raise DataError(
                f"{self._declaration.subject}: the unique key {label} is NULL in {nulls:,} rows; "
                "filter them out in the model or choose another unique_key"
            )
        if len(keys) == 1:
            distinct = fetch(f"select count(distinct {quoted}) from {self.name}")[0][0]
            if distinct == self.rows:
                return
        repeated = fetch(
            f"select {quoted}, count(*) from {self.name} group by {quoted} "
            f"having count(*) > 1 order by {quoted} limit 5"
        )
        if repeated:
            shown = "; ".join(
                f"{', '.join(safe_text(str(value), 100) for value in row[:-1])} ({row[-1]} times)"
                for row in repeated
            )
            raise DataError(
                f"{self._declaration.subject}: the unique key {label} is not unique, for example "
                f"{shown}; remove the duplicates in the model or choose another unique_key"
            )

    def drop(self) -> None:
        self._context.source.drop_candidate(self.name)

    def _quote(self, name: str) -> str:
        return quote(name, self._context.dialect.name)

    def _sql(self, select_sql: str, target: str | None) -> str:
        names = self._context.ledger.relation
        rows = f"(\n{select_sql}\n)"
        head = ""
        if target is not None:
            columns = ", ".join(self._quote(column.name) for column in self.columns)
            older = self._target_columns(target)
            same = " and ".join(
                f"p.{self._quote(key)} = t.{self._quote(key)}" for key in self.unique_key
            )
            head = f"with picked as materialized (\n{select_sql}\n)\n"
            rows = (
                f"(select {columns} from picked union all select {older} from {target} t "
                f"where t.{STATUS_COLUMN} <> 'ok' "
                f"and not exists (select 1 from picked p where {same}))"
            )
        return (
            f"{head}select q.*, k.request_key as {REQUEST_KEY}, r.output as {OUTPUT}\n"
            f"from (select s.*, {self.item_key_sql()} as {ITEM_KEY} from {rows} s) q\n"
            f"left join {names('items')} k on k.item_key = q.{ITEM_KEY}\n"
            f"left join {names('results')} r on r.request_key = k.request_key "
            "and r.state = 'accepted'"
        )

    def item_key_sql(self) -> str:
        """Return the SQL that computes a row's item key from its input columns."""
        return item_key_sql(self._context.dialect, self._spec_version, list(self.inputs.items()))

    def _target_columns(self, target: str) -> str:
        """Return SQL for this SELECT's columns in the target, NULL for those it has not got yet."""
        fold = str.casefold if self._is_duckdb else str
        columns = self._context.source.describe(f"select * from {target}")
        there = {fold(column.name) for column in columns}
        if STATUS_COLUMN not in there:
            raise DataError(
                f"{self._declaration.subject}: the table {target} has no column {STATUS_COLUMN}, "
                "so batchsql did not build it and cannot merge into it; run dbt with --full-refresh"
            )
        return ", ".join(
            self._quote(name) if fold(name) in there else f"null as {self._quote(name)}"
            for name in (column.name for column in self.columns)
        )

    # --- what is new, what is wanted ----------------------------------------------------------

    def stream_new(self, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows that no request is known for.

        Columns: the item key as text, the prompt's inputs, the unique key's columns as text.
        """
        inputs = "".join(
            f", {sql.value} as i{number}" for number, sql in enumerate(self.inputs.values())
        )
        keys = "".join(
            f", {self._quote(key)}::{self._text} as k{number}"
            for number, key in enumerate(self.unique_key)
        )
        return self._context.source.stream(
            f"select {ITEM_KEY}::{self._text} as item_key{inputs}{keys} from {self.name} "
            f"where {REQUEST_KEY} is null",
            batch_rows,
        )

    def stream_wanted(self, batch_rows: int, *, is_engine: bool) -> Iterator[pa.RecordBatch]:
        """Yield the requests without an answer, equal beginnings side by side.

        Columns: the request key as text, and whether any of its rows is urgent.
        """
        return self._context.source.stream(self._wanted_sql(is_engine=is_engine), batch_rows)

    def _wanted_sql(self, *, is_engine: bool) -> str:
        urgent = self._urgent_sql()
        # Names of our own only, since the sort keys name the user's columns without a prefix.
        items = (
            f"(select item_key as __batchsql_item, request_key as __batchsql_request "
            f"from {self._context.ledger.relation('items')})"
        )

        def wanted(more: str = "") -> str:
            return (
                f"select coalesce({REQUEST_KEY}, __batchsql_request)::{self._text} "
                f"as __batchsql_wanted, {urgent} as __batchsql_urgent{more} "
                f"from {self.name} left join {items} k "
                f"on {REQUEST_KEY} is null and __batchsql_item = {ITEM_KEY} "
                f"where {OUTPUT} is null group by 1"
            )

        texts = [sql.key_text for sql in self.inputs.values()]
        starts = [f"min(left({each}, 200))" for each in texts]
        if not is_engine:
            return f"{wanted()} order by {', '.join(starts)}, 1"
        # An engine keeps the beginning that neighbours share, and works best on texts of about one
        # length. The keys are hashes: what is alike in both comes shuffled. A few of the longest go
        # first, since it is these that do not fit into its memory.
        length = f"max({' + '.join(f'coalesce(length({each}), 0)' for each in texts)})"
        parts = [*starts[:-1], f"floor(ln(greatest({length}, 1)) / ln(2))"]
        columns = "".join(f", {each} as o{number}" for number, each in enumerate(parts))
        names = ", ".join(f"o{number}" for number in range(len(parts)))
        return (
            "select __batchsql_wanted, __batchsql_urgent from (select *, row_number() over "
            f"(order by size desc, __batchsql_wanted) as place from "
            f"({wanted(f', {length} as size{columns}')}) w) w "
            f"order by case when place <= {LONGEST_FIRST} then 0 else 1 end, {names}, "
            "__batchsql_wanted"
        )

    # --- what came of it ----------------------------------------------------------------------

    def count_by_status(self) -> dict[str, int]:
        """Return how many rows are ``ok``, ``pending`` and ``failed`` by now, and ``unrecorded``
        where no request was recorded for a row.
        """
        if self.is_answered:
            return {"ok": self.rows}
        counted = self._context.source.fetch(
            f"select {STATUS_COLUMN}, count(*) from (\n{self._resolved_sql()}\n) b group by 1"
        )
        return {status: int(rows) for status, rows in counted}

    def _resolved_sql(self) -> str:
        """Select the rows, each with the request and the answer it has by now."""
        names = self._context.ledger.relation
        columns = "".join(f"c.{self._quote(column.name)}, " for column in self.columns)
        if self.is_answered:
            return (
                f"select {columns}c.{REQUEST_KEY}, c.{OUTPUT}, 'ok' as {STATUS_COLUMN} "
                f"from {self.name} c"
            )
        key = f"coalesce(c.{REQUEST_KEY}, k.request_key)"
        return (
            f"select {columns}{key} as {REQUEST_KEY}, coalesce(c.{OUTPUT}, r.output) as {OUTPUT}, "
            f"case when coalesce(c.{OUTPUT}, r.output) is not null then 'ok' "
            f"when {key} is null then 'unrecorded' "
            f"when d.request_key is not null then 'failed' else 'pending' end as {STATUS_COLUMN} "
            f"from {self.name} c "
            f"left join {names('items')} k "
            f"on c.{REQUEST_KEY} is null and k.item_key = c.{ITEM_KEY} "
            f"left join {names('results')} r on c.{OUTPUT} is null and r.request_key = {key} "
            "and r.state = 'accepted' "
            f"left join {names('dead_letters')} d on c.{OUTPUT} is null and d.request_key = {key}"
        )

    def build_sql(self) -> str:
        """Return the SELECT of the finished table: the model's columns, the answers, the status."""
        return self._table_sql(
            self._resolved_sql(), f"b.{OUTPUT}", f"b.{STATUS_COLUMN}",
            f"replace(b.{REQUEST_KEY}::{self._text}, '-', '')",
        )  # fmt: skip

    def empty_sql(self, select_sql: str) -> str:
        """Return the SELECT of the table for ``--empty``: nothing is asked, nothing recorded."""
        no_answer = f"cast(null as {self._context.warehouse.json_type})"
        no_request = f"cast(null as {self._text})"
        return self._table_sql(select_sql, no_answer, "'pending'", no_request)

    def _table_sql(self, rows: str, answer: str, status: str, request: str) -> str:
        columns = [f"b.{self._quote(column.name)}" for column in self.columns]
        # Two outputs never differ only in case, so the YAML file may write them in any.
        types = {name.casefold(): kind for name, kind in self._context.column_types.items()}
        for output in self._declaration.returns.visible:
            value = self._context.dialect.answer_sql(
                answer, output.name, output.kind, types.get(output.name.casefold())
            )
            columns.append(f"{value} as {self._quote(output.name)}")
        columns.append(f"cast({status} as {self._text}) as {STATUS_COLUMN}")
        columns.append(f"cast({request} as {self._text}) as {REQUEST_COLUMN}")
        listed = ",\n  ".join(columns)
        return f"select\n  {listed}\nfrom (\n{rows}\n) b"
