"""The part of the ledger that lets a shard live on at a provider between two runs.

Each move of a shard is one transaction, guarded by owner and epoch. Nobody owns a shard while its
batch is worked on at the provider: whoever looks after it takes its lease, moves it as far as it
goes, and leaves it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import orjson
import pyarrow as pa

from batchsql.errors import LeaseLostError
from batchsql.types import Request, Route
from batchsql.validate.structure import safe_text
from batchsql.warehouse.shards import (
    ShardLedger,
    ShardOrder,
    ShardState,
    Tries,
    parse_messages,
    process_id,
)
from batchsql.warehouse.tables import NEW_UUID, braced

_NOBODY = ""
_READ_ROWS = 2_000
_MAX_ERROR_CHARS = 2_000
_PAST_SECONDS = 86_400
_PAST_BATCHES = 50
_NEVER_THERE = "('planned', 'abandoned', 'failed')"
_KEY_HEX = "replace({}::text, '-', '')"


@dataclass(frozen=True, slots=True)
class BatchShard:
    """A shard of a provider batch as the ledger has it. Spans of seconds are by its clock."""

    shard_id: str
    epoch: int
    owner: str
    run_id: str
    enrichment: str
    spec_version: str
    model: str
    state: ShardState
    settings: Mapping[str, Any]
    requests: int
    account: str | None
    uploaded: str | None
    provider_batch_id: str | None
    provider_state: str | None
    provider_ok: int | None
    provider_failed: int | None
    end_state: ShardState | None
    error: str | None
    intent_at: float | None
    intent_expires_at: float | None
    age_seconds: float
    seconds_since_intent: float | None
    seconds_since_submission: float | None
    seconds_since_end: float | None
    seconds_to_deadline: float | None
    seconds_to_vanish: float | None
    copied: int | None
    is_cancel_requested: bool


def _storable(error: object) -> str | None:
    """Return a provider's words without what a database refuses to store."""
    return None if error is None else safe_text(str(error), _MAX_ERROR_CHARS)


_COLUMNS = (
    "shard_id::text, epoch, owner, run_id::text, enrichment, spec_version::text, model, state, "
    "settings, requests, account, uploaded, provider_batch_id, provider_state, provider_ok, "
    "provider_failed, end_state, error, "
    + ", ".join(
        f"extract(epoch from {each})::double precision"
        for each in (
            "intent_at",
            "intent_expires_at",
            "{clock} - created_at",
            "{clock} - intent_expires_at",
            "{clock} - submitted_at",
            "{clock} - ended_at",
            "deadline_at - {clock}",
            "results_until - {clock}",
        )
    )
    + ", copied, cancel_requested_at is not null"
)


def _batch_shard(row: Sequence[Any]) -> BatchShard:
    shard = BatchShard(*row)
    return replace(
        shard,
        state=ShardState(shard.state),
        settings=orjson.loads(row[8]) if row[8] else {},
        end_state=ShardState(row[16]) if row[16] else None,
        is_cancel_requested=bool(row[-1]),
    )


@dataclass(frozen=True, slots=True)
class PastBatch:
    """One batch of a model as it went: why the provider refused the whole of it, None where it did
    not, and whether no other of ours was there then.
    """

    requests: int
    fault: str | None
    was_alone: bool


