"""Write what is new in a ledger as numbered files.

Each export adds its files, then its manifest replaces the last one: a death in between leaves the
folder as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from batchsql.carrying.manifest import (
    MANIFEST,
    OURS,
    TABLES,
    Carried,
    CarriedFile,
    CarriedTable,
    CarryingError,
    Manifest,
    OnRows,
    Source,
    column_types,
    listed,
    publish,
    read_manifest,
)
from batchsql.warehouse.base import quote
from batchsql.warehouse.ledger import Ledger
from batchsql.warehouse.shards import IN_BATCH_STATES

OVERLAP_SECONDS = 3600.0
"""How much is written once more by the next export: its transaction may have been open until now.

Nothing of batchsql's own keeps one open for longer than a flush.
"""

_FILE_ROWS = 100_000
_FILE_BYTES = 64 * 2**20  # of Arrow; an import holds one file in memory
_READ_ROWS = 10_000
_AS_TEXT = ("uuid", "json", "jsonb")


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote, by table. ``working`` shards were being worked on meanwhile."""

    rows: Mapping[str, int]
    is_first: bool
    working: int


def export_ledger(
    ledger: Ledger, folder: Path, *, since_seconds: float | None = None,
    on_rows: OnRows = lambda table, done, total: None,
) -> Exported:  # fmt: skip
    """Write what is new in a ledger since the last export into this folder, or all of it.

    Holds few rows in memory. Killed at any moment, the folder still holds the export before.

    Args:
        ledger: it is only read.
        folder: empty or new, or one with an export of the same ledger.
        since_seconds: leaves rows older than this out of a first export.
        on_rows: told how far it is.

    Raises:
        CarryingError: the folder holds something else.
        LedgerVersionError: a newer batchsql wrote the ledger or the folder.
    """
    version = ledger.check_version()
    before = read_manifest(folder)
    source, now = _identify(ledger)
    if before is None:
        since = None if since_seconds is None else now - timedelta(seconds=since_seconds)
        before = Manifest(ledger_version=version, source=source)
    elif before.source != source:
        raise CarryingError(
            f"{folder} holds an export of another ledger (schema {before.source.ledger_schema} on "
            f"{before.source.warehouse}, made {before.source.created_at:%Y-%m-%d %H:%M}); give "
            "each ledger a folder of its own"
        )
    else:
        since = None
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder, before)

    number = before.exports + 1
    working = _count_working(ledger)
    tables, counts = {}, {}
    for name, carried in TABLES.items():
        types = column_types(ledger, "claims" if name == "members" else name)
        if not types:  # an older ledger has fewer tables
            continue
        last = before.tables.get(name, CarriedTable())
        start = since if last.up_to is None else last.up_to - timedelta(seconds=OVERLAP_SECONDS)
        where = _where(name, carried, start)
        files = _write_table(ledger, name, types, where, folder, number, on_rows)
        counts[name] = sum(file.rows for file in files)
        kept = last.files if carried.grows_by else []
        tables[name] = CarriedTable(up_to=now if carried.grows_by else None, files=[*kept, *files])
    manifest = Manifest(ledger_version=version, source=source, exports=number, tables=tables)
    temporary = folder / f"{MANIFEST}.tmp"
    temporary.write_bytes(
        orjson.dumps(manifest.model_dump(mode="json"), option=orjson.OPT_INDENT_2)
    )
    publish(temporary, MANIFEST)
    _remove_leftovers(folder, manifest)
    return Exported(counts, is_first=number == 1, working=working)


def _identify(ledger: Ledger) -> tuple[Source, datetime]:
    """Return which ledger this is, and the time by its own clock."""
    (created, now), = ledger.warehouse.fetch(
        ledger.sql(
            "select extract(epoch from min(changed_at))::double precision, "
            "extract(epoch from {clock})::double precision from {meta}"
        )
    )  # fmt: skip
    source = Source(
        warehouse=ledger.warehouse.dialect,
        ledger_schema=ledger.schema,
        created_at=datetime.fromtimestamp(created, timezone.utc),
    )
    return source, datetime.fromtimestamp(now, timezone.utc)


