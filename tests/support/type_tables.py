"""The tables of docs/types.md as cases, so that the page cannot say what is not so."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from batchsql.declare.returns import ValueKind, parse_returns
from tests.support.project import ROOT

PAGE = ROOT / "docs" / "types.md"


@dataclass(frozen=True)
class TypeRow:
    """A type of a warehouse, a value of it in SQL, what it prints and which kind it is."""

    type_name: str
    sql: str
    printed: str
    kind: str

    @property
    def is_comparable(self) -> bool:
        """Whether ``=`` works on the type, so that NULLIF does."""
        return not self.sql.endswith(("::json", "::point")) and self.kind != "none"


@dataclass(frozen=True)
class ColumnTypeRow:
    """A fragment of JSON Schema, its kind, and the column type in each warehouse."""

    fragment: str
    kind: ValueKind
    types: Mapping[str, str]


def _table(heading: str) -> list[list[str]]:
    """Return the cells of the table under a heading, without its head."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines[2:]]
    return [[_plain(cell) for cell in row] for row in cells]


def _plain(cell: str) -> str:
    text = cell.strip().replace("\\|", "|")
    if text == "*nothing*":
        return ""
    fence = re.fullmatch(r"(`+) ?(.*?) ?\1", text)
    return fence[2] if fence else text


def type_rows(warehouse: str) -> list[TypeRow]:
    """Return the rows of "What a <warehouse> value looks like in a prompt"."""
    return [TypeRow(*row) for row in _table(f"What a {warehouse} value looks like in a prompt")]


def column_type_rows() -> list[ColumnTypeRow]:
    """Return the rows of "From JSON Schema to column types"."""
    rows = []
    for fragment, duckdb, postgres in _table("From JSON Schema to column types"):
        returns, mistakes = parse_returns({"f": yaml.safe_load(fragment)})
        assert mistakes == [], fragment
        kind = returns.fields[0].kind
        rows.append(ColumnTypeRow(fragment, kind, {"duckdb": duckdb, "postgres": postgres}))
    return rows
