"""Who sends what: claims, the shards that hold them, their leases, and what comes of them.

A claim decides who pays for a request. A shard is a number of claims under one lease. Taking a
shard over raises its epoch, and whoever writes for a shard locks its row and checks owner and
epoch in the same transaction, so a stale owner writes nothing.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import orjson
import pyarrow as pa

from batchsql.types import Message, Outcome, Request, Role, Route, Usage
from batchsql.warehouse.tables import LedgerTables, braced

_PROCESS_NONCE = uuid.uuid4().hex


def process_id() -> str:
    """Return this process as the owner of leases.

    A forked child has its parent's memory but is another process, so the id is made of both.
    """
    return f"{_PROCESS_NONCE}-{os.getpid()}"


class ShardState(str, Enum):
    """Where a shard is.

    Streams: running → finished. Batches: planned → submitting → submitted → ended → collected, or
    expired or cancelled where the provider gave only part; failed where it refused the whole.
    Either kind: abandoned, when its work was taken back before anything was sent for it.
    """

    RUNNING = "running"
    FINISHED = "finished"
    PLANNED = "planned"
    SUBMITTING = "submitting"
    SUBMITTED = "submitted"
    ENDED = "ended"
    COLLECTED = "collected"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    FAILED = "failed"
    ABANDONED = "abandoned"

    @property
    def is_open(self) -> bool:
        """Whether requests are claimed by a shard in this state."""
        return self in _OPEN_STATES


_OPEN_STATES = (
    ShardState.RUNNING,
    ShardState.PLANNED,
    ShardState.SUBMITTING,
    ShardState.SUBMITTED,
    ShardState.ENDED,
)
IN_BATCH_STATES = "('submitting', 'submitted', 'ended')"
"""SQL for the states in which a provider has, or may have, the requests of a shard."""


@dataclass(frozen=True, slots=True)
class ShardOrder:
    """What a new shard is: who works on it, for what, and how its requests travel."""

    run_id: str
    owner: str
    enrichment: str
    spec_version: str
    backend: str
    model: str
    lease_seconds: float
    route: Route | None = None
    route_reason: str | None = None
    settings: str | None = None
    deadline_seconds: float | None = None
    worker: str | None = None


@dataclass(slots=True)
class Tries:
    """The tries that a request already had: the last one's number, and the failures by kind.

    ``is_dead`` is whether the last one was final, so that only an answer changes anything.
    """

    attempt_number: int
    item_failures: int
    transient_failures: int
    is_dead: bool = field(default=False, kw_only=True)


@dataclass(slots=True)
class Claim(Tries):
    """A request that this run alone may send now, and the tries it already had."""

    request: Request


@dataclass(frozen=True, slots=True)
class Shard:
    """Requests claimed together under one lease."""

    shard_id: str
    epoch: int
    claims: tuple[Claim, ...]


@dataclass(slots=True)
class Attempt:
    """One finished try, ready to be written. ``answer`` is set when its outcome is ok."""

    shard_id: str
    request_key: str
    attempt_number: int
    outcome: Outcome
    is_final: bool
    answer: str | None = None
    checksum: str | None = None
    error: str | None = None
    raw_output: str | None = None
    finish_reason: str | None = None
    usage: Usage = field(default_factory=Usage)
    cost_usd: float | None = None
    model_reported: str | None = None
    engine_version: str | None = None
    started_at: Any = None
    finished_at: Any = None
    route: Route | None = None


class ShardLedger(LedgerTables):
    """What a run reads and writes to send requests: claims, shards, attempts, results."""

    def free_lost_shards(self) -> int:
        """Take back the work of owners that are gone: raise the epoch, free the claims.

        A shard is lost when its lease has run out or, where one process owns the warehouse, at once
        when its owner is another process. Returns the number of shards freed.
        """
        warehouse = self.warehouse
        if warehouse.has_foreign_writers:
            lost, skip = "lease_expires_at < {clock}", " for update skip locked"
            params = []
        else:
            lost, skip = "(lease_expires_at < {clock} or owner not like ?)", ""
            params = [f"{process_id()}:%"]
        with warehouse.transaction():
            found = warehouse.fetch(
                self.sql(
                    "select shard_id::text from {shards} where state in ('running', 'planned') and "
                    f"{lost}{skip}"
                ),
                params,
            )
            for (shard_id,) in found:
                warehouse.execute(
                    self.sql(
                        "update {shards} set state = 'abandoned', epoch = epoch + 1, "
                        "finished_at = {clock} where shard_id = ?::uuid"
                    ),
                    [shard_id],
                )
                warehouse.execute(
                    self.sql("delete from {claims} where shard_id = ?::uuid"), [shard_id]
                )
        return len(found)

    def claim(
        self, order: ShardOrder, *, after: int, size: int, lane: Route | None = None
    ) -> tuple[Shard | None, int]:
        """Claim the next wanted requests for a new shard of this run, and read them.

        Looks at the positions after ``after``, of ``lane`` if that is given. The claims decide who
        sends: two runs that want the same request both ask, and one gets it.

        Returns:
            The shard, or None when all of the window was answered or claimed elsewhere; and the
            last position looked at, or ``after`` itself when no wanted request is left behind it.
        """
        shard_id = str(uuid.uuid4())
        with self.warehouse.transaction():
            last = self._window_end(after, size, lane)
            if last is None:
                return None, after
            count = self._claim_window(order, shard_id, ShardState.RUNNING, after, last, lane)
            claims = self._read_claims(shard_id) if count else ()
        return (Shard(shard_id, 1, claims) if claims else None), last

    def _window_end(self, after: int, size: int, lane: Route | None) -> int | None:
        rows = self.warehouse.fetch(
            self.sql(
                "select max(position) from (select position from {todo} where position > ? "
                f"{_of_lane(lane)} order by position limit ?) w"
            ),
            [after, size],
        )
        return None if rows[0][0] is None else int(rows[0][0])

    def _claim_window(
        self, order: ShardOrder, shard_id: str, state: ShardState, after: int, last: int,
        lane: Route | None,
    ) -> int:  # fmt: skip
        """Claim what is free between two positions for a new shard; return how many it got.

        Since a claim goes when its request has an outcome, what was claimed is looked at once more,
        by a statement that sees all that committed before.
        """
        warehouse = self.warehouse
        warehouse.insert_new(
            self.names["claims"],
            ("request_key", "shard_id", "epoch", "claimed_at"),
            # Materialized, or DuckDB hashes all results to look up the few of a window.
            self.sql(
                "with t as materialized (select request_key from {todo} where "
                f"position > {int(after)} and position <= {int(last)} {_of_lane(lane)}) "
                f"select t.request_key, '{shard_id}'::uuid as shard_id, 1 as epoch, "
                f"{{clock}} as claimed_at from t where {OPEN_REQUEST}"
            ),
        )
        if warehouse.has_foreign_writers:
            warehouse.execute(
                self.sql(
                    f"delete from {{claims}} t where t.shard_id = ?::uuid and not ({OPEN_REQUEST})"
                ),
                [shard_id],
            )
        count = self._count_claims(shard_id)
        if not count:
            return 0
        deadline = "null"
        if order.deadline_seconds is not None:
            deadline = f"{{clock}} + interval '{float(order.deadline_seconds)} seconds'"
        warehouse.execute(
            self.sql(
                "insert into {shards} (shard_id, run_id, enrichment, spec_version, backend, model, "
                "state, owner, epoch, lease_expires_at, requests, ok, failed, created_at, route, "
                "route_reason, settings, worker, deadline_at) "
                "values (?::uuid, ?::uuid, ?, ?::uuid, ?, ?, "
                f"?, ?, 1, {{clock}} + interval '{float(order.lease_seconds)} seconds', {count}, "
                f"0, 0, {{clock}}, ?, ?, ?, ?, {deadline})"
            ),
            [
                shard_id, order.run_id, order.enrichment, order.spec_version, order.backend,
                order.model, state.value, order.owner,
                order.route.value if order.route else None, order.route_reason, order.settings,
                order.worker,
            ],
        )  # fmt: skip
        return count

    def _count_claims(self, shard_id: str) -> int:
        rows = self.warehouse.fetch(
            self.sql("select count(*) from {claims} where shard_id = ?::uuid"), [shard_id]
        )
        return int(rows[0][0])

    def failures_sql(self, keys_sql: str) -> str:
        """Return SQL for the tries of some requests since they were last given a new budget.

        Columns: ``request_key``, ``last_number``, ``failures`` (those that count against the
        budget), ``transient_failures`` and ``is_dead``.

        Args:
            keys_sql: selects the request keys.
        """
        counted = "a.attempt_number > coalesce(a.replayed, -1)"
        return self.sql(
            "select a.request_key, max(a.attempt_number) as last_number, "
            f"sum(case when a.outcome in ({_ITEM_FAILURES}) and {counted} then 1 else 0 end) "
            "as failures, "
            f"sum(case when a.outcome = 'transient' and {counted} then 1 else 0 end) "
            "as transient_failures, max(case when a.is_final then a.attempt_number end) = "
            "max(a.attempt_number) as is_dead from "
            "(select a.request_key, a.attempt_number, a.outcome, a.is_final, "
            "max(case when a.outcome = 'replayed' then a.attempt_number end) over "
            "(partition by a.request_key) as replayed from {attempts} a where a.request_key in ("
            + keys_sql
            + ")) a group by a.request_key"
        )

    def claimed_sql(self, shard_id: str) -> str:
        """Return SQL for the keys that a shard claims, to be filled in by ``sql``."""
        return (
            f"select k.request_key from {{claims}} k where k.shard_id = '{uuid.UUID(shard_id)}'"
            "::uuid"
        )

    def _read_claims(self, shard_id: str) -> tuple[Claim, ...]:
        rows = self.warehouse.fetch(
            self.sql(
                "select c.request_key::text, q.messages, s.prefix, coalesce(h.last_number, 0), "
                "coalesce(h.failures, 0), coalesce(h.transient_failures, 0) "
                "from {claims} c join {requests} q on q.request_key = c.request_key "
                "join {specs} s on s.spec_version = q.spec_version "
                f"left join ({braced(self.failures_sql(self.claimed_sql(shard_id)))}) h "
                "on h.request_key = c.request_key "
                "join {todo} t on t.request_key = c.request_key "
                "where c.shard_id = ?::uuid order by t.position"
            ),
            [shard_id],
        )
        prefixes: dict[str, tuple[Message, ...]] = {}
        claims = []
        for key, messages, prefix, number, item_failures, transient_failures in rows:
            if prefix not in prefixes:
                prefixes[prefix] = parse_messages(prefix)
            request = Request(key.replace("-", ""), prefixes[prefix] + parse_messages(messages))
            claims.append(Claim(int(number), int(item_failures), int(transient_failures), request))
        return tuple(claims)

    def renew(self, shards: Mapping[str, int], owner: str, lease_seconds: float) -> set[str]:
        """Extend the leases of shards; return the ids of those that are not ours any more."""
        lost = set()
        with self.warehouse.transaction():
            for shard_id, epoch in sorted(shards.items()):
                kept = self._hold(shard_id, epoch, owner)
                if not kept:
                    lost.add(shard_id)
                    continue
                self.warehouse.execute(
                    self.sql(
                        "update {shards} set lease_expires_at = {clock} + "
                        f"interval '{float(lease_seconds)} seconds' where shard_id = ?::uuid"
                    ),
                    [shard_id],
                )
        return lost

    def _hold(self, shard_id: str, epoch: int, owner: str) -> bool:
        """Lock a shard's row for this transaction; return whether it is still ours."""
        lock = " for update" if self.warehouse.has_foreign_writers else ""
        return bool(
            self.warehouse.fetch(
                self.sql(
                    "select 1 from {shards} where shard_id = ?::uuid and epoch = ? and owner = ? "
                    f"and state in {_OPEN_SQL}{lock}"
                ),
                [shard_id, epoch, owner],
            )
        )

    def flush(
        self,
        attempts: Sequence[Attempt],
        epochs: Mapping[str, int],
        run_id: str,
        owner: str,
        done: Mapping[str, str | None] | None = None,
        copies: int = 0,
    ) -> set[str]:
        """Write finished tries, their answers, and free their claims, all in one transaction.

        Each shard's row is locked and its owner and epoch checked first; tries of a shard that was
        taken over are left out, since its new owner answers for them. Shards named in ``done`` have
        no try outstanding after these, and are closed, each with its engine's figures. ``copies``
        of the tries, all of one shard then, are of requests that it had freed to be asked elsewhere
        too, and counts again.

        Returns:
            The ids of the shards that are not ours any more.
        """
        warehouse = self.warehouse
        with warehouse.transaction():
            touched = sorted({attempt.shard_id for attempt in attempts})
            lost = {s for s in touched if not self._hold(s, epochs[s], owner)}
            kept = [attempt for attempt in attempts if attempt.shard_id not in lost]
            if kept:
                self._write_attempts(kept, run_id, copies)
            closed = done or {}
            for shard_id in sorted(set(closed) & set(touched) - lost):
                self._close_shard(shard_id, figures=closed[shard_id])
        return lost

    def _write_attempts(self, attempts: Sequence[Attempt], run_id: str, copies: int) -> None:
        warehouse = self.warehouse
        staged = warehouse.stage("attempts", _attempts_table(attempts))
        warehouse.execute(
            self.sql(
                "insert into {attempts} (attempt_id, request_key, shard_id, run_id, "
                "attempt_number, outcome, is_final, error, raw_output, finish_reason, "
                "input_tokens, output_tokens, cached_tokens, cache_write_tokens, "
                "reasoning_tokens, cost_usd, model_reported, engine_version, started_at, "
                "finished_at, route, copy_of, recorded_at) "
                "select attempt_id::uuid, request_key::uuid, shard_id::uuid, "
                "?::uuid, attempt_number, outcome, is_final, error, raw_output, finish_reason, "
                "input_tokens, output_tokens, cached_tokens, cache_write_tokens, "
                "reasoning_tokens, cost_usd, model_reported, engine_version, started_at, "
                # What is answered already was asked twice, which is paid for knowingly.
                "finished_at, route, (select r.attempt_id from {results} r where "
                f"r.request_key = a.request_key::uuid), {{clock}} from {staged} a"
            ),
            [run_id],
        )
        warehouse.insert_new(
            self.names["results"],
            ("request_key", "output", "checksum", "attempt_id", "state", "created_at"),
            f"select request_key::uuid as request_key, answer::{warehouse.json_type} as output, "
            "checksum, attempt_id::uuid as attempt_id, 'accepted' as state, "
            f"{warehouse.clock} as created_at from {staged} where answer is not null",
        )
        for shard_id in sorted({attempt.shard_id for attempt in attempts}):
            warehouse.execute(
                self.sql(
                    "delete from {claims} where shard_id = ?::uuid and request_key in "
                    f"(select request_key::uuid from {staged} where shard_id = ?)"
                ),
                [shard_id, shard_id],
            )
            mine = [a.outcome is Outcome.OK for a in attempts if a.shard_id == shard_id]
            warehouse.execute(
                self.sql(
                    "update {shards} set ok = ok + ?, failed = failed + ?, "
                    "requests = requests + ? where shard_id = ?::uuid"
                ),
                [mine.count(True), mine.count(False), copies, shard_id],
            )

    def finish_shards(
        self, epochs: Mapping[str, int], owner: str, figures: Mapping[str, str | None] | None = None
    ) -> None:
        """Close shards of this run, with their engine's figures, and free what they still claim."""
        with self.warehouse.transaction():
            for shard_id, epoch in sorted(epochs.items()):
                if self._hold(shard_id, epoch, owner):
                    self._close_shard(shard_id, figures=(figures or {}).get(shard_id))

    def _close_shard(
        self, shard_id: str, state: ShardState = ShardState.FINISHED, figures: str | None = None
    ) -> None:
        self.warehouse.execute(
            self.sql("delete from {claims} where shard_id = ?::uuid"), [shard_id]
        )
        self.warehouse.execute(
            self.sql(
                "update {shards} set state = ?, figures = ?, finished_at = {clock} "
                "where shard_id = ?::uuid"
            ),
            [state.value, figures, shard_id],
        )


