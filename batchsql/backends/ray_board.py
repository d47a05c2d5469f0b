"""What has been asked of a pool of engines, who works on it, and what becomes of it when one dies.

Pure bookkeeping: it lives in one small actor beside the run, and knows nothing of Ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

ALONE_AFTER_DEATHS = 2
GIVEN_UP_AFTER_DEATHS = 3


class Verdict(str, Enum):
    """What a worker does with a request that it was handed."""

    ASK = "ask"
    ASK_ALONE = "ask_alone"
    GIVE_UP = "give_up"


@dataclass(frozen=True, slots=True)
class Status:
    """How the pool does: the slots and figures of each engine that is loaded, how many requests
    were handed to engines so far, one twice if twice, and why the pool cannot go on.
    """

    slots: tuple[int, ...] = ()
    figures: tuple[Mapping[str, float], ...] = ()
    begun: int = 0
    failure: str | None = None


@dataclass(slots=True)
class _Block:
    tickets: tuple[int, ...]
    payload: bytes
    worker: str | None = None
    fetched_at: float | None = None  # by the reader, last


@dataclass(slots=True)
class _Asked:
    index: int  # of the block that it is in
    deaths: int = 0


@dataclass(slots=True)
class _Worker:
    seen_at: float
    slots: int = 0  # until the engine is loaded
    figures: Mapping[str, float] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    alone: int | None = None
    is_dead: bool = False


class Board:
    """Blocks of requests, each request in exactly one of them until it is settled.

    A block has a number that never changes its meaning, so a reader that starts over gets what it
    got before, and nothing in the place of what is settled. A block whose worker has died is begun
    again under its number by the worker's successor; if none comes it gets a new number, for
    whoever takes it next. So does a block that was fetched and is not begun: Ray may have put it
    into the queue of one that never comes back.

    A request may have been the cause of a death. After ``ALONE_AFTER_DEATHS`` with it on board it
    is asked with nothing beside it, and only then counts what dies; after
    ``GIVEN_UP_AFTER_DEATHS`` it is not asked again.
    """

    def __init__(
        self, lost_seconds: float, max_crashes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """A worker that is silent for ``lost_seconds`` is taken for dead.

        ``max_crashes`` in a row, without an answer in between, mean that no engine can live.
        """
        self._lost_seconds = lost_seconds
        self._max_crashes = max_crashes
        self._clock = clock
        self._blocks: dict[int, _Block] = {}
        self._next_index = 0
        self._asked: dict[int, _Asked] = {}
        self._workers: dict[str, _Worker] = {}
        self._begun = 0
        self._crashes = 0
        self._failure: str | None = None

    def put(self, tickets: Sequence[int], payload: bytes) -> None:
        """Add a block of requests, each known by its ticket."""
        self._add(_Block(tuple(tickets), payload))

    def payload(self, index: int) -> bytes | None:
        """Return a block: None while it is not there, empty once nobody waits for it."""
        if index >= self._next_index:
            return None
        block = self._blocks.get(index)
        if block is None:
            return b""
        block.fetched_at = self._clock()
        return block.payload

    def begin(self, index: int, worker: str) -> dict[int, Verdict]:
        """Hand a block to a worker; return what it does with the requests still waited for."""
        block = self._blocks.get(index)
        if block is None:
            return {}
        if block.worker is not None and block.worker != worker:  # its successor
            self._bury(index, block)
        block.worker = worker
        self._see(worker).begun.add(index)
        verdicts = {
            ticket: _verdict(self._asked[ticket].deaths)
            for ticket in block.tickets
            if ticket in self._asked
        }
        self._begun += len(verdicts)
        return verdicts

    def begin_alone(self, worker: str, ticket: int | None) -> None:
        """Note the one request that a worker asks with nothing beside it, or that none is left."""
        self._see(worker).alone = ticket

    def settle(self, tickets: Sequence[int], *, is_answered: bool) -> None:
        """Forget requests that have their answer, or for which nobody waits any more."""
        if is_answered:
            self._crashes = 0
        for ticket in tickets:
            asked = self._asked.pop(ticket, None)
            if asked is None:
                continue
            block = self._blocks[asked.index]
            if not any(other in self._asked for other in block.tickets):
                del self._blocks[asked.index]

    def beat(self, worker: str, slots: int, figures: Mapping[str, float]) -> list[int]:
        """Note that a worker lives; return the blocks that it need not finish.

        ``slots`` is how many requests its engine works on at once, 0 while it is not loaded.
        """
        seen = self._see(worker)
        seen.slots, seen.figures = slots, figures
        self._sweep()
        unwanted = []
        for index in sorted(seen.begun):
            block = self._blocks.get(index)
            if block is None or block.worker != worker:
                seen.begun.discard(index)
                unwanted.append(index)
        return unwanted

    def fail(self, reason: str) -> None:
        """Note that an engine cannot be used."""
        self._failure = self._failure or reason

    def status(self) -> Status:
        self._sweep()
        loaded = [worker for worker in self._workers.values() if worker.slots]
        return Status(
            tuple(worker.slots for worker in loaded),
            tuple(worker.figures for worker in loaded),
            self._begun,
            self._failure,
        )

    def _add(self, block: _Block) -> None:
        for ticket in block.tickets:
            self._asked.setdefault(ticket, _Asked(0)).index = self._next_index
        self._blocks[self._next_index] = block
        self._next_index += 1

    def _see(self, worker: str) -> _Worker:
        seen = self._workers.setdefault(worker, _Worker(0.0))
        seen.seen_at = self._clock()
        return seen

    def _sweep(self) -> None:
        """Move what silent workers were at, or have in their queues, to the end for others."""
        oldest = self._clock() - self._lost_seconds
        for name, worker in list(self._workers.items()):
            if worker.seen_at >= oldest:
                continue
            self._note_death(worker)
            for index in sorted(worker.begun):
                block = self._blocks.get(index)
                if block is not None and block.worker == name:
                    self._bury(index, block)
                    self._move(index)
            self._workers.pop(name, None)
        for index, block in list(self._blocks.items()):
            if block.worker is None and block.fetched_at is not None and block.fetched_at < oldest:
                self._move(index)

    def _move(self, index: int) -> None:
        block = self._blocks.pop(index)
        left = tuple(ticket for ticket in block.tickets if ticket in self._asked)
        self._add(_Block(left, block.payload))

    def _bury(self, index: int, block: _Block) -> None:
        """Count the death of a block's worker against what it was working on."""
        worker = self._workers.get(block.worker or "")
        alone = None if worker is None else worker.alone
        for ticket in block.tickets:
            asked = self._asked.get(ticket)
            if asked is not None and (asked.deaths < ALONE_AFTER_DEATHS or ticket == alone):
                asked.deaths += 1
        if worker is not None:
            worker.begun.discard(index)
            self._note_death(worker)

    def _note_death(self, worker: _Worker) -> None:
        if worker.is_dead:
            return
        worker.is_dead = True
        worker.slots = 0
        self._crashes += 1
        if self._crashes > self._max_crashes:
            self.fail(
                f"the engines' processes died {self._crashes} times without an answer in between; "
                "see Ray's logs for the reason, such as too little memory on a node"
            )


def _verdict(deaths: int) -> Verdict:
    if deaths >= GIVEN_UP_AFTER_DEATHS:
        return Verdict.GIVE_UP
    return Verdict.ASK_ALONE if deaths >= ALONE_AFTER_DEATHS else Verdict.ASK
