"""The emulator's clock, and the life of a batch along it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

WINDOW_SECONDS = 24 * 3600


class Clock:
    """The wall clock, which can be put forward."""

    def __init__(self, source: Callable[[], float] = time.time) -> None:
        self._source = source
        self._ahead = 0.0

    def now(self) -> float:
        """Return the emulated time in seconds since the epoch."""
        return self._source() + self._ahead

    def advance(self, seconds: float) -> None:
        """Put the clock forward; it never goes back."""
        if seconds < 0:
            raise ValueError(f"got {seconds} seconds; the clock only goes forward")
        self._ahead += seconds


@dataclass(frozen=True, slots=True)
class Durations:
    """How many seconds the parts of a batch's life take at speed 1."""

    validating: float = 20
    processing: float = 600
    finalizing: float = 20
    cancelling: float = 60

    def at_speed(self, speed: float) -> Durations:
        """Return the durations of a provider that works so many times as fast."""
        if speed <= 0:
            raise ValueError(f"got speed {speed}; give a number above zero")
        return Durations(
            self.validating / speed,
            self.processing / speed,
            self.finalizing / speed,
            self.cancelling / speed,
        )


class Phase(str, Enum):
    """Where a batch is. Providers give these their own names."""

    VALIDATING = "validating"
    PROCESSING = "processing"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    DONE = "done"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def is_final(self) -> bool:
        """Whether a batch stays here."""
        return self in (Phase.DONE, Phase.CANCELLED, Phase.EXPIRED)


@dataclass(slots=True)
class Timeline:
    """When a batch reaches which phase.

    Moves: validating → processing → finalizing → done; from the first three to cancelling →
    cancelled; from any that is not final to expired when the window ends. ``stalls_at`` is the
    share of lines after which nothing moves any more, so that only the window ends it.
    """

    clock: Clock
    durations: Durations
    stalls_at: float | None = None
    cancel_hangs: bool = False
    window_seconds: float = WINDOW_SECONDS
    created_at: float = 0.0
    _skipped: float = 0.0
    _cancelled_after: float | None = None

    def __post_init__(self) -> None:
        self.created_at = self.clock.now()

    @property
    def elapsed(self) -> float:
        """The seconds that the batch has lived, skipped ones included."""
        return self.clock.now() - self.created_at + self._skipped

    @property
    def phase(self) -> Phase:
        """Where the batch is now."""
        spans = self.durations
        if self._cancelled_after is not None:
            if self.elapsed >= self.window_seconds:
                return Phase.EXPIRED if self.cancel_hangs else Phase.CANCELLED
            is_over = self.elapsed >= self._cancelled_after + spans.cancelling
            return Phase.CANCELLED if is_over and not self.cancel_hangs else Phase.CANCELLING
        if self.stalls_at is not None and self.elapsed >= self.window_seconds:
            return Phase.EXPIRED
        if self.elapsed < spans.validating:
            return Phase.VALIDATING
        processed = self.elapsed - spans.validating
        if processed < spans.processing or self.stalls_at is not None:
            return Phase.PROCESSING
        return Phase.FINALIZING if processed < spans.processing + spans.finalizing else Phase.DONE

    @property
    def share(self) -> float:
        """The share of lines that have been answered by now, from 0 to 1."""
        lived = self.elapsed if self._cancelled_after is None else self._cancelled_after
        processed = lived - self.durations.validating
        if processed < 0:
            return 0.0
        whole = self.durations.processing
        share = min(1.0, processed / whole) if whole else 1.0
        return share if self.stalls_at is None else min(share, self.stalls_at)

    @property
    def is_cancelled(self) -> bool:
        """Whether cancelling was asked for."""
        return self._cancelled_after is not None

    def cancel(self) -> None:
        """Stop where the batch is; a second call changes nothing."""
        if self._cancelled_after is None:
            self._cancelled_after = self.elapsed

    def at(self, phase: Phase) -> float:
        """Return the time at which the batch reaches a phase, never later than now."""
        return min(self.clock.now(), self.created_at + self._point(phase))

    def skip_to(self, phase: Phase, share: float = 0.0) -> None:
        """Bring the batch to a phase at once, in processing so that ``share`` is answered.

        A batch that is further along stays where it is. A cancelled one goes to its end.
        """
        target = self._point(phase) + (
            self.durations.processing * share if phase is Phase.PROCESSING else 0.0
        )
        self._skipped += max(0.0, target - self.elapsed)

    def _point(self, phase: Phase) -> float:
        spans = self.durations
        started = spans.validating
        cancelled = self._cancelled_after
        points = {
            Phase.VALIDATING: 0.0,
            Phase.PROCESSING: started,
            Phase.FINALIZING: started + spans.processing,
            Phase.DONE: started + spans.processing + spans.finalizing,
            Phase.CANCELLING: cancelled or 0.0,
            Phase.CANCELLED: (cancelled or 0.0) + spans.cancelling,
            Phase.EXPIRED: float(self.window_seconds),
        }
        if cancelled is not None and phase is Phase.DONE:
            return points[Phase.CANCELLED]
        if self.stalls_at is not None and phase is Phase.DONE:
            return points[Phase.EXPIRED]
        return points[phase]