_ROLES = {role.value: role for role in Role}

# A wanted request may be sent: it has no answer and its budget is not spent.
OPEN_REQUEST = (
    "not exists (select 1 from {results} r where r.request_key = t.request_key) and "
    "not exists (select 1 from {dead_letters} d where d.request_key = t.request_key)"
)
_OPEN_SQL = "(" + ", ".join(f"'{state.value}'" for state in _OPEN_STATES) + ")"
_ITEM_FAILURES = ", ".join(f"'{outcome.value}'" for outcome in Outcome if outcome.is_item_failure)


def _of_lane(lane: Route | None) -> str:
    return "" if lane is None else f"and lane = '{lane.value}'"


def parse_messages(text: str) -> tuple[Message, ...]:
    """Read messages as the ledger stores them: a JSON list of [role, text] pairs."""
    return tuple([Message(_ROLES[role], content) for role, content in orjson.loads(text)])


def _attempts_table(attempts: Sequence[Attempt]) -> pa.Table:
    stamp = pa.timestamp("us", tz="UTC")
    usages = [a.usage for a in attempts]
    columns: dict[str, tuple[list[Any], pa.DataType]] = {
        "attempt_id": (_random_uuids(len(attempts)), pa.string()),
        "request_key": ([a.request_key for a in attempts], pa.string()),
        "shard_id": ([a.shard_id for a in attempts], pa.string()),
        "attempt_number": ([a.attempt_number for a in attempts], pa.int32()),
        "outcome": ([a.outcome for a in attempts], pa.string()),
        "is_final": ([a.is_final for a in attempts], pa.bool_()),
        "answer": ([a.answer for a in attempts], pa.string()),
        "checksum": ([a.checksum for a in attempts], pa.string()),
        "error": ([a.error for a in attempts], pa.string()),
        "raw_output": ([a.raw_output for a in attempts], pa.string()),
        "finish_reason": ([a.finish_reason for a in attempts], pa.string()),
        "input_tokens": ([u.input_tokens for u in usages], pa.int64()),
        "output_tokens": ([u.output_tokens for u in usages], pa.int64()),
        "cached_tokens": ([u.cached_tokens for u in usages], pa.int64()),
        "cache_write_tokens": ([u.cache_write_tokens for u in usages], pa.int64()),
        "reasoning_tokens": ([u.reasoning_tokens for u in usages], pa.int64()),
        "cost_usd": ([a.cost_usd for a in attempts], pa.float64()),
        "model_reported": ([a.model_reported for a in attempts], pa.string()),
        "engine_version": ([a.engine_version for a in attempts], pa.string()),
        "started_at": ([a.started_at for a in attempts], stamp),
        "finished_at": ([a.finished_at for a in attempts], stamp),
        "route": ([a.route for a in attempts], pa.string()),
    }
    return pa.table({name: pa.array(values, kind) for name, (values, kind) in columns.items()})


def _random_uuids(count: int) -> list[str]:
    """Return ids like those of ``uuid4``, all at once: one by one takes eight times as long."""
    digits = os.urandom(16 * count).hex()
    return [
        f"{digits[at : at + 12]}4{digits[at + 13 : at + 16]}a{digits[at + 17 : at + 32]}"
        for at in range(0, len(digits), 32)
    ]
