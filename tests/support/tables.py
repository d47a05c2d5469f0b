"""Source tables of test projects, written as SQL that DuckDB and PostgreSQL read alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]


def rows_sql(rows: Rows) -> str:
    """Return a SELECT of literal rows; every row has the columns of the first one."""
    names = list(rows[0])
    values = ",\n".join(f"({', '.join(literal(row[name]) for name in names)})" for row in rows)
    columns = ", ".join(quoted(name) for name in names)
    # Raw, because dbt would render braces inside the rows.
    return f"{{% raw %}}select * from (values\n{values}\n) as source_rows({columns}){{% endraw %}}"


def tickets(count: int, start: int = 1, **more: Any) -> list[dict[str, Any]]:
    """Return tickets with the ids from ``start`` on, every body different."""
    return [{"id": n, "body": f"ticket {n}", **more} for n in range(start, start + count)]


def literal(value: Any) -> str:
    """Write a value as SQL; None is NULL."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return str(value)


def quoted(name: str) -> str:
    """Write an identifier in quotes."""
    return '"' + name.replace('"', '""') + '"'
