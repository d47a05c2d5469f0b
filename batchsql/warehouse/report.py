"""What people ask of a ledger, and the one thing they tell it: to try dead letters again."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

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
    """A shard that is not finished.

    A negative ``lease_seconds`` means that nobody works on it now: of a stream, that its owner is
    gone; of a batch, that the provider has it. ``window_seconds`` is the age at which the provider
    ends a batch, ``vanish_seconds`` how long its results can still be fetched.
    """

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
    provider_batch_id: str | None = None
    provider_state: str | None = None
    provider_ok: int | None = None
    provider_failed: int | None = None
    window_seconds: float | None = None
    vanish_seconds: float | None = None
    error: str | None = None

    @property
    def is_batch(self) -> bool:
        """Whether a provider has it, or may have it, as a batch."""
        return self.state in ("submitting", "submitted", "ended")


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


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A request whose budget is spent, how its last try ended, and the bytes of its messages."""

    request_key: str
    outcome: str
    text_bytes: int


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
        """Return the shards that are not finished, oldest first."""
        columns = (
            "shard_id::text, enrichment, backend, state, owner, requests, ok, failed, "
            "extract(epoch from {clock} - created_at)::double precision, "
            "extract(epoch from lease_expires_at - {clock})::double precision"
        )
        if self.tables.check_version() > 1:  # a ledger that is only looked at is not migrated
            columns += (
                ", provider_batch_id, provider_state, provider_ok, provider_failed, settings, "
                "extract(epoch from results_until - {clock})::double precision, error"
            )
        rows = self._warehouse.fetch(
            self.tables.sql(
                f"select {columns} from {{shards}} where state in ('running', 'planned', "
                "'submitting', 'submitted', 'ended') order by created_at, shard_id"
            )
        )
        return [_open_shard(row) for row in rows]

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

    def read_dead_letters(self, spec_version: str, outcome: str | None) -> list[DeadLetter]:
        """Return the dead letters of a spec, or those of one outcome, sorted by key."""
        size = {"duckdb": "strlen", "postgres": "octet_length"}[self._warehouse.dialect]
        rows = self._warehouse.fetch(
            self.tables.sql(
                "select replace(d.request_key::text, '-', ''), d.outcome, "
                f"{size}(q.messages) from {{dead_letters}} d join {{requests}} q "
                "on q.request_key = d.request_key where d.spec_version = ?::uuid"
                + ("" if outcome is None else " and d.outcome = ?")
                + " order by 1"
            ),
            [spec_version] if outcome is None else [spec_version, outcome],
        )
        return [DeadLetter(key, ended, int(size)) for key, ended, size in rows]

    def replay(self, run_id: str, spec_versions: Sequence[str] | None, outcome: str | None) -> int:
        """Give dead letters a new budget; the next run sends them. Returns how many."""
        conditions = []
        if spec_versions is not None:
            conditions.append(f"d.spec_version in ({_uuids(spec_versions)})")
        params: list[Any] = []
        if outcome is not None:
            conditions.append("d.outcome = ?")
            params.append(outcome)
        where = " where " + " and ".join(conditions) if conditions else ""
        with self._warehouse.transaction():
            return self._mark_replayed(run_id, where, params)

    def replay_listed(self, run_id: str) -> int:
        """Give the dead letters on a run's list a new budget, and take all else off the list.

        Returns how many there are.
        """
        with self._warehouse.transaction():
            self._warehouse.execute(
                self.tables.sql(
                    "delete from {todo} t where not exists "
                    "(select 1 from {dead_letters} d where d.request_key = t.request_key)"
                )
            )
            listed = " where d.request_key in (select request_key from {todo})"
            return self._mark_replayed(run_id, listed, [])

    def _mark_replayed(self, run_id: str, where: str, params: Sequence[Any]) -> int:
        before = self._warehouse.fetch(
            self.tables.sql("select count(*) from {dead_letters} d" + where), params
        )
        self._warehouse.execute(
            self.tables.sql(
                "insert into {attempts} (attempt_id, request_key, run_id, attempt_number, "
                "outcome, is_final, recorded_at) select "
                f"{NEW_UUID[self._warehouse.dialect]}, d.request_key, "
                "?::uuid, d.attempts + 1, 'replayed', false, {clock} from {dead_letters} d" + where
            ),
            [run_id, *params],
        )
        return int(before[0][0])

    def take_back_replay(self, run_id: str) -> int:
        """Make dead again what a run gave a new budget and nobody has tried since.

        Returns how many.
        """
        untried = (
            "request_key in (select a.request_key from {attempts} a where a.run_id = ?::uuid "
            "and a.outcome = 'replayed' "
            "and not exists (select 1 from {attempts} l where l.request_key = a.request_key "
            "and l.attempt_number > a.attempt_number) "
            "and not exists (select 1 from {claims} c where c.request_key = a.request_key) "
            "and not exists (select 1 from {results} r where r.request_key = a.request_key))"
        )
        mine = f" from {{attempts}} where run_id = ?::uuid and outcome = 'replayed' and {untried}"
        with self._warehouse.transaction():
            found = self._warehouse.fetch(
                self.tables.sql("select count(*)" + mine), [run_id, run_id]
            )
            self._warehouse.execute(self.tables.sql("delete" + mine), [run_id, run_id])
        return int(found[0][0])


def _open_shard(row: Sequence[Any]) -> OpenShardRow:
    if len(row) <= _SETTINGS:
        return OpenShardRow(*row)
    settings = orjson.loads(row[_SETTINGS]) if row[_SETTINGS] else {}
    window = settings.get("window_seconds")
    return OpenShardRow(*(*row[:_SETTINGS], window, *row[_SETTINGS + 1 :]))


_SETTINGS = 14  # their place among the columns of an open shard


def _uuids(values: Sequence[str]) -> str:
    """Return SQL for a list of uuids, which matches nothing when it is empty."""
    return ", ".join(f"'{uuid.UUID(value)}'::uuid" for value in values) or "null"