class BatchShardLedger(ShardLedger):
    """What is read and written to bring shards through provider batches."""

    # --- planning -----------------------------------------------------------------------------

    def claim_batch(
        self,
        order: ShardOrder,
        *,
        after: int,
        size: int,
        max_bytes: int,
        overhead_bytes: int,
        lane: Route | None = None,
    ) -> tuple[BatchShard | None, int]:
        """Claim the next wanted requests for a batch, as many as fit; see ``ShardLedger.claim``.

        Args:
            order: what the shard is.
            after: the position to start behind.
            size: the most requests.
            max_bytes: the most bytes, counting each request's stored messages and
                ``overhead_bytes``.
            overhead_bytes: what else a request's line takes.
            lane: only requests of this lane.
        """
        shard_id = str(uuid.uuid4())
        with self.warehouse.transaction():
            last = self._batch_window_end(after, size, max_bytes, overhead_bytes, lane)
            if last is None:
                return None, after
            count = self._claim_window(order, shard_id, ShardState.PLANNED, after, last, lane)
            shard = self._read_shard(shard_id) if count else None
        return shard, last

    def _batch_window_end(
        self, after: int, size: int, max_bytes: int, overhead_bytes: int, lane: Route | None
    ) -> int | None:
        length = "strlen" if self.warehouse.dialect == "duckdb" else "octet_length"
        of_lane = "" if lane is None else f"and t.lane = '{lane.value}'"
        rows = self.warehouse.fetch(
            self.sql(
                "select coalesce(max(position) filter (where total <= ?), min(position)) from ("
                f"select position, sum({length}(messages) + ?) over (order by position) as total "
                "from (select t.position, q.messages from {todo} t join {requests} q "
                f"on q.request_key = t.request_key where t.position > ? {of_lane} "
                "order by t.position limit ?) w) s"
            ),
            [max_bytes, overhead_bytes, after, size],
        )
        return None if rows[0][0] is None else int(rows[0][0])

    def stream_requests(self, shard_id: str) -> Iterator[Request]:
        """Yield the requests that a shard claims, in no certain order, holding few in memory."""
        [(shared,)] = self.warehouse.fetch(
            self.sql(
                "select s.prefix from {shards} h join {specs} s on s.spec_version = h.spec_version "
                "where h.shard_id = ?::uuid"
            ),
            [shard_id],
        )
        prefix = parse_messages(shared)
        batches = self.warehouse.stream(
            self.sql(
                f"select {_KEY_HEX.format('c.request_key')}, q.messages from {{claims}} c "
                "join {requests} q on q.request_key = c.request_key "
                f"where c.shard_id = '{uuid.UUID(shard_id)}'::uuid"
            ),
            _READ_ROWS,
        )
        for batch in batches:
            keys, texts = (column.to_pylist() for column in batch.columns)
            for key, text in zip(keys, texts, strict=True):
                yield Request(key, prefix + parse_messages(text))

    def release(self, shard: BatchShard, request_keys: Sequence[str]) -> BatchShard:
        """Give back claims of a planned shard that do not fit; return it with its new count.

        Raises:
            LeaseLostError: the shard was taken over.
        """
        with self._held(shard):
            staged = self.warehouse.stage("released", pa.table({"key": list(request_keys)}))
            self.warehouse.execute(
                self.sql(
                    "delete from {claims} where shard_id = ?::uuid and request_key in "
                    f"(select key::uuid from {staged})"
                ),
                [shard.shard_id],
            )
            self.warehouse.execute(
                self.sql("update {shards} set requests = ?, failed = 0 where shard_id = ?::uuid"),
                [self._count_claims(shard.shard_id), shard.shard_id],
            )
            return self._read_shard(shard.shard_id)

    # --- moves --------------------------------------------------------------------------------

    def begin_submission(
        self, shard: BatchShard, account: str, uploaded: str | None, create_seconds: float
    ) -> BatchShard:
        """Commit the intent to create a batch: from now on there may be one at the provider."""
        return self._move(
            shard, ShardState.SUBMITTING,
            {"account": account, "uploaded": uploaded, "error": None},
            stamps={"intent_at": 0.0, "intent_expires_at": create_seconds},
        )  # fmt: skip

    def record_submission(
        self, shard: BatchShard, provider_batch_id: str, results_until: datetime | None
    ) -> BatchShard:
        """Record the batch that the provider confirmed, or that was found there."""
        return self._move(
            shard, ShardState.SUBMITTED,
            {"provider_batch_id": provider_batch_id, "error": None},
            times={"results_until": results_until}, stamps={"submitted_at": 0.0},
        )  # fmt: skip

    def record_status(
        self, shard: BatchShard, provider_state: str, ok: int | None, failed: int | None
    ) -> BatchShard:
        """Record what the provider says of a batch that is not over."""
        return self._move(
            shard, shard.state,
            {"provider_state": provider_state, "provider_ok": ok, "provider_failed": failed},
            stamps={"checked_at": 0.0},
        )  # fmt: skip

    def record_trouble(self, shard: BatchShard, error: str) -> BatchShard:
        """Record why a shard cannot move on now."""
        return self._move(shard, shard.state, {"error": error}, stamps={"checked_at": 0.0})

    def record_end(
        self, shard: BatchShard, provider_state: str, end_state: ShardState, error: str | None,
        results_until: datetime | None,
    ) -> BatchShard:  # fmt: skip
        """Record that a batch is over and has results to fetch.

        ``end_state`` is where the shard goes once they are.
        """
        return self._move(
            shard, ShardState.ENDED,
            {"provider_state": provider_state, "end_state": end_state.value, "error": error},
            times={"results_until": results_until},
            stamps={"checked_at": 0.0, "ended_at": 0.0},
        )  # fmt: skip

    def free_for_copies(self, shard: BatchShard, size: int) -> BatchShard:
        """Free claims of a batch whose end is not in sight, so that they can be asked online too.

        Each is marked in ``attempts``. What the batch still brings of them is recorded as well; the
        first good answer is kept. None is freed a second time, lest it be paid for ever again.
        """
        warehouse = self.warehouse
        with self._held(shard):
            warehouse.execute(
                self.sql(
                    "insert into {attempts} (attempt_id, request_key, shard_id, run_id, "
                    "attempt_number, outcome, is_final, route, recorded_at) select "
                    f"{NEW_UUID[warehouse.dialect]}, c.request_key, c.shard_id, ?::uuid, "
                    "coalesce((select max(a.attempt_number) from {attempts} a "
                    "where a.request_key = c.request_key), 0) + 1, 'copied', false, 'batch', "
                    "{clock} from {claims} c where c.shard_id = ?::uuid and not exists "
                    "(select 1 from {attempts} b where b.request_key = c.request_key "
                    "and b.outcome = 'copied') "
                    f"order by c.request_key limit {int(size)}"
                ),
                [shard.run_id, shard.shard_id],
            )
            warehouse.execute(
                self.sql(
                    "delete from {claims} where shard_id = ?::uuid and request_key in (select "
                    "request_key from {attempts} where shard_id = ?::uuid and outcome = 'copied')"
                ),
                [shard.shard_id, shard.shard_id],
            )
            left = self._count_claims(shard.shard_id)
            warehouse.execute(
                self.sql(
                    "update {shards} set copied = requests - ok - failed - ?, "
                    "requests = ok + failed + ? where shard_id = ?::uuid"
                ),
                [left, left, shard.shard_id],
            )
            return self._read_shard(shard.shard_id)

    def read_mean_bytes(self, shard_id: str) -> float:
        """Return the mean size of the messages that a shard claims, shared ones included."""
        length = "strlen" if self.warehouse.dialect == "duckdb" else "octet_length"
        rows = self.warehouse.fetch(
            self.sql(
                f"select coalesce(avg({length}(q.messages) + {length}(s.prefix)), 0)"
                "::double precision from {claims} c "
                "join {requests} q on q.request_key = c.request_key "
                "join {specs} s on s.spec_version = q.spec_version where c.shard_id = ?::uuid"
            ),
            [shard_id],
        )
        return float(rows[0][0])

    def record_cancel(self, shard: BatchShard) -> BatchShard:
        """Record that the provider was asked to cancel a batch."""
        return self._move(shard, shard.state, {}, stamps={"cancel_requested_at": 0.0})

    def close_batch(
        self,
        shard: BatchShard,
        state: ShardState,
        *,
        error: str | None = None,
        fault: str | None = None,
    ) -> BatchShard:
        """End a shard and free what it still claims.

        What has no try to be known by is kept until its deadline; see ``load_todo_of``. ``fault``
        says why the provider refused the whole of it; see ``read_past_batches``.
        """
        with self._held(shard):
            self.warehouse.execute(
                self.sql(
                    "update {shards} set error = coalesce(?, error), fault = ? "
                    "where shard_id = ?::uuid"
                ),
                [_storable(error), fault, shard.shard_id],
            )
            self._keep_for_deadline(shard.shard_id)
            self._close_shard(shard.shard_id, state)
            return self._read_shard(shard.shard_id)

    def _keep_for_deadline(self, shard_id: str) -> None:
        """List what a shard with a deadline claims under its enrichment, for ``load_todo_of``.

        It waits where requests wait for workers, but for the entry in ``queues`` that these look
        for; and like those, until the next run. Its position is its deadline, in seconds since
        1970.
        """
        self.warehouse.execute(
            self.sql(
                "insert into {queued} (enrichment, request_key, position, is_urgent) select "
                "s.enrichment, c.request_key, floor(extract(epoch from s.deadline_at))::bigint, "
                "true from {claims} c join {shards} s on s.shard_id = c.shard_id "
                "where c.shard_id = ?::uuid and s.deadline_at is not null and not exists "
                "(select 1 from {queues} q where q.enrichment = s.enrichment) and not exists "
                "(select 1 from {queued} k where k.enrichment = s.enrichment "
                "and k.request_key = c.request_key)"
            ),
            [shard_id],
        )

    def _move(
        self,
        shard: BatchShard,
        state: ShardState,
        values: Mapping[str, object],
        *,
        times: Mapping[str, datetime | None] | None = None,
        stamps: Mapping[str, float] | None = None,
    ) -> BatchShard:
        """Change a shard in one transaction.

        ``stamps`` are columns set to so many seconds from now, by the ledger's clock.

        Raises:
            LeaseLostError: it was taken over, so nothing may be written for it.
        """
        sets = ["state = ?"]
        params: list[object] = [state.value]
        for name, value in values.items():
            sets.append(f"{name} = ?")
            params.append(_storable(value) if name == "error" else value)
        for name, moment in (times or {}).items():
            if moment is not None:
                sets.append(f"{name} = to_timestamp({moment.timestamp()!r})")
        for name, seconds in (stamps or {}).items():
            sets.append(f"{name} = {{clock}} + interval '{float(seconds)} seconds'")
        with self._held(shard):
            self.warehouse.execute(
                self.sql(f"update {{shards}} set {', '.join(sets)} where shard_id = ?::uuid"),
                [*params, shard.shard_id],
            )
            return self._read_shard(shard.shard_id)

    # --- looking after them -------------------------------------------------------------------

    def read_open_batches(
        self, enrichments: Sequence[str] | None = None, *, or_wanted: bool = False
    ) -> list[BatchShard]:
        """Return the shards that a provider has, or may have, oldest first.

        Args:
            enrichments: only theirs.
            or_wanted: and those of others that hold requests on the run's list.
        """
        where, params = "", []
        if enrichments is not None:
            names = ", ".join("?" for _ in enrichments) or "null"
            where = f" and (enrichment in ({names})"
            if or_wanted:
                where += (
                    " or shard_id in (select c.shard_id from {claims} c "
                    "join {todo} t on t.request_key = c.request_key)"
                )
            where += ")"
            params += list(enrichments)
        rows = self.warehouse.fetch(
            self.sql(
                f"select {_COLUMNS} from {{shards}} "
                f"where state in ('submitting', 'submitted', 'ended'){where} "
                "order by created_at, shard_id"
            ),
            params,
        )
        return [_batch_shard(row) for row in rows]

    def read_overdue_batches(self, enrichments: Sequence[str] | None = None) -> list[BatchShard]:
        """Return batches that are over and had a deadline, newest first.

        No longer than two days after both.

        What they left, or what was refused or lost with them, is to be asked online.
        """
        where, params = "", []
        if enrichments is not None:
            where = f" and enrichment in ({', '.join('?' for _ in enrichments) or 'null'})"
            params = list(enrichments)
        rows = self.warehouse.fetch(
            self.sql(
                f"select {_COLUMNS} from {{shards}} where route = 'batch' and deadline_at is not "
                "null and greatest(finished_at, deadline_at) > {clock} - interval '2 days' "
                "and state in "
                f"('collected', 'expired', 'cancelled', 'failed', 'abandoned'){where} "
                "order by created_at desc"
            ),
            params,
        )
        return [_batch_shard(row) for row in rows]

    def attend(self, shard_id: str, owner: str, lease_seconds: float) -> BatchShard | None:
        """Take the lease of a batch's shard, with a new epoch.

        Returns None when somebody else looks after it now, or it is over.
        """
        warehouse = self.warehouse
        params: list[object] = [shard_id]
        if warehouse.has_foreign_writers:
            free, lock = "lease_expires_at < {clock}", " for update skip locked"
        else:  # one process owns the file, so other processes' owners are gone
            free, lock = "(lease_expires_at < {clock} or owner not like ?)", ""
            params.append(f"{process_id()}:%")
        with warehouse.transaction():
            found = warehouse.fetch(
                self.sql(
                    "select 1 from {shards} where shard_id = ?::uuid and state in "
                    f"('submitting', 'submitted', 'ended') and {free}{lock}"
                ),
                params,
            )
            if not found:
                return None
            warehouse.execute(
                self.sql(
                    "update {shards} set owner = ?, epoch = epoch + 1, lease_expires_at = {clock} "
                    f"+ interval '{float(lease_seconds)} seconds' where shard_id = ?::uuid"
                ),
                [owner, shard_id],
            )
            return self._read_shard(shard_id)

    def leave(self, shard: BatchShard) -> None:
        """Give up the lease of a shard, so that anybody may look after it next."""
        with self.warehouse.transaction():
            if self._hold(shard.shard_id, shard.epoch, shard.owner):
                self.warehouse.execute(
                    self.sql(
                        "update {shards} set owner = ?, lease_expires_at = {clock} - "
                        "interval '1 second' where shard_id = ?::uuid"
                    ),
                    [_NOBODY, shard.shard_id],
                )

    def read_copied(self, shard_id: str) -> dict[str, Tries]:
        """Return what a shard once claimed and freed to be asked online too, by request key."""
        return self._read_tries(
            f"select {_KEY_HEX.format('request_key')}, attempt_number, 0, 0, false "
            f"from {{attempts}} where shard_id = '{uuid.UUID(shard_id)}'::uuid "
            "and outcome = 'copied'"
        )

    def read_members(self, shard_id: str) -> dict[str, Tries]:
        """Return what a shard claims, by request key, with the tries it had."""
        return self._read_tries(
            f"select {_KEY_HEX.format('c.request_key')}, coalesce(h.last_number, 0), "
            "coalesce(h.failures, 0)::bigint, coalesce(h.transient_failures, 0)::bigint, "
            "coalesce(h.is_dead, false) from {claims} c "
            f"left join ({braced(self.failures_sql(self.claimed_sql(shard_id)))}) h "
            "on h.request_key = c.request_key "
            f"where c.shard_id = '{uuid.UUID(shard_id)}'::uuid"
        )

    def _read_tries(self, sql: str) -> dict[str, Tries]:
        found: dict[str, Tries] = {}
        # Nearly all requests had the same tries, most of them none, so those share one object.
        shared: dict[tuple[int, int, int, bool], Tries] = {}
        for batch in self.warehouse.stream(self.sql(sql), _READ_ROWS):
            keys, *counts = (column.to_pylist() for column in batch.columns)
            for key, numbers in zip(keys, zip(*counts, strict=True), strict=True):
                if (tries := shared.get(numbers)) is None:
                    tries = shared.setdefault(numbers, Tries(*numbers[:3], is_dead=numbers[3]))
                found[key] = tries
        return found

    def read_handled(self, shard_id: str) -> set[str]:
        """Return the request keys whose lines of a shard are recorded already."""
        batches = self.warehouse.stream(
            self.sql(
                f"select {_KEY_HEX.format('request_key')} from {{attempts}} where "
                f"shard_id = '{uuid.UUID(shard_id)}'::uuid and outcome <> 'copied'"
            ),
            _READ_ROWS,
        )
        return {key for batch in batches for key in batch.column(0).to_pylist()}

    def read_other_batches(self, shard: BatchShard) -> frozenset[str]:
        """Return the provider's batches that are known to be other shards'."""
        rows = self.warehouse.fetch(
            self.sql(
                "select provider_batch_id from {shards} where provider_batch_id is not null "
                "and shard_id <> ?::uuid and model = ?"
            ),
            [shard.shard_id, shard.model],
        )
        return frozenset(batch_id for (batch_id,) in rows)

    def read_unbalanced_batches(self, enrichment: str) -> list[str]:
        """Return the batches' shards whose requests are not all recorded or claimed: none."""
        rows = self.warehouse.fetch(
            self.sql(
                "select s.shard_id::text from {shards} s left join (select shard_id, count(*) as "
                "held from {claims} group by shard_id) c on c.shard_id = s.shard_id "
                "where s.enrichment = ? and s.route = 'batch' and s.state in ('submitting', "
                "'submitted', 'ended', 'collected', 'expired', 'cancelled') "
                "and s.requests <> s.ok + s.failed + coalesce(c.held, 0) order by 1"
            ),
            [enrichment],
        )
        return [shard_id for (shard_id,) in rows]

    def read_past_batches(self, model: str) -> list[PastBatch]:
        """Return what became of the newest batches of a model, the oldest of them first."""
        rows = self.warehouse.fetch(
            self.sql(
                "select s.requests, case when s.state = 'failed' then coalesce(s.fault, '') end, "
                "not exists (select 1 from {shards} o where o.model = s.model "
                "and o.route = 'batch' and o.shard_id <> s.shard_id "
                f"and o.state not in {_NEVER_THERE} "
                "and o.created_at <= coalesce(s.finished_at, {clock}) "
                "and coalesce(o.finished_at, {clock}) >= s.created_at) "
                "from {shards} s where s.model = ? and s.route = 'batch' "
                "and s.state not in ('planned', 'abandoned') "
                f"and s.created_at > {{clock}} - interval '{_PAST_SECONDS} seconds' "
                f"order by s.created_at desc limit {_PAST_BATCHES}"
            ),
            [model],
        )
        return [PastBatch(int(requests), fault, alone) for requests, fault, alone in reversed(rows)]

    def read_batch(self, shard_id: str) -> BatchShard:
        """Return a batch's shard as it is now."""
        return self._read_shard(shard_id)

    def _read_shard(self, shard_id: str) -> BatchShard:
        rows = self.warehouse.fetch(
            self.sql(f"select {_COLUMNS} from {{shards}} where shard_id = ?::uuid"), [shard_id]
        )
        return _batch_shard(rows[0])

    @contextmanager
    def _held(self, shard: BatchShard) -> Iterator[None]:
        """Run a block in a transaction in which the shard's row is locked and known to be ours."""
        with self.warehouse.transaction():
            if not self._hold(shard.shard_id, shard.epoch, shard.owner):
                raise LeaseLostError(shard.shard_id)
            yield