def _count_working(ledger: Ledger) -> int:
    rows = ledger.warehouse.fetch(
        ledger.sql(
            "select count(*) from {shards} where state in ('running', 'planned') "
            "and lease_expires_at > {clock}"
        )
    )
    return int(rows[0][0])


def _remove_leftovers(folder: Path, manifest: Manifest) -> None:
    """Delete files of ours that no manifest names: of an export that died, or superseded."""
    named = {file.name for table in manifest.tables.values() for file in table.files}
    for path in listed(folder):
        if OURS.fullmatch(path.name) and path.name not in {MANIFEST, *named}:
            path.unlink()


def _where(name: str, carried: Carried, start: datetime | None) -> str:
    if name == "members":
        # Only those of batches: what a stream is working on is asked again when it dies.
        return (
            "where exists (select 1 from {shards} s where s.shard_id = t.shard_id "
            f"and s.state in {IN_BATCH_STATES})"
        )
    if carried.grows_by is None or start is None:
        return ""
    return f"where t.{carried.grows_by} >= to_timestamp({start.timestamp()!r})"


def _write_table(
    ledger: Ledger, name: str, types: Mapping[str, str], where: str, folder: Path, number: int,
    on_rows: OnRows,
) -> list[CarriedFile]:  # fmt: skip
    table = f"{{{'claims' if name == 'members' else name}}} t {where}"
    total = int(ledger.warehouse.fetch(ledger.sql(f"select count(*) from {table}"))[0][0])
    on_rows(name, 0, total)
    if not total:
        return []
    columns = ", ".join(
        f"t.{quote(column, ledger.warehouse.dialect)}"
        + ("::text" if kind in _AS_TEXT else "") + f" as {column}"
        for column, kind in types.items()
    )  # fmt: skip
    batches = ledger.warehouse.stream(ledger.sql(f"select {columns} from {table}"), _READ_ROWS)
    files: list[CarriedFile] = []
    done = 0
    for part in _parts(batches):
        file_name = f"{name}.{number:05d}.{len(files) + 1:04d}.parquet"
        temporary = folder / f"{file_name}.tmp"
        rows = 0
        with contextlib.ExitStack() as stack:
            writer: pq.ParquetWriter | None = None
            for batch in part:
                chunk = _portable(batch)
                if writer is None:
                    writer = stack.enter_context(
                        pq.ParquetWriter(temporary, chunk.schema, compression="zstd")
                    )
                writer.write_table(chunk)
                rows += chunk.num_rows
                on_rows(name, done + rows, max(total, done + rows))
        publish(temporary, file_name)
        files.append(CarriedFile(name=file_name, rows=rows))
        done += rows
    return files


def _parts(batches: Iterator[pa.RecordBatch]) -> Iterator[Iterator[pa.RecordBatch]]:
    """Split batches into files of a size that an import can hold in memory."""
    batches = (batch for batch in batches if batch.num_rows)

    def part(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        rows = size = 0
        following: pa.RecordBatch | None = batch
        while following is not None:
            yield following
            rows += following.num_rows
            size += following.nbytes
            if rows >= _FILE_ROWS or size >= _FILE_BYTES:
                return
            following = next(batches, None)

    for batch in batches:
        yield part(batch)


def _portable(batch: pa.RecordBatch) -> pa.Table:
    """Return rows with types that do not depend on where they come from."""
    fields = []
    for field in batch.schema:
        kind = field.type
        if pa.types.is_timestamp(kind):
            kind = pa.timestamp("us", tz="UTC")
        elif not (
            pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
        ):
            kind = pa.string()
        fields.append(pa.field(field.name, kind))
    return pa.Table.from_batches([batch]).cast(pa.schema(fields))
