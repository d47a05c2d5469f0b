"""What people ask of a ledger, and the one thing they tell it: to try dead letters again."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batchsql.warehouse.tables import NEW_UUID, LedgerTables


@dataclass(frozen=True, slots=True)
class EnrichmentRow:
    """An enrichment's last run, and its rows as far as a run has counted them."""

    enrichment: str
    spec_version: str
    model: str
    run_id: str
    state: str
    error: str | None
    started_at_epoch: float
    age_seconds: float
    rows: int | None
    ok: int | None
    pending: int | None
    failed: int | None


@dataclass(frozen=True, slots=True)
class OpenShardRow:
    """A shard that is not finished. A negative ``lease_seconds`` means that its owner is gone."""

    shard_id: str
    enrichment: str
    backend: str
    state: str
    owner: str
    requests: int
    ok: int
    failed: int
    age_seconds: float
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class DeadLetterCause:
    """Dead letters of one spec with the same outcome and error, and one of them as an example."""

    spec_version: str
    model: str
    outcome: str
    error: str | None
    requests: int
    request_key: str
    unique_key: str | None
    raw_output: str | None
    attempts: int


class LedgerReport:
    """Reads a ledger for people. Without tables there is nothing to read: ask ``exists`` first."""

    def __init__(self, tables: LedgerTables) -> None:
        self.tables = tables
        self._warehouse = tables.warehouse

    def read_enrichments(self) -> list[EnrichmentRow]:
        """Return each enrichment with its last run, sorted by name.

        The rows are those of the last run that got as far as counting them.
        """
        rows = self._warehouse.fetch(
            self.tables.sql(
                "with numbered as (select r.*, row_number() over "
                "(partition by enrichment order by started_at desc, run_id) as place, "
                "row_number() over (partition by enrichment, state in ('finished', 'planned') "
                "order by started_at desc, run_id) as good_place from {runs} r) "
                "select l.enrichment, l.spec_version::text, s.model, l.run_id::text, l.state, "
                "l.error, extract(epoch from l.started_at)::double precision, "
                "extract(epoch from {clock} - l.started_at)::double precision, "
                "g.total_rows, g.ok_rows, g.pending_rows, g.failed_rows from numbered l "
                "join {specs} s on s.spec_version = l.spec_version "
                "left join numbered g on g.enrichment = l.enrichment and g.good_place = 1 and "
                "g.state in ('finished', 'planned') where l.place = 1 order by l.enrichment"
            )
        )
        return [EnrichmentRow(*row) for row in rows]

    def read_open_shards(self) -> list[OpenShardRow]:
        """Return the shards that are being worked on or whose owner is gone, oldest first."""
        rows = self._warehouse.fetch(
            self.tables.sql(
                "select shard_id::text, enrichment, backend, state, owner, requests, ok, failed, "
                "extract(epoch from {clock} - created_at)::double precision, "
                "extract(epoch from lease_expires_at - {clock})::double precision "
                "from {shards} where state = 'running' order by created_at, shard_id"
            )
        )
        return [OpenShardRow(*row) for row in rows]

    def count_dead_letters(self, spec_versions: Sequence[str]) -> dict[str, int]:
        """Return how many requests of these specs are dead, by the outcome of their last try."""
        rows = self._warehouse.fetch(
            self.tables.sql(
                "select d.outcome, count(*) from {dead_letters} d "
                f"where d.spec_version in ({_uuids(spec_versions)}) group by 1 order by 2 desc, 1"
            )
        )
        return {str(outcome): int(count) for outcome, count in rows}

    def read_causes(self, spec_versions: Sequence[str], limit: int) -> list[DeadLetterCause]:
        """Return why requests of these specs are dead, the most frequent causes first.

        Each cause comes with one request as its example: always the same one while it is dead.
        """
        rows = self._warehouse.fetch(
            self.tables.sql(
                "with dead as (select d.*, s.model, count(*) over same as requests, row_number() "
                "over (same order by d.request_key) as place from {dead_letters} d join {specs} s "
                "on s.spec_version = d.spec_version "
                f"where d.spec_version in ({_uuids(spec_versions)}) "
                "window same as (partition by d.spec_version, d.outcome, d.error)) "
                "select d.spec_version::text, d.model, d.outcome, d.error, d.requests, "
                "replace(d.request_key::text, '-', ''), (select min(i.unique_key) from {items} i "
                "where i.request_key = d.request_key), d.raw_output, d.attempts from dead d "
                f"where d.place = 1 order by d.requests desc, d.outcome, d.error limit {int(limit)}"
            )
        )
        return [DeadLetterCause(*row) for row in rows]

    def replay(self, run_id: str, spec_versions: Sequence[str] | None, outcome: str | None) -> int:
        """Give dead letters a new budget; the next run sends them. Returns how many."""
        conditions = []
        if spec_versions is not None:
            conditions.append(f"d.spec_version in ({_uuids(spec_versions)})")
        params: list[Any] = [run_id]
        if outcome is not None:
            conditions.append("d.outcome = ?")
            params.append(outcome)
        where = " where " + " and ".join(conditions) if conditions else ""
        with self._warehouse.transaction():
            before = self._warehouse.fetch(
                self.tables.sql("select count(*) from {dead_letters} d" + where), params[1:]
            )
            self._warehouse.execute(
                self.tables.sql(
                    "insert into {attempts} (attempt_id, request_key, run_id, attempt_number, "
                    "outcome, is_final, recorded_at) select "
                    f"{NEW_UUID[self._warehouse.dialect]}, d.request_key, "
                    "?::uuid, d.attempts + 1, 'replayed', false, {clock} from {dead_letters} d"
                    + where
                ),
                params,
            )
        return int(before[0][0])


def _uuids(values: Sequence[str]) -> str:
    """Return SQL for a list of uuids, which matches nothing when it is empty."""
    return ", ".join(f"'{uuid.UUID(value)}'::uuid" for value in values) or "null"
