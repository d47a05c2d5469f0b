"""What runs in the actors of a Ray cluster: the feeder of a pool, and each of its engines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import platform
import subprocess
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchsql.backends.base import StreamBackend, figures_of
from batchsql.backends.ray_board import GIVEN_UP_AFTER_DEATHS, Board, Status, Verdict
from batchsql.errors import BatchsqlError, SystemicError
from batchsql.types import Call, Completion, ModelRef, Outcome, Request

_BEAT_SECONDS = 1.0
_WAIT_SECONDS = 1.0

Answer = Completion | str
"""A completion, or why every further request of the same call would fail."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """How an engine is opened on a node, and what it must be to give the same answers.

    ``folders`` are those that the run has read, so each node must have them at the same path.
    """

    opener: Callable[[ModelRef, Mapping[str, Any], Path], StreamBackend]
    model: ModelRef
    engine: Mapping[str, Any]
    project_root: Path
    identity: Mapping[str, Any]
    folders: tuple[Path, ...]
    threads: int  # blocks that are worked on at once


def pack_block(call: bytes, asked: Sequence[tuple[int, Request]]) -> bytes:
    """Return what one task of an engine is given: requests of one pickled call, by ticket."""
    return pickle.dumps((call, list(asked)))


def unpack_answers(answers: bytes) -> list[tuple[int, Answer]]:
    """Return what one task of an engine has made, by ticket."""
    found: list[tuple[int, Answer]] = pickle.loads(answers)  # noqa: S301  from our own actor
    return found


class Feeder:
    """The actor that holds a pool's board. Its methods wait without holding up one another."""

    def __init__(self, lost_seconds: float, max_crashes: int) -> None:
        self._board = Board(lost_seconds, max_crashes)
        self._changed = asyncio.Event()
        self._engines: dict[str, Any] = {}

    async def enroll(self, actor_id: str, engine: Any) -> None:
        """Note the handle of an engine's actor, which a restart does not change."""
        self._engines[actor_id] = engine

    async def put(self, tickets: Sequence[int], payload: bytes) -> None:
        self._board.put(tickets, payload)
        self._changed.set()

    async def next_payload(self, index: int) -> bytes:
        """Return a block once it is there."""
        while (payload := self._board.payload(index)) is None:
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _WAIT_SECONDS)
        return payload

    async def begin(self, index: int, worker: str) -> dict[int, Verdict]:
        return self._board.begin(index, worker)

    async def begin_alone(self, worker: str, ticket: int | None) -> None:
        self._board.begin_alone(worker, ticket)

    async def settle(self, tickets: Sequence[int], is_answered: bool) -> None:
        self._board.settle(tickets, is_answered=is_answered)

    async def beat(self, worker: str, slots: int, figures: Mapping[str, float]) -> list[int]:
        unwanted = self._board.beat(worker, slots, figures)
        self._changed.set()  # what a dead worker was at may have moved
        return unwanted

    async def fail(self, reason: str) -> None:
        self._board.fail(reason)

    async def status(self) -> tuple[Status, list[Any]]:
        """Return how the pool does, and the actors of its engines."""
        return self._board.status(), list(self._engines.values())


