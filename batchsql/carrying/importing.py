"""Merge an export into a ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchsql.carrying.manifest import (
    MANIFEST,
    TABLES,
    CarriedFile,
    CarriedTable,
    CarryingError,
    Manifest,
    OnRows,
    column_types,
    read_manifest,
)
from batchsql.warehouse.adopting import NOBODY_SQL, claim_members, has_shard
from batchsql.warehouse.ledger import Ledger
from batchsql.warehouse.shards import IN_BATCH_STATES

# Of writing: what keeps a request from being paid for again comes first.
_IMPORT_ORDER = (
    "specs",
    "results",
    "requests",
    "shards",
    "attempts",
    "items",
    "runs",
    "completions",
)


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import added, by table. ``open_batches`` are at a provider, with ``in_batches``."""

    rows: Mapping[str, int]
    open_batches: int
    in_batches: int


def import_ledger(
    ledger: Ledger, folder: Path, *, on_rows: OnRows = lambda table, done, total: None
) -> Imported:
    """Merge an export into a ledger, which is made if it is not there.

    What the ledger has already stays as it is, so an import can be repeated, and goes on after a
    death. Each file is one transaction. Batches that are still at a provider become this ledger's:
    their requests are claimed here and their answers collected here.

    Raises:
        CarryingError: the folder holds no export, or a damaged one.
        LedgerVersionError: a newer batchsql wrote the export or the ledger.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise CarryingError(
            f"{folder} holds no export of a ledger: there is no {MANIFEST} in it; give the folder "
            "that batchsql export wrote"
        )
    for table in manifest.tables.values():
        for file in table.files:
            _check_file(folder, file)
    ledger.migrate()
    counts: dict[str, int] = {}
    batches = in_batches = 0
    for name in _IMPORT_ORDER:
        files = manifest.tables.get(name, CarriedTable()).files
        before = _count(ledger, name)
        total, done = sum(file.rows for file in files), 0
        on_rows(name, 0, total)
        for file in files:
            _merge(ledger, name, pq.read_table(folder / file.name))
            done += file.rows
            on_rows(name, done, total)
        if name == "shards":
            batches, in_batches = _merge_open_batches(ledger, folder, manifest)
        counts[name] = _count(ledger, name) - before
    return Imported(counts, batches, in_batches)


def _check_file(folder: Path, file: CarriedFile) -> None:
    try:
        rows = pq.ParquetFile(folder / file.name).metadata.num_rows
    except (OSError, pa.ArrowException) as error:
        raise CarryingError(
            f"the export in {folder} is damaged: {file.name} cannot be read ({error})"
        ) from error
    if rows != file.rows:
        raise CarryingError(
            f"the export in {folder} is damaged: {file.name} has {rows:,} rows, {MANIFEST} says "
            f"{file.rows:,}"
        )


def _count(ledger: Ledger, table: str) -> int:
    return int(ledger.warehouse.fetch(ledger.sql(f"select count(*) from {{{table}}}"))[0][0])


def _merge(ledger: Ledger, name: str, rows: pa.Table) -> None:
    """Add the rows of a file that a table does not have yet, in one transaction."""
    carried = TABLES[name]
    with ledger.warehouse.migration_lock():  # two imports at a time would both add a try
        columns, select = _staged(ledger, name, rows, {})
        same = f"o.{carried.key} = n.{carried.key}"
        if name == "attempts":  # its index is by request, and its key is not unique by itself
            same = f"o.request_key = n.request_key and {same}"
        ledger.warehouse.insert_new(
            ledger.names[name],
            columns,
            f"select * from ({select}) n where {carried.taken} and not exists "
            f"(select 1 from {ledger.names[name]} o where {same})",
        )


def _staged(
    ledger: Ledger, name: str, rows: pa.Table, instead: Mapping[str, str]
) -> tuple[Sequence[str], str]:
    """Return the columns that rows and a table share, key first, and SQL that selects them.

    ``instead`` is SQL for the values of columns that are not taken over.
    """
    key = TABLES[name].key
    types = {
        column: kind
        for column, kind in column_types(ledger, name).items()
        if column in rows.column_names
    }
    columns = [key, *(column for column in types if column != key)]
    staged = ledger.warehouse.stage("carried", rows)
    values = ", ".join(
        ledger.sql(instead[column]) if column in instead else f"c.{column}::{types[column]}"
        for column in columns
    )
    named = ", ".join(columns)
    return columns, f"select {named} from (select {values} from {staged} c) n({named})"


def _merge_open_batches(ledger: Ledger, folder: Path, manifest: Manifest) -> tuple[int, int]:
    """Take over the batches that were at a provider, with their claims; count both."""
    batches = in_batches = 0
    tables = manifest.tables
    members = [folder / file.name for file in tables.get("members", CarriedTable()).files]
    for file in tables.get("shards", CarriedTable()).files:
        shards = pq.read_table(folder / file.name)
        for number, shard in enumerate(shards.select(["shard_id", "state", "epoch"]).to_pylist()):
            if f"'{shard['state']}'" not in IN_BATCH_STATES:
                continue
            keys = [
                pq.read_table(
                    path, columns=["request_key"], filters=[("shard_id", "=", shard["shard_id"])]
                )
                for path in members
            ]
            if not any(each.num_rows for each in keys):
                continue
            count = _merge_open_batch(
                ledger, shard["shard_id"], int(shard["epoch"]), shards.slice(number, 1),
                pa.concat_tables(keys).column(0).combine_chunks(),
            )  # fmt: skip
            batches += bool(count)
            in_batches += count
    return batches, in_batches


def _merge_open_batch(
    ledger: Ledger, shard_id: str, epoch: int, shard: pa.Table, request_keys: pa.Array
) -> int:
    """Take one batch over in one transaction; return how many requests it claims here."""
    warehouse = ledger.warehouse
    with warehouse.migration_lock():
        if has_shard(ledger, shard_id):
            return 0
        count = claim_members(ledger, shard_id, request_keys, epoch)
        if not count:  # all is answered here already
            return 0
        instead = {**NOBODY_SQL, "requests": f"c.ok + c.failed + {count}"}
        columns, select = _staged(ledger, "shards", shard, instead)
        warehouse.insert_new(ledger.names["shards"], columns, select)
    return count
