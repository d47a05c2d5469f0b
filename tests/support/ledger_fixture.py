"""Ledgers of every version as text files: written once, and loaded where a test needs them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from batchsql.warehouse.duckdb import DuckDBWarehouse
from batchsql.warehouse.postgres import PostgresWarehouse
from batchsql.warehouse.tables import LedgerTables
from tests.support.project import ROOT, Project, Target
from tests.support.tables import literal

FOLDER = ROOT / "tests" / "golden"
PROJECT = FOLDER / "ledger_project"

# Each table with what its rows are ordered by. Item keys alone differ between the warehouses.
_SHARED = {
    "meta": "ledger_version",
    "specs": "spec_version",
    "requests": "request_key",
    "runs": "started_at",
    "shards": "created_at",
    "attempts": "request_key, attempt_number",
    "results": "request_key",
}
_BY_WAREHOUSE = {"items": "unique_key::integer"}

_LABELS = (
    "select id, llm_status, llm_request_id, topic, urgency, score, is_spam, "
    "cast(due as varchar) as due, cast(extract(epoch from seen) as bigint) as seen, "
    "cast(keywords as varchar) as keywords, cast(details as varchar) as details "
    "from {schema}.labels order by id"
)
_LABEL_NAMES = (
    "id", "llm_status", "llm_request_id", "topic", "urgency", "score", "is_spam", "due", "seen",
    "keywords", "details",
)  # fmt: skip


def fixture_folder(version: int) -> Path:
    """Return where the ledger that a version wrote is kept."""
    return FOLDER / f"ledger_v{version}"


def make_project(project: Project) -> None:
    """Put the project of all ledger fixtures in place, its source table included."""
    for name in (f"tables_{project.target.kind}.sql", "tickets.sql"):
        project.target.query(_read(PROJECT / name))
    project.write("prompts/label.md", _read(PROJECT / "prompt.md"))
    declaration = json.loads(_read(PROJECT / "declaration.json"))
    project.model("labels", "select * from {{ target.schema }}.tickets", llm=declaration)


def load_ledger(folder: Path, target: Target) -> None:
    """Make the ledger of a fixture in a target: the tables of its version, with its rows."""
    statements = [_read(folder / f"tables_{target.kind}.sql")]
    other = "postgres" if target.kind == "duckdb" else "duckdb"
    for file in sorted(folder.glob("*.jsonl")):
        if file.stem == "labels" or file.stem.endswith(f"_{other}"):
            continue
        table = file.stem.removesuffix(f"_{target.kind}")
        for row in read_rows(file):
            values = ", ".join(literal(value) for value in row.values())
            statements.append(
                f"insert into {{ledger}}.{table} ({', '.join(row)}) values ({values});"
            )
    target.query("\n".join(statements))


def read_labels(target: Target) -> list[dict[str, Any]]:
    """Return the rows of the built table, written alike for both warehouses."""
    rows = [dict(zip(_LABEL_NAMES, row, strict=True)) for row in target.query(_LABELS)]
    for row in rows:
        for name in ("keywords", "details"):
            row[name] = None if row[name] is None else json.loads(row[name])
    return rows


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file with a JSON object a line."""
    return [json.loads(line) for line in _read(file).split("\n") if line]


def write_fixture(folder: Path, duckdb: Project, postgres: Project) -> None:
    """Keep the ledgers that runs of the two projects wrote, with fixed times and random ids.

    The folder must not be there: what an older batchsql wrote cannot be written again.
    """
    shared, other = (_tables(each.target, _SHARED) for each in (duckdb, postgres))
    labels = read_labels(duckdb.target)
    # The warehouses ask and answer the same, or one set of files would not do for both.
    differing = [row for row in other["requests"] if row not in shared["requests"]]
    assert not differing, differing
    assert labels == read_labels(postgres.target)
    folder.mkdir()
    for table, rows in {**shared, "labels": labels}.items():
        _write_rows(folder / f"{table}.jsonl", rows)
    for target in (duckdb.target, postgres.target):
        for table, rows in _tables(target, _BY_WAREHOUSE).items():
            _write_rows(folder / f"{table}_{target.kind}.jsonl", rows)
        statements = "".join(f"{statement};\n" for statement in _ddl(target.kind))
        (folder / f"tables_{target.kind}.sql").write_text(statements, encoding="utf-8", newline="")


def _tables(target: Target, order: Mapping[str, str]) -> dict[str, list[dict[str, Any]]]:
    ids: dict[UUID, str] = {}
    found = {}
    for table, by in order.items():
        columns = [
            name
            for (name,) in target.query(
                "select column_name from information_schema.columns where "
                f"table_schema = '{{ledger}}' and table_name = '{table}' order by ordinal_position"
            )
        ]
        rows = target.query(f"select {', '.join(columns)} from {{ledger}}.{table} order by {by}")
        found[table] = [
            {name: _fixed(name, value, ids) for name, value in zip(columns, row, strict=True)}
            for row in rows
        ]
    return found


def _fixed(column: str, value: Any, ids: dict[UUID, str]) -> Any:
    """Return a value as JSON can hold it; what is drawn or read from a clock becomes fixed."""
    if column in ("run_id", "shard_id", "attempt_id") and value is not None:
        return ids.setdefault(UUID(str(value)), str(UUID(int=len(ids) + 1)))
    if column in ("owner", "invocation_id"):
        return "fixture"
    if isinstance(value, datetime):
        return "2026-01-01T00:00:00Z"
    return str(value) if isinstance(value, UUID) else value


class _Recorder:
    """A warehouse without tables that keeps the statements of a migration."""

    def __init__(self, kind: type[DuckDBWarehouse] | type[PostgresWarehouse]) -> None:
        self.dialect, self.clock, self.json_type = kind.dialect, kind.clock, kind.json_type
        self.database = "warehouse"
        self.statements: list[str] = []

    def execute(self, sql: str, params: Sequence[Any] = ()) -> None:
        if not sql.startswith("insert"):
            self.statements.append(sql.replace('"warehouse".', "").replace("\n        ", "\n"))

    def relation_exists(self, schema: str, name: str) -> bool:
        return False

    def create_schema(self, schema: str) -> None:
        self.statements.append(f'create schema "{schema}"')

    @contextmanager
    def migration_lock(self) -> Iterator[None]:
        yield


def _ddl(kind: str) -> list[str]:
    recorder = _Recorder(DuckDBWarehouse if kind == "duckdb" else PostgresWarehouse)
    LedgerTables(recorder, "{ledger}").migrate()  # type: ignore[arg-type]
    return recorder.statements


def _write_rows(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
    file.write_text("".join(lines), encoding="utf-8", newline="")


def _read(file: Path) -> str:
    with file.open(encoding="utf-8", newline="") as opened:
        return opened.read()