class RayEngine:
    """One engine of a pool, in an actor of Ray Data: takes blocks of requests, several at once.

    It never raises, since that would end the whole dataset: what goes wrong is an answer too.
    """

    def __init__(self, plan: EnginePlan, feeder: Any) -> None:
        """Load the engine; a failure is told to the feeder."""
        self._plan = plan
        self._feeder = feeder
        self._name = uuid.uuid4().hex
        self._asker: Asker | None = None
        self._gate = Gate()
        self._stops: dict[int, threading.Event] = {}
        self._threads = ThreadPoolExecutor(plan.threads, "batchsql-ray-block")
        self._guard = _end_children_with_us()
        threading.Thread(target=self._beat, name="batchsql-ray-beat", daemon=True).start()
        try:
            self._asker = Asker(_load(plan))
        except Exception as error:  # noqa: BLE001  told to the run, which raises it
            said = str(error) if isinstance(error, BatchsqlError) else _shown(error)
            feeder.fail.remote(f"on the node {platform.node()}: {said}")

    async def __call__(self, batch: Any) -> dict[str, list[bytes]]:
        """Answer blocks; ``batch`` is a table with the columns ``index`` and ``payload``."""
        rows = batch.to_pylist()
        return {"answers": [await self._block(row["index"], row["payload"]) for row in rows]}

    async def _block(self, index: int, payload: bytes) -> bytes:
        answers: list[tuple[int, Answer]] = []
        try:
            verdicts = await self._feeder.begin.remote(index, self._name)
            if verdicts and (asker := self._asker) is not None:
                packed, asked = pickle.loads(payload)  # noqa: S301  from our own process
                asked = [(ticket, request) for ticket, request in asked if ticket in verdicts]
                answers = await self._answer(asker, index, packed, asked, verdicts)
        except Exception as error:  # noqa: BLE001  such as a feeder that is gone
            self._feeder.fail.remote(_shown(error))
        return pickle.dumps(answers)

    async def _answer(
        self,
        asker: Asker,
        index: int,
        call: bytes,
        asked: Sequence[tuple[int, Request]],
        verdicts: Mapping[int, Verdict],
    ) -> list[tuple[int, Answer]]:
        stop = self._stops.setdefault(index, threading.Event())
        answers: list[tuple[int, Answer]] = [
            (ticket, self._given_up(request))
            for ticket, request in asked
            if verdicts[ticket] is Verdict.GIVE_UP
        ]
        try:
            together = [one for one in asked if verdicts[one[0]] is Verdict.ASK]
            if together:
                async with self._gate.together():
                    answers += await self._ask(asker, call, together, stop)
            for one in asked:
                if verdicts[one[0]] is Verdict.ASK_ALONE:
                    async with self._gate.alone():
                        await self._feeder.begin_alone.remote(self._name, one[0])
                        answers += await self._ask(asker, call, [one], stop)
                        await self._feeder.begin_alone.remote(self._name, None)
        finally:
            self._stops.pop(index, None)
        return answers

    async def _ask(
        self, asker: Asker, call: bytes, asked: Sequence[tuple[int, Request]], stop: threading.Event
    ) -> list[tuple[int, Answer]]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, asker.ask, call, asked, stop)

    def _given_up(self, request: Request) -> Completion:
        return _rejected(
            request,
            f"the engine's process died {GIVEN_UP_AFTER_DEATHS} times with this request on board, "
            "the last time with nothing beside it",
            self._plan.model,
        )

    def _beat(self) -> None:
        import ray

        here = ray.get_runtime_context()
        self._feeder.enroll.remote(here.get_actor_id(), here.current_actor)
        pause = threading.Event()
        while True:
            slots, figures = (0, {}) if self._asker is None else self._asker.state()
            try:
                unwanted = ray.get(self._feeder.beat.remote(self._name, slots, figures))
            except Exception:  # noqa: BLE001  the feeder is gone, and the run with it
                for stop in list(self._stops.values()):
                    stop.set()
                return
            for index in unwanted:
                if (stopped := self._stops.get(index)) is not None:
                    stopped.set()
            pause.wait(_BEAT_SECONDS)


