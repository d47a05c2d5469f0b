"""Send what is wanted and write what comes back: claims, shards, leases, flushes, retries."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from batchsql.backends.base import StreamBackend
from batchsql.context import RunContext
from batchsql.declare.spec import Declaration
from batchsql.errors import BatchsqlError, ReconciliationError
from batchsql.progress import PROGRESS_SECONDS, Progress
from batchsql.types import Call, Completion, Outcome, Request
from batchsql.validate.structure import AnswerValidator
from batchsql.warehouse.ledger import Attempt, Claim, Shard, process_id

MAX_TRANSIENT_FAILURES = 10
"""A request whose every try fails for no fault of its own ends somewhere too."""

WAIT_SECONDS = 0.5
"""How often a run looks whether another one has answered what both want."""

_IDLE_LOOKS = 20


class StoppedError(BatchsqlError):
    """The run was asked to stop. What was answered until then is kept."""


@dataclass(frozen=True, slots=True)
class ShipCounts:
    """What was sent and what came of it. ``tries`` counts what is written in the ledger."""

    tries: int = 0
    ok: int = 0
    given_up: int = 0
    borrowed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0


@dataclass
class _Pass:
    """What a pass over the wanted requests holds in memory: open claims and finished tries."""

    claims: dict[str, tuple[str, Claim]] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    finished: list[Attempt] = field(default_factory=list)
    flushed_at: float = field(default_factory=time.monotonic)
    renewed_at: float = field(default_factory=time.monotonic)
    handled: int = 0


class Shipper:
    """Sends the requests on a run's list in the ledger, until nothing more can be done.

    ``counts`` is right at any time, also after an error.
    """

    def __init__(
        self,
        declaration: Declaration,
        context: RunContext,
        backend: StreamBackend,
        *,
        run_id: str,
        spec_version: str,
    ) -> None:
        self.counts = ShipCounts()
        self._declaration = declaration
        self._context = context
        self._backend = backend
        self._run_id = run_id
        self._spec_version = spec_version
        self._owner = f"{process_id()}:{run_id}"
        self._validator = AnswerValidator(declaration.returns)
        self._first_tries = 0

    def ship(self) -> None:
        """Send what is wanted, write the answers as they come, until nothing more can be done.

        Raises:
            SystemicError: the backend refuses everything; what was answered before is kept.
            StoppedError: ``stop`` was set; what was answered before is kept.
        """
        context = self._context
        self._borrow()
        waiting_said = False
        idle = 0
        while left := context.ledger.trim_todo():
            self._raise_if_stopped()
            freed = context.ledger.free_lost_shards()
            if freed:
                context.info(f"took over {freed} shards of runs that ended without finishing them")
            if self._limit_left() == 0:
                context.info(
                    f"limit {self._declaration.limit} reached; {left:,} requests stay pending"
                )
                return
            elsewhere = context.ledger.count_claimed_elsewhere()
            written_before = self.counts.tries
            if elsewhere < left:  # or an engine would be loaded only to wait
                self._ship_pass(left)
            if self.counts.tries > written_before:
                idle = 0
                continue
            if elsewhere and not waiting_said:
                context.info(f"waiting for {elsewhere:,} requests that another run is answering")
                waiting_said = True
            idle = 0 if elsewhere else idle + 1
            if idle > _IDLE_LOOKS:
                raise ReconciliationError(
                    f"{self._declaration.subject}: {left:,} requests are wanted, but can neither "
                    "be claimed nor are claimed elsewhere; run batchsql status and report this"
                )
            context.stop.wait(WAIT_SECONDS)

    def _borrow(self) -> None:
        borrowed = 0
        for name in self._declaration.read_from:
            borrowed += self._context.ledger.borrow(self._context.open_ledger(name), self._run_id)
        if borrowed:
            self._context.info(
                f"{borrowed:,} answers copied from {', '.join(self._declaration.read_from)}"
            )
        self.counts = replace(self.counts, borrowed=borrowed)

    def _raise_if_stopped(self) -> None:
        if self._context.stop.is_set():
            raise StoppedError(
                f"{self._declaration.subject}: stopped; {self.counts.ok:,} answers are kept, "
                "the next run goes on from there"
            )

    def _limit_left(self) -> int | None:
        limit = self._declaration.limit
        return None if limit is None else max(0, limit - self._first_tries)

    def _ship_pass(self, wanted: int) -> None:
        """Send every wanted request at most once, in shards, through one unbroken stream."""
        declaration = self._declaration
        context = self._context
        call = Call(
            model=declaration.model,
            params=declaration.params,
            schema=declaration.returns.object_schema(),
            max_tokens=declaration.max_tokens,
        )
        state = _Pass()
        limit = self._limit_left()
        total = wanted if limit is None else min(wanted, limit)
        started = shown = time.monotonic()
        try:
            for completion in self._backend.complete(self._feed(state), call, context.stop):
                if completion is not None:
                    self._handle(completion, state)
                now = time.monotonic()
                self._keep(state, now)
                if now - shown >= PROGRESS_SECONDS:
                    context.info(str(Progress(state.handled, total, now - started)))
                    shown = now
        finally:
            try:
                self._flush(state)
            finally:
                context.ledger.finish_shards(state.epochs, self._owner)
        if state.handled:
            context.info(str(Progress(state.handled, total, time.monotonic() - started)))
        self._raise_if_stopped()

    def _feed(self, state: _Pass) -> Iterator[Request]:
        """Claim shard after shard, each when the one before has been taken whole."""
        position = 0
        size = self._backend.capabilities.shard_requests
        while not self._context.stop.is_set():
            limit = self._limit_left()
            if limit == 0:
                return
            shard, last = self._context.ledger.claim(
                after=position,
                size=size if limit is None else min(size, limit),
                run_id=self._run_id,
                owner=self._owner,
                enrichment=self._context.enrichment,
                spec_version=self._spec_version,
                backend=self._declaration.model.provider,
                model=str(self._declaration.model),
                lease_seconds=self._declaration.lease_seconds,
            )
            if last == position:
                return
            position = last
            if shard is not None:
                self._first_tries += sum(claim.attempt_number == 0 for claim in shard.claims)
                state.epochs[shard.shard_id] = shard.epoch
                yield from self._feed_shard(shard, state)

    @staticmethod
    def _feed_shard(shard: Shard, state: _Pass) -> Iterator[Request]:
        for claim in shard.claims:
            state.claims[claim.request.request_key] = (shard.shard_id, claim)
        for claim in shard.claims:
            if shard.shard_id not in state.epochs:  # taken over by another run meanwhile
                return
            yield claim.request

    def _handle(self, completion: Completion, state: _Pass) -> None:
        taken = state.claims.pop(completion.request_key, None)
        if taken is None:  # of a shard that was lost
            return
        shard_id, claim = taken
        verdict = self._validator.check(completion)
        outcome = verdict.outcome
        state.handled += 1
        state.finished.append(
            Attempt(
                shard_id=shard_id,
                request_key=completion.request_key,
                attempt_number=claim.attempt_number + 1,
                outcome=outcome,
                is_final=self._is_final(outcome, claim),
                answer=verdict.answer,
                checksum=_checksum(verdict.answer),
                error=verdict.error,
                raw_output=verdict.raw,
                finish_reason=completion.finish_reason.value if completion.finish_reason else None,
                usage=completion.usage,
                model_reported=completion.model_reported,
                engine_version=self._backend.version,
                started_at=completion.started_at,
                finished_at=completion.finished_at,
            )
        )

    def _is_final(self, outcome: Outcome, claim: Claim) -> bool:
        """Whether this try was the last that the request's budget allows."""
        if outcome is Outcome.OK:
            return False
        if outcome is Outcome.TRANSIENT:
            return claim.transient_failures + 1 >= MAX_TRANSIENT_FAILURES
        return not outcome.is_retryable or claim.item_failures + 1 >= self._declaration.max_attempts

    def _keep(self, state: _Pass, now: float) -> None:
        """Flush by count or time, and renew the leases in good time."""
        declaration = self._declaration
        due = now - state.flushed_at >= declaration.flush_seconds
        if len(state.finished) >= declaration.flush_rows or (due and state.finished):
            self._flush(state)
        if now - state.renewed_at >= declaration.lease_seconds / 4:
            lost = self._context.ledger.renew(state.epochs, self._owner, declaration.lease_seconds)
            self._drop(lost, state)
            state.renewed_at = now

    def _flush(self, state: _Pass) -> None:
        attempts = state.finished
        state.flushed_at = time.monotonic()
        if not attempts:
            return
        # Closed as soon as their last try is written, so that only open ones have leases to renew.
        unfinished = {shard_id for shard_id, _ in state.claims.values()}
        done = {attempt.shard_id for attempt in attempts} - unfinished
        state.finished = []
        try:
            lost = self._context.ledger.flush(
                attempts, state.epochs, self._run_id, self._owner, done
            )
        except Exception:
            state.finished = attempts  # tried once more before the run ends
            raise
        written = [attempt for attempt in attempts if attempt.shard_id not in lost]
        self._drop(lost, state)
        for shard_id in done:
            state.epochs.pop(shard_id, None)
        usage = [attempt.usage for attempt in written]
        counts = self.counts
        self.counts = replace(
            counts,
            tries=counts.tries + len(written),
            ok=counts.ok + sum(attempt.outcome is Outcome.OK for attempt in written),
            given_up=counts.given_up + sum(attempt.is_final for attempt in written),
            input_tokens=counts.input_tokens + sum(u.input_tokens for u in usage),
            output_tokens=counts.output_tokens + sum(u.output_tokens for u in usage),
            cached_tokens=counts.cached_tokens + sum(u.cached_tokens for u in usage),
        )

    def _drop(self, lost: set[str], state: _Pass) -> None:
        """Forget shards that another run took over; their answers are that run's to give."""
        if not lost:
            return
        self._context.warn(
            f"{len(lost)} shards were taken over by another run: this one was silent for longer "
            f"than its lease of {self._declaration.lease_seconds:g} s"
        )
        for shard_id in lost:
            state.epochs.pop(shard_id, None)
        state.claims = {key: taken for key, taken in state.claims.items() if taken[0] not in lost}
        state.finished = [a for a in state.finished if a.shard_id not in lost]


def _checksum(answer: str | None) -> str | None:
    return None if answer is None else hashlib.sha256(answer.encode()).hexdigest()[:32]
