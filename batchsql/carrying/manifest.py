"""What an export is: its tables, its files, and the manifest that names them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import orjson
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from batchsql.errors import BatchsqlError, LedgerVersionError
from batchsql.version import __version__
from batchsql.warehouse.ledger import Ledger
from batchsql.warehouse.shards import IN_BATCH_STATES
from batchsql.warehouse.tables import LEDGER_VERSION

MANIFEST = "manifest.json"
_FILE_NAME = r"[a-z]+\.\d{5,}\.\d{4,}\.parquet"
OURS = re.compile(rf"({_FILE_NAME}|manifest\.json)(\.tmp)?")

OnRows = Callable[[str, int, int], None]
"""Told of a table, how many of its rows are done, and of how many."""


class CarryingError(BatchsqlError):
    """A folder cannot be exported to, or imported from."""


@dataclass(frozen=True, slots=True)
class Carried:
    """How a table is carried.

    ``grows_by`` is the column that says when a row of a table that only grows was written; a table
    without one is carried whole each time. ``taken`` says which rows an import takes.
    """

    key: str
    grows_by: str | None = None
    taken: str = "true"


# In the order of reading: of a batch that is collected meanwhile, the export holds the results.
TABLES: Mapping[str, Carried] = {
    "members": Carried("request_key"),
    "shards": Carried(
        "shard_id",
        taken=f"n.state not in ('running', 'planned') and n.state not in {IN_BATCH_STATES}",
    ),
    "results": Carried("request_key", "created_at"),
    "attempts": Carried("attempt_id", "recorded_at"),
    "items": Carried("item_key", "first_seen_at"),
    "requests": Carried("request_key", "created_at"),
    "runs": Carried("run_id", taken="n.state <> 'running'"),
    "completions": Carried("enrichment"),
    "specs": Carried("spec_version"),
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class CarriedFile(_Strict):
    name: str = Field(pattern=f"^{_FILE_NAME}$")
    rows: int = Field(ge=0)


class CarriedTable(_Strict):
    up_to: AwareDatetime | None = None
    files: list[CarriedFile] = []


class Source(_Strict):
    """Which ledger was exported: never two into one folder."""

    warehouse: str
    ledger_schema: str
    created_at: AwareDatetime


class Manifest(_Strict):
    format: Literal[1] = 1
    ledger_version: int
    batchsql_version: str = __version__
    source: Source
    exports: int = 0
    tables: dict[str, CarriedTable] = {}


def read_manifest(folder: Path) -> Manifest | None:
    """Return what a folder holds, or None where that is nothing."""
    file = folder / MANIFEST
    if not file.is_file():
        strange = [each.name for each in listed(folder) if not OURS.fullmatch(each.name)]
        if strange:
            raise CarryingError(
                f"{folder} holds {min(strange)} but no {MANIFEST}, so it is no export of a ledger; "
                "for an import give the folder that batchsql export wrote, for an export a new or "
                "an empty one"
            )
        return None
    try:
        document = orjson.loads(file.read_bytes())
        version = document["ledger_version"]
        if isinstance(version, int) and version > LEDGER_VERSION:
            raise LedgerVersionError(
                f"the export in {folder} is of a ledger of version {version}, written by batchsql "
                f"{document.get('batchsql_version')}; this one ({__version__}) knows version "
                f"{LEDGER_VERSION}. Upgrade batchsql here"
            )
        return Manifest.model_validate(document)
    except (orjson.JSONDecodeError, KeyError, TypeError, ValidationError) as error:
        raise CarryingError(f"{file} is not the manifest of an export: {error}") from error


def listed(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def publish(temporary: Path, name: str) -> None:
    """Give a finished file its name, once it is surely on the disk."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(temporary.with_name(name))


def column_types(ledger: Ledger, table: str) -> dict[str, str]:
    """Return a table's columns and their types; none where there is no such table."""
    warehouse = ledger.warehouse
    of_database = "and table_catalog = ?" if warehouse.dialect == "duckdb" else ""
    params = [ledger.schema, ledger.prefix + table]
    if of_database:
        params.append(warehouse.database)
    rows = warehouse.fetch(
        "select column_name::text, lower(data_type::text) from information_schema.columns "
        f"where table_schema = ? and table_name = ? {of_database} order by ordinal_position",
        params,
    )
    return {str(name): str(type_name) for name, type_name in rows}
