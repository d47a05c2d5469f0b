"""A provider of batches that lives in virtual time and misbehaves as told.

What becomes of a batch is drawn when it is created; where it stands at a moment follows from that
and the moment alone. So nothing here depends on how often anybody looks.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from batchsql.backends.batch import (
    BatchFault,
    BatchGoneError,
    BatchLimits,
    BatchLine,
    BatchState,
    BatchStatus,
    CreatedBatch,
    Finding,
    ListedBatch,
    MaybeCreatedError,
    NotCreatedError,
    ProviderBusyError,
    ShardLabel,
    custom_id,
    is_of_shard,
    request_key_of,
)
from batchsql.errors import SystemicError
from batchsql.types import Call, Completion, FinishReason, Outcome, Request, Usage

HOUR = 3600.0
EPOCH = datetime(2026, 1, 1, tzinfo=timezone.utc)
CLOCKS_DIFFER = timedelta(minutes=5)

LIMITS = {
    "max_requests": 2,
    "max_bytes": 2_000,
    "window_seconds": 24 * HOUR,
    "retention_seconds": 4 * 24 * HOUR,
    "create_seconds": 60.0,
    "settle_seconds": 90.0,
}


class World(Protocol):
    """What the provider sees of the world around it."""

    rng: random.Random
    now: float

    def reach(self, point: str) -> None:
        """Let the world do what it will here: time passes, a process stops or dies."""
        ...

    def advance(self, seconds: float) -> None: ...

    def log(self, text: str) -> None: ...


@dataclass(frozen=True)
class Manners:
    """How a provider behaves, as chances between 0 and 1 but where said otherwise."""

    keeps_marks: bool = True
    keeps_partial: bool = True
    settles_late: bool = False
    forgets_old_batches: bool = False
    """Whether a batch itself is gone once its results are, rather than the results alone."""

    lost_reply: float = 0.0
    """How often the reply to a creation is lost, the batch created or not."""

    refused: float = 0.0
    refused_later: float = 0.0
    systemic: float = 0.0
    busy: float = 0.0
    unknown_at_first: float = 0.0
    never_ends: float = 0.0
    expires: float = 0.0
    cancel_hangs: float = 0.0
    bad_answer: float = 0.0
    failed_line: float = 0.0
    missing_line: float = 0.0
    cut_download: float = 0.0
    broken_download: float = 0.0
    repeated_line: float = 0.0
    foreign_line: float = 0.0


class Fate(str, Enum):
    """How a batch ends if nobody cancels it."""

    COMPLETES = "completes"
    EXPIRES = "expires"
    IS_REFUSED = "is refused"
    NEVER_ENDS = "never ends"


@dataclass
class Line:
    """One request of a batch and what is made of it.

    ``failure`` stands for an error line, which costs nothing. A line that ``is_missing`` is
    answered and billed, but never in the results.
    """

    custom_id: str
    answered_at: float
    text: str | None
    finish_reason: FinishReason | None = FinishReason.STOP
    failure: Outcome | None = None
    is_missing: bool = False

    @property
    def request_key(self) -> str:
        return request_key_of(self.custom_id)


@dataclass
class Batch:
    """A batch at the provider."""

    batch_id: str
    account: str
    shard_hex: str
    lines: list[Line]
    created_at: float
    known_at: float
    listed_at: float
    checked_at: float
    fate: Fate
    ends_at: float
    cancel_seconds: float
    fault: BatchFault | None = None
    cancelled_at: float = math.inf
    cuts: int = 0
    """How many more downloads of it end too early without a sign of it."""

    breaks: int = 0
    """How many more downloads of it break, which is seen."""

    extra: list[BatchLine] = field(default_factory=list)
    """Lines in the results that have no place there."""

    @property
    def final_at(self) -> float:
        """When it is over, as things stand."""
        if self.fate is Fate.IS_REFUSED:
            return self.checked_at
        return min(self.ends_at, self.cancelled_at + self.cancel_seconds)

    def is_final(self, now: float) -> bool:
        return now >= self.final_at

    def answered(self, now: float) -> list[Line]:
        """Return the lines that are worked off by now; the text of each of them is billed."""
        if self.fate is Fate.IS_REFUSED:
            return []
        return [line for line in self.lines if line.answered_at <= min(now, self.final_at)]

    def state(self, now: float) -> BatchState:
        """Return where it stands."""
        if not self.is_final(now):
            return BatchState.CANCELLING if now >= self.cancelled_at else BatchState.RUNNING
        if self.fate is Fate.IS_REFUSED:
            return BatchState.FAILED
        if self.cancelled_at + self.cancel_seconds <= self.ends_at:
            return BatchState.CANCELLED
        return BatchState.EXPIRED if self.fate is Fate.EXPIRES else BatchState.COMPLETED


class Provider:
    """All batches of a provider, under whatever account."""

    def __init__(self, world: World, manners: Manners) -> None:
        self.manners = manners
        self.batches: dict[str, Batch] = {}
        self.limits = BatchLimits(
            **LIMITS, keeps_partial=manners.keeps_partial, settles_late=manners.settles_late
        )  # type: ignore[arg-type]
        self._world = world

    def roll(self, chance: float) -> bool:
        # Nothing is drawn for what never happens, so that a trace is shorter.
        return chance > 0 and self._world.rng.random() < chance

    def create(self, account: str, shard: ShardLabel, lines: list[bytes], at: float) -> Batch:
        """Create a batch at a moment that may still be to come."""
        rng, manners, limits = self._world.rng, self.manners, self.limits
        batch_id = f"b{len(self.batches) + 1}"
        fate, fault = Fate.COMPLETES, None
        lasts = rng.choice((60.0, HOUR, 5 * HOUR, 23 * HOUR))
        if manners.settles_late and self.roll(manners.refused_later):
            fate = Fate.IS_REFUSED
            fault = rng.choice((BatchFault.QUEUE_FULL, BatchFault.SYSTEMIC, BatchFault.TRANSIENT))
        elif self.roll(manners.never_ends):
            fate, lasts = Fate.NEVER_ENDS, limits.window_seconds
        elif self.roll(manners.expires):
            fate, lasts = Fate.EXPIRES, 2 * limits.window_seconds
        ends_at = {Fate.EXPIRES: at + limits.window_seconds, Fate.NEVER_ENDS: math.inf}
        listed_at = at + rng.choice((0.0, 0.5, 0.95)) * limits.settle_seconds
        batch = Batch(
            batch_id=batch_id,
            account=account,
            shard_hex=shard.hex,
            lines=[self._line(line, batch_id, at, lasts) for line in lines],
            created_at=at,
            known_at=at + 400 * rng.random() if self.roll(manners.unknown_at_first) else at,
            listed_at=listed_at,
            checked_at=at + rng.choice((1.0, 20.0, 2 * HOUR)) if manners.settles_late else at,
            fate=fate,
            ends_at=ends_at.get(fate, at + lasts),
            cancel_seconds=math.inf
            if self.roll(manners.cancel_hangs)
            else rng.choice((0.0, 60.0, 3 * HOUR)),
            fault=fault,
            cuts=rng.choice((1, 2)) if self.roll(manners.cut_download) else 0,
            breaks=rng.choice((1, 3, 5)) if self.roll(manners.broken_download) else 0,
        )
        batch.extra = list(self._extra_lines(batch))
        self.batches[batch_id] = batch
        return batch

    def _line(self, encoded: bytes, batch_id: str, at: float, lasts: float) -> Line:
        rng, manners = self._world.rng, self.manners
        line = Line(
            json.loads(encoded)["custom_id"],
            at + lasts * rng.random(),
            json.dumps({"label": batch_id}),
        )
        if self.roll(manners.failed_line):
            line.text = line.finish_reason = None
            line.failure = rng.choice((Outcome.TRANSIENT, Outcome.REJECTED))
        elif self.roll(manners.bad_answer):
            line.text = '{"label": 7}'
            if rng.random() < 0.5:
                line.text, line.finish_reason = '{"lab', FinishReason.LENGTH
        elif self.roll(manners.missing_line):
            line.is_missing = True
        return line

    def _extra_lines(self, batch: Batch) -> Iterator[BatchLine]:
        """Yield lines that are not to be taken: repeated ones, and of a shard or person unknown."""
        for line in batch.lines:
            if not line.is_missing and self.roll(self.manners.repeated_line):
                text = json.dumps({"label": "repeated"})
                yield _result(line.custom_id, line.request_key, text, FinishReason.STOP, None)
            if self.roll(self.manners.foreign_line):
                text = json.dumps({"label": "foreign"})
                other = self._world.rng.choice(
                    ("row 1", custom_id("f" * 32, batch.shard_hex), "0" * 57)
                )
                yield _result(other, request_key_of(other), text, FinishReason.STOP, None)

    def knows(self, batch: Batch) -> bool:
        return self._world.now >= batch.known_at and not self.forgets(batch)

    def forgets(self, batch: Batch) -> bool:
        return self.manners.forgets_old_batches and self.has_deleted(batch)

    def has_deleted(self, batch: Batch) -> bool:
        """Return whether the results of a batch are deleted by now."""
        return self._world.now > batch.created_at + self.limits.retention_seconds


class FakeBatches:
    """The batch backend of one process: what it sees of the provider, and what goes wrong."""

    version = "fake batches 1"

    def __init__(self, world: World, provider: Provider, account: Callable[[], str]) -> None:
        self._world = world
        self._provider = provider
        self._account = account

    @property
    def limits(self) -> BatchLimits:
        return self._provider.limits

    @property
    def account(self) -> str:
        return self._account()

    def identity(self) -> Mapping[str, Any]:
        return {}

    def encoder(self, call: Call) -> Callable[[str, Request], bytes]:
        def encode(name: str, request: Request) -> bytes:
            said = [message.content for message in request.messages]
            return json.dumps({"custom_id": name, "messages": said}).encode()

        return encode

    def upload(self, shard: ShardLabel, lines: Path, call: Call) -> str | None:
        self._begin("upload")
        self._world.reach("uploaded")
        return "input"

    def create(
        self, shard: ShardLabel, lines: Path, uploaded: str | None, call: Call, must_end_by: float
    ) -> CreatedBatch:
        world, provider, rng = self._world, self._provider, self._world.rng
        world.reach("create")
        left = must_end_by - world.now
        if left < self.limits.create_seconds / 2:
            raise NotCreatedError(BatchFault.TRANSIENT, "there was no time left to create it")
        if provider.roll(provider.manners.refused):
            fault = rng.choice((BatchFault.TRANSIENT, BatchFault.QUEUE_FULL, BatchFault.TOO_LARGE))
            world.log(f"  creation refused: {fault.value}")
            raise NotCreatedError(fault, f"refused: {fault.value}")
        if provider.roll(provider.manners.systemic):
            world.log("  creation refused: systemic")
            raise SystemicError("the fake provider refuses everything")
        is_lost = provider.roll(provider.manners.lost_reply)
        takes = rng.choice((0.0, 0.3, 1.0)) * left * (1.0 if is_lost else 0.5)
        batch = None
        if not is_lost or rng.random() < 0.7:
            data = lines.read_bytes().splitlines()
            batch = provider.create(self.account, shard, data, world.now + takes)
            world.log(
                f"  {batch.batch_id} of shard {shard.hex[:6]} with {len(data)} lines: "
                f"{batch.fate.value}, created in {takes:.0f} s"
            )
        # The request is on its way: whoever dies now leaves behind a batch, maybe to come.
        world.reach("creating")
        if is_lost or world.now > must_end_by or batch is None:
            world.log("  the reply is lost")
            raise MaybeCreatedError("the reply was lost")
        world.advance(max(0.0, batch.created_at - world.now))
        world.reach("created")
        return CreatedBatch(batch.batch_id)

    def find(self, shard: ShardLabel) -> Finding:
        self._begin("find")
        finding = self._find(shard)
        self._world.log(f"  found for {shard.hex[:6]}: {finding}")
        self._world.reach("found")
        return finding

    def _find(self, shard: ShardLabel) -> Finding:
        now, marks = self._world.now, self._provider.manners.keeps_marks
        assert shard.created_after is not None
        assert shard.created_before is not None
        latest = shard.created_before + CLOCKS_DIFFER
        latest += timedelta(seconds=self._provider.limits.settle_seconds)
        undecided = []
        for batch in self._listed(shard.created_after - CLOCKS_DIFFER):
            if batch.batch_id in shard.not_ours:
                continue
            if marks:
                if batch.shard_hex == shard.hex:
                    return Finding(batch.batch_id)
                continue
            if moment(batch.created_at) > latest or len(batch.lines) != shard.requests:
                continue
            if not batch.is_final(now):
                undecided.append(batch.batch_id)
            elif not self._provider.has_deleted(batch) and any(
                is_of_shard(line.custom_id, shard.shard_id) for line in batch.lines
            ):
                return Finding(batch.batch_id)
        if undecided:
            return Finding(reason=f"{', '.join(undecided)} may be it")
        return Finding(is_sure=True)

    def _listed(self, since: datetime) -> Iterator[Batch]:
        for batch in reversed(self._provider.batches.values()):
            is_listed = batch.account == self.account and batch.listed_at <= self._world.now
            if (
                is_listed
                and not self._provider.forgets(batch)
                and moment(batch.created_at) >= since
            ):
                yield batch

    def poll(self, provider_batch_id: str) -> BatchStatus:
        self._begin("poll")
        status = self._status(self._get(provider_batch_id))
        self._world.log(f"  {provider_batch_id} is {status.state.value}")
        self._world.reach("polled")
        return status

    def _get(self, batch_id: str) -> Batch:
        batch = self._provider.batches[batch_id]
        if batch.account != self.account or not self._provider.knows(batch):
            self._world.log(f"  {batch_id} is not known")
            raise BatchGoneError(f"there is no batch {batch_id}")
        return batch

    def _status(self, batch: Batch) -> BatchStatus:
        now = self._world.now
        state = batch.state(now)
        done = len(batch.answered(now))
        until = moment(batch.created_at + self.limits.retention_seconds)
        return BatchStatus(
            state,
            state.value,
            total=len(batch.lines),
            ok=done,
            failed=0,
            fault=batch.fault if state is BatchState.FAILED else None,
            error="refused as a whole" if state is BatchState.FAILED else None,
            results_until=until if state.is_final else None,
            is_checked=now >= batch.checked_at,
        )

    def fetch(self, provider_batch_id: str, folder: Path, call: Call) -> Iterator[BatchLine]:
        self._begin("fetch")
        batch = self._get(provider_batch_id)
        assert batch.is_final(self._world.now), "results of a batch that is not over"
        if self._provider.has_deleted(batch):
            self._world.log(f"  the results of {provider_batch_id} are deleted")
            raise BatchGoneError("the results are deleted")
        lines = results(batch, self._provider.limits.keeps_partial)
        rng = self._world.rng
        ends = rng.randrange(len(lines) + 1) if batch.cuts or batch.breaks else len(lines)
        if batch.breaks and rng.random() < 0.7:
            batch.breaks -= 1
            self._world.log(f"  the download breaks after {ends} lines")
            return self._broken(lines[:ends])
        if batch.cuts and rng.random() < 0.7:
            batch.cuts -= 1
            self._world.log(f"  the download ends after {ends} lines, without a sign of it")
            return iter(lines[:ends])
        return iter(lines)

    def _broken(self, lines: list[BatchLine]) -> Iterator[BatchLine]:
        yield from lines
        raise ProviderBusyError("the download broke")

    def cancel(self, provider_batch_id: str) -> None:
        self._begin("cancel")
        batch = self._get(provider_batch_id)
        now = self._world.now
        if not batch.is_final(now):
            batch.cancelled_at = min(batch.cancelled_at, now)
        self._world.reach("cancelled")

    def discard(self, provider_batch_id: str, uploaded: str | None) -> None:
        self._begin("discard")

    def list_batches(self, since: datetime) -> Iterator[ListedBatch]:
        for batch in self._listed(since):
            mark = batch.shard_hex if self._provider.manners.keeps_marks else None
            created_at = moment(batch.created_at)
            yield ListedBatch(batch.batch_id, self._status(batch), created_at, mark)

    def close(self) -> None:
        return

    def _begin(self, call: str) -> None:
        self._world.reach(call)
        if self._provider.roll(self._provider.manners.busy):
            self._world.log(f"  {call}: busy")
            raise ProviderBusyError(f"{call}: busy")


def results(batch: Batch, keeps_partial: bool) -> list[BatchLine]:
    """Return what the results of a batch that is over hold, in the order of a download."""
    answered = batch.answered(math.inf)
    if not keeps_partial and batch.state(math.inf) is not BatchState.COMPLETED:
        answered = []
    lines = [
        _result(line.custom_id, line.request_key, line.text, line.finish_reason, line.failure)
        for line in answered
        if not line.is_missing
    ]
    random.Random(batch.batch_id).shuffle(lines)
    given = {line.custom_id for line in lines}
    # A line comes again after its first coming, or the first would not be the right one.
    return lines + [
        line for line in batch.extra if line.custom_id in given or not is_ours(batch, line)
    ]


def is_ours(batch: Batch, line: BatchLine) -> bool:
    """Return whether a line is of a request that is in the batch."""
    return any(line.custom_id == each.custom_id for each in batch.lines)


def _result(
    name: str, key: str, text: str | None, reason: FinishReason | None, failure: Outcome | None
) -> BatchLine:
    error = None if failure is None else f"told to be {failure.value}"
    return BatchLine(name, Completion(key, text, reason, Usage(10, 5), failure, error))


def moment(seconds: float) -> datetime:
    """Return a moment of virtual time as the provider's clock has it."""
    return EPOCH + timedelta(seconds=seconds)