class Asker:
    """Asks one engine for blocks of requests, so that one bad request spoils no other.

    A backend calls a failure systemic when all requests of a call share its cause, but a block is
    so small that its one bad request can look like all of them. So a call that has been answered
    before is judged by what it answered: where that request works again, the engine is sound, and
    those that fail one by one are rejected.
    """

    def __init__(self, backend: StreamBackend) -> None:
        self._backend = backend
        self._calls: dict[bytes, Call] = {}
        self._sound: dict[bytes, Request] = {}  # one that was answered, by call

    def state(self) -> tuple[int, Mapping[str, float]]:
        """Return how many requests the engine works on at once, and its figures."""
        figures: Mapping[str, float] = {}
        with contextlib.suppress(Exception):  # it may be dying just now, to be started anew
            figures = figures_of(self._backend)
        return self._backend.capabilities.slots, figures

    def ask(
        self, call: bytes, asked: Sequence[tuple[int, Request]], stop: threading.Event
    ) -> list[tuple[int, Answer]]:
        """Return the answers by ticket; those that ``stop`` broke off are missing."""
        if call not in self._calls:
            self._calls[call] = pickle.loads(call)  # noqa: S301  from our own process
        requests = dict(asked)
        answers: dict[int, Answer] = {}
        try:
            for ticket, completion in self._complete(call, requests, stop):
                answers[ticket] = completion
        except SystemicError as error:
            left = {t: request for t, request in requests.items() if t not in answers}
            if self._is_sound(call, stop):
                answers |= self._ask_each(call, left, stop)
            else:
                answers |= dict.fromkeys(left, f"on the node {platform.node()}: {error}")
        return list(answers.items())

    def _complete(
        self, packed: bytes, requests: Mapping[int, Request], stop: threading.Event
    ) -> Iterator[tuple[int, Completion]]:
        call = self._calls[packed]
        # Two streams may ask for one request; their tickets tell them apart.
        renamed = (replace(r, request_key=str(ticket)) for ticket, r in requests.items())
        try:
            for completion in self._backend.complete(renamed, call, stop):
                if completion is None:
                    continue
                ticket = int(completion.request_key)
                request = requests[ticket]
                if completion.failure is None:
                    self._sound[packed] = request
                yield ticket, replace(completion, request_key=request.request_key)
        except SystemicError:
            raise
        except Exception as error:
            raise SystemicError(_shown(error)) from error

    def _is_sound(self, call: bytes, stop: threading.Event) -> bool:
        """Return whether a request that was answered once is answered again."""
        request = self._sound.get(call)
        if request is None:
            return False
        try:
            return any(c.failure is None for _, c in self._complete(call, {0: request}, stop))
        except SystemicError:
            return False

    def _ask_each(
        self, call: bytes, requests: Mapping[int, Request], stop: threading.Event
    ) -> dict[int, Answer]:
        answers: dict[int, Answer] = {}
        for ticket, request in requests.items():
            try:
                answers |= dict(self._complete(call, {ticket: request}, stop))
            except SystemicError as error:
                answers[ticket] = _rejected(request, str(error), self._calls[call].model)
        return answers


class Gate:
    """Lets many pass together, or one alone. Those who wait to be alone go first."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._inside = 0
        self._alone = 0  # who waits to be alone, or is

    @asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._alone == 0)
            self._inside += 1
        try:
            yield
        finally:
            await self._leave()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._changed:
            self._alone += 1
            await self._changed.wait_for(lambda: self._inside == 0)
            self._inside += 1
        try:
            yield
        finally:
            self._alone -= 1
            await self._leave()

    async def _leave(self) -> None:
        async with self._changed:
            self._inside -= 1
            self._changed.notify_all()


def _load(plan: EnginePlan) -> StreamBackend:
    """Open and load an engine on this node.

    Raises:
        SystemicError: it cannot be loaded here, or would give other answers than the run expects.
    """
    for folder in plan.folders:
        if not folder.is_dir():  # one of this name may be looked for on the hub
            raise SystemicError(
                f"there is no folder {folder}, where the run has one; put it on a path that all "
                "nodes share, or copy it to each"
            )
    backend = plan.opener(plan.model, plan.engine, plan.project_root)
    if backend.identity() != plan.identity:
        raise SystemicError(
            f"the files of {plan.model} differ from those where the run was started; bring the "
            "same checkpoint to every node, or pin engine.revision for a model of the hub"
        )
    # A backend loads before it takes its first request, so none at all will do.
    for _ in backend.complete(iter(()), Call(plan.model, {}, {}, 1), threading.Event()):
        pass
    return backend


def _end_children_with_us() -> subprocess.Popen[bytes] | None:
    """Have what this process starts end with it, however it ends.

    Ray sees to it where one actor is killed, but not where everything of Ray is, and the engine's
    own processes would keep the memory of a GPU.
    """
    group = os.getpgid(0)
    if group != os.getpid():  # not an actor's own
        return None
    return subprocess.Popen(  # noqa: S603  nothing in it comes from outside
        ["/bin/sh", "-c", 'read _; kill -KILL -- "-$0"', str(group)],
        stdin=subprocess.PIPE,  # never written to, and closed when this process ends
        start_new_session=True,
    )


def _rejected(request: Request, error: str, model: ModelRef) -> Completion:
    return Completion(
        request.request_key,
        None,
        None,
        failure=Outcome.REJECTED,
        error=error,
        model_reported=str(model),
    )


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}"
