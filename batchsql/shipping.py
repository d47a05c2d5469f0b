"""Send requests one by one to an engine or an endpoint, and write what comes back.

Claims, shards, leases, flushes, retries. Provider batches have a life of their own: see
``batches``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from threading import Event

from batchsql.backends.base import StreamBackend, figures_of
from batchsql.counting import ShipCounts, count_attempts
from batchsql.errors import BatchsqlError, ReconciliationError
from batchsql.figures import SOON_SECONDS, FigureLog
from batchsql.judging import Judge
from batchsql.progress import FEWEST_FOR_AN_ESTIMATE, PROGRESS_SECONDS, Progress, format_seconds
from batchsql.sizing import shard_size
from batchsql.types import Call, Completion, Outcome, Request, Route
from batchsql.warehouse.ledger import Ledger
from batchsql.warehouse.shards import Attempt, Claim, Shard, ShardOrder

Say = Callable[[str], None]

WAIT_SECONDS = 0.5
"""How often a run looks whether another one has answered what both want."""

FLUSH_ROWS = 100
ENGINE_FLUSH_ROWS = 1000

BACKOFF_SECONDS = 1.0
MAX_BACKOFF_SECONDS = 60.0
"""How long a run waits before it sends again what failed for no fault of its own."""

_IDLE_LOOKS = 20


class StoppedError(BatchsqlError):
    """The run was asked to stop. What was answered until then is kept."""


def flush_rows(declared: int | None, backend: StreamBackend) -> int:
    """Return after how many answers they are written: fewer where each of them is paid for."""
    if declared is not None:
        return declared
    return ENGINE_FLUSH_ROWS if backend.capabilities.is_engine else FLUSH_ROWS


@dataclass(frozen=True, slots=True)
class Pace:
    """How often what comes back is written, and how long a silent run keeps its claims."""

    subject: str
    flush_rows: int = FLUSH_ROWS
    flush_seconds: float = 5.0
    lease_seconds: float = 60.0


@dataclass
class SendLimit:
    """How much may still be taken on: None is no limit.

    ``left`` is how many requests may be sent for the first time, ``shards`` how many shards may be
    claimed. Once ``drain`` is set nothing more is taken on; what is under way comes to its end.
    """

    left: int | None
    shards: int | None = None
    drain: Event | None = None

    @property
    def is_reached(self) -> bool:
        """Whether nothing more may be taken on."""
        return self.left == 0 or self.shards == 0 or self.is_draining

    @property
    def is_draining(self) -> bool:
        """Whether only what is under way may come to its end."""
        return self.drain is not None and self.drain.is_set()

    def fit(self, size: int) -> int:
        """Return how many of ``size`` may be sent."""
        return size if self.left is None else min(size, self.left)

    def take(self, count: int) -> None:
        """Count requests that are sent for the first time."""
        if self.left is not None:
            self.left = max(0, self.left - count)

    def take_shard(self) -> None:
        """Count a shard that is claimed."""
        if self.shards is not None:
            self.shards -= 1


@dataclass
class _Pass:
    """What a pass over the wanted requests holds in memory: open claims and finished tries."""

    claims: dict[str, tuple[str, Claim]] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    finished: list[Attempt] = field(default_factory=list)
    began: dict[str, float] = field(default_factory=dict)
    fed_at: float | None = None
    first_at: float | None = None
    started_at: float = field(default_factory=time.monotonic)
    flushed_at: float = field(default_factory=time.monotonic)
    renewed_at: float = field(default_factory=time.monotonic)
    handled: int = 0
    others: int = 0


class Shipper:
    """Sends the requests in one lane of a run's list, until nothing more can be done.

    ``counts`` is right at any time, also after an error. With ``waits`` it stays until what others
    are sending has come to an end too, since it may have to be sent again. Once ``is_over`` is true
    no more shards are claimed.
    """

    def __init__(
        self,
        pace: Pace,
        ledger: Ledger,
        backend: StreamBackend,
        *,
        order: ShardOrder,
        call: Call,
        judge: Judge,
        limit: SendLimit,
        lane: Route | None,
        stop: Event,
        say: Say,
        warn: Say,
        waits: bool = True,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.counts = ShipCounts()
        self._pace = pace
        self._ledger = ledger
        self._stop = stop
        self._say = say
        self._warn = warn
        self._backend = backend
        self._order = order
        self._call = call
        self._judge = judge
        self._limit = limit
        self._lane = lane
        self._waits = waits
        self._is_over = is_over
        self._figures = FigureLog(lambda: figures_of(backend))
        self._failed_transiently = 0

    def ship(self) -> None:
        """Send what the lane holds, write the answers as they come.

        Raises:
            SystemicError: the backend refuses everything; what was answered before is kept.
            StoppedError: ``stop`` was set; what was answered before is kept.
        """
        ledger = self._ledger
        waiting_said = False
        idle = passes = 0
        while True:
            ledger.trim_todo()
            freed = ledger.free_lost_shards()
            if freed:
                self._say(f"took over {freed} shards of runs that ended without finishing them")
            wanted = ledger.count_wanted(lane=self._lane)
            if not wanted.free + wanted.elsewhere:
                return
            self._raise_if_stopped()
            if self._limit.is_reached:
                if self._limit.left == 0:
                    self._say(f"the limit is reached; {wanted.free:,} requests stay pending")
                return
            written_before = self.counts.tries
            if wanted.free:  # or an engine would be loaded only to wait
                if passes:
                    self._back_off(passes)
                self._ship_pass(wanted.free)
            if self.counts.tries > written_before:
                idle = 0
                passes += 1
                continue
            if not self._waits:
                return
            if wanted.elsewhere and not waiting_said:
                self._say(
                    f"waiting for {wanted.elsewhere:,} requests that another run is answering"
                )
                waiting_said = True
            idle = 0 if wanted.elsewhere else idle + 1
            if idle > _IDLE_LOOKS:
                raise ReconciliationError(
                    f"{self._pace.subject}: {wanted.free:,} requests are wanted, but cannot "
                    "be claimed though nobody claims them; run batchsql status and report this"
                )
            self._stop.wait(WAIT_SECONDS)

    def _back_off(self, passes: int) -> None:
        """Wait before what failed for no fault of its own is sent again, longer each time."""
        if self._failed_transiently:
            seconds = min(MAX_BACKOFF_SECONDS, BACKOFF_SECONDS * 2 ** (passes - 1))
            self._say(
                f"{self._failed_transiently:,} requests failed for no fault of their own; they are "
                f"sent again in {format_seconds(seconds)}"
            )
            self._stop.wait(seconds)
            self._raise_if_stopped()

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set():
            raise StoppedError(
                f"{self._pace.subject}: stopped; {self.counts.ok:,} answers are kept, "
                "the next run goes on from there"
            )

    def _ship_pass(self, wanted: int) -> None:
        """Send every wanted request at most once, in shards, through one unbroken stream."""
        state = _Pass()
        total = self._limit.fit(wanted)
        shown = time.monotonic()
        is_said = False
        self._failed_transiently = 0
        try:
            for completion in self._backend.complete(self._feed(state), self._call, self._stop):
                if completion is not None:
                    self._handle(completion, state)
                now = time.monotonic()
                self._keep(state, now)
                self._figures.look(now)
                if now - shown < PROGRESS_SECONDS:
                    continue
                shown = now
                if state.handled:
                    self._say(self._progress(state, total, now))
                elif not is_said and self._backend.capabilities.is_engine:
                    self._say("waiting for the first answer; the model may have to be loaded")
                    is_said = True
        finally:
            try:
                self._flush(state)
            finally:
                self._ledger.finish_shards(
                    state.epochs, self._order.owner, self._sum_up(state.epochs, state)
                )
        if state.handled:
            self._say(self._progress(state, total, time.monotonic()))
        self._raise_if_stopped()

    @staticmethod
    def _progress(state: _Pass, total: int, now: float) -> str:
        # Once it can be told, the time that an engine takes to start is left out.
        since = state.started_at if state.handled < FEWEST_FOR_AN_ESTIMATE else state.first_at
        whole = None if state.others else total
        return str(Progress(state.handled, whole, now - (since or now)))

    def _feed(self, state: _Pass) -> Iterator[Request]:
        """Claim shard after shard, each when the one before has been taken whole."""
        position = 0
        while not (self._stop.is_set() or self._limit.is_reached or self._is_over()):
            if self._backend.capabilities.is_engine and self._ledger.free_lost_shards():
                # What a worker that is gone had claimed may lie before what was claimed here last.
                self._ledger.trim_todo()
                position = 0
            shard, last = self._ledger.claim(
                self._order,
                after=position,
                size=self._limit.fit(self._shard_size(state)),
                lane=self._lane,
            )
            if last == position:
                return
            position = last
            if shard is not None:
                state.fed_at = state.fed_at or time.monotonic()
                self._limit.take(sum(claim.attempt_number == 0 for claim in shard.claims))
                self._limit.take_shard()
                state.epochs[shard.shard_id] = shard.epoch
                state.began[shard.shard_id] = time.monotonic()
                yield from self._feed_shard(shard, state)

    def _shard_size(self, state: _Pass) -> int:
        abilities = self._backend.capabilities
        if not abilities.is_engine:  # what an endpoint answers is written at once, in any shard
            return abilities.shard_requests
        now = time.monotonic()
        self._figures.look(now, SOON_SECONDS)
        free, state.others = self._ledger.count_share(self._order.spec_version, self._order.owner)
        return shard_size(
            abilities.shard_requests, abilities.slots,
            handled=state.handled, seconds=now - (state.fed_at or now),
            free=free, others=state.others,
        )  # fmt: skip

    def _feed_shard(self, shard: Shard, state: _Pass) -> Iterator[Request]:
        for claim in shard.claims:
            state.claims[claim.request.request_key] = (shard.shard_id, claim)
        for claim in shard.claims:
            # Taken over by another run meanwhile, or what is not under way yet is given back.
            if shard.shard_id not in state.epochs or self._limit.is_draining:
                return
            yield claim.request

    def _handle(self, completion: Completion, state: _Pass) -> None:
        taken = state.claims.pop(completion.request_key, None)
        if taken is None:  # of a shard that was lost
            return
        shard_id, claim = taken
        state.handled += 1
        state.first_at = state.first_at or time.monotonic()
        state.finished.append(self._judge.attempt(completion, shard_id, claim))

    def _keep(self, state: _Pass, now: float) -> None:
        """Flush by count or time, and renew the leases in good time."""
        pace = self._pace
        due = now - state.flushed_at >= pace.flush_seconds
        if len(state.finished) >= pace.flush_rows or (due and state.finished):
            self._flush(state)
        if now - state.renewed_at >= pace.lease_seconds / 4:
            lost = self._ledger.renew(state.epochs, self._order.owner, pace.lease_seconds)
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
            lost = self._ledger.flush(
                attempts, state.epochs, self._order.run_id, self._order.owner,
                self._sum_up(done, state),
            )  # fmt: skip
        except Exception:
            state.finished = attempts  # tried once more before the run ends
            raise
        written = [attempt for attempt in attempts if attempt.shard_id not in lost]
        self._drop(lost, state)
        for shard_id in done:
            state.epochs.pop(shard_id, None)
        self._failed_transiently += sum(
            attempt.outcome is Outcome.TRANSIENT and not attempt.is_final for attempt in written
        )
        self.counts += count_attempts(written)

    def _sum_up(self, shards: Iterable[str], state: _Pass) -> dict[str, str | None]:
        """Return how the engine did while it worked on each of these shards."""
        now = time.monotonic()
        return {shard_id: self._figures.sum_up(state.began[shard_id], now) for shard_id in shards}

    def _drop(self, lost: set[str], state: _Pass) -> None:
        """Forget shards that another run took over; their answers are that run's to give."""
        if not lost:
            return
        self._warn(
            f"{len(lost)} shards were taken over by another run: this one was silent for longer "
            f"than its lease of {self._pace.lease_seconds:g} s"
        )
        for shard_id in lost:
            state.epochs.pop(shard_id, None)
        state.claims = {key: taken for key, taken in state.claims.items() if taken[0] not in lost}
        state.finished = [a for a in state.finished if a.shard_id not in lost]
