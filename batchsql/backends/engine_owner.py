"""The one thread that calls a loaded engine: feeds it, and starts it anew when it dies."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import Any, Protocol

from batchsql.errors import SystemicError
from batchsql.types import Call, Completion, FinishReason, Outcome, Request, Usage

MAX_RESTARTS = 2
ANSWERS_OF_A_SOUND_ENGINE = 1000
DEATHS_OF_A_POISON = 2


@dataclass(frozen=True, slots=True)
class Finished:
    """How one request ended in the engine: a text and a finish reason, or a failure."""

    engine_id: str
    text: str | None
    finish_reason: FinishReason | None
    usage: Usage = field(default_factory=Usage)
    failure: Outcome | None = None
    error: str | None = None


class RefusedError(Exception):
    """The engine does not take a request, and is well."""


class EngineCore(Protocol):
    """A loaded engine. Only the thread that loaded it calls it, ``figures`` excepted.

    An exception other than RefusedError means that the engine is dead.
    """

    @property
    def max_num_seqs(self) -> int:
        """How many requests it works on at once."""
        ...

    @property
    def max_model_len(self) -> int:
        """How many tokens a prompt and its answer may have together."""
        ...

    @property
    def tokenizer(self) -> Any: ...

    def make_sampling(self, call: Call) -> Any:
        """Return what all requests of a call share, made once.

        Raises:
            SystemicError: the engine does not know such parameters.
        """
        ...

    def add(self, engine_id: str, token_ids: Sequence[int], sampling: Any) -> None:
        """Queue a request.

        Raises:
            RefusedError: it cannot be asked like this.
        """
        ...

    def step(self) -> list[Finished]:
        """Go on a little with all requests and return those that ended."""
        ...

    def abort(self, engine_ids: Sequence[str]) -> None: ...

    def figures(self) -> Mapping[str, float]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request in the words of an engine."""

    request: Request
    token_ids: Sequence[int]
    sampling: Any


Start = Callable[[int], EngineCore]
"""Loads the engine; its argument, at most ``MAX_RESTARTS``, says how much less it shall ask for."""


class Stream:
    """What one ``complete`` waits for. Filled by the owner, read by the caller's thread."""

    def __init__(self) -> None:
        self.core: EngineCore | None = None
        self.was_accepted = False  # whether the engine took one of its requests
        self._is_decided = threading.Event()
        self._failure: SystemicError | None = None
        self._done: queue.SimpleQueue[Completion | SystemicError] = queue.SimpleQueue()

    def wait_loaded(self, seconds: float) -> EngineCore | None:
        """Return the engine, or None while it is not there.

        Raises:
            SystemicError: it cannot be loaded.
        """
        if self._is_decided.wait(seconds) and self.core is None and self._failure is not None:
            raise self._failure
        return self.core

    def next_completion(self, seconds: float) -> Completion | None:
        """Return the next answer, or None while there is none."""
        try:
            result = self._done.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(result, SystemicError):
            raise result
        return result

    def welcome(self, core: EngineCore) -> None:
        self.core = core
        self._is_decided.set()

    def give(self, completion: Completion) -> None:
        self._done.put(completion)

    def fail(self, error: SystemicError) -> None:
        self._failure = error
        self._done.put(error)
        self._is_decided.set()


@dataclass(slots=True, eq=False)
class _Job:
    prompt: Prompt
    stream: Stream
    deaths: set[int] = field(default_factory=set)  # of the engine, with this on board
    started_at: datetime | None = None


class Owner(threading.Thread):
    """The one thread that calls the engine, from its loading to its end.

    An engine that dies is started anew with a smaller appetite. What it was working on is then
    asked one by one: a request during which it dies again is the culprit and is given back as
    rejected, so that it neither stops the others nor takes them along. It explains both deaths:
    the next start is no smaller for them, and they are no restarts either, as long as others are
    answered between two culprits. After ``MAX_RESTARTS`` the engine is given up; restarts and
    size are forgotten once it has answered ``ANSWERS_OF_A_SOUND_ENGINE``.
    """

    def __init__(
        self, start: Start, model_reported: str, pause_seconds: float, previous: Owner | None
    ) -> None:
        super().__init__(name="batchsql-engine", daemon=True)
        self.core: EngineCore | None = None
        self.streams: set[Stream] = set()
        self.load_seconds = 0.0
        self.busy_seconds = 0.0
        self.deaths = 0
        self._start_engine = start
        self._model_reported = model_reported
        self._pause_seconds = pause_seconds
        self._previous = previous
        self._lock = threading.Lock()  # held to enter a stream, and to end
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: dict[str, _Job] = {}
        self._suspects: deque[_Job] = deque()
        self._waiting: deque[_Job] = deque()
        self._unwanted: list[str] = []
        self._serial = 0
        self._unexplained: set[int] = set()  # deaths that make the next start smaller
        self._counted: set[int] = set()  # deaths that count as restarts: these and perhaps others
        self._has_answered = False  # since the last culprit
        self._answers = 0  # since it was loaded
        self._is_ending = False

    def admit(self, stream: Stream) -> bool:
        """Enter a stream, from any thread; return False when the owner has ended."""
        with self._lock:
            if self._is_ending:
                return False
            self.streams.add(stream)
            self.order(partial(self._welcome, stream))
            return True

    def leave(self, stream: Stream) -> None:
        """Forget a stream and everything it asked, from any thread."""
        with self._lock:
            self.streams.discard(stream)
        self.order(partial(self._drop, stream))

    def order(self, what: Callable[[], None]) -> None:
        """Have something done between two steps of the engine, from any thread."""
        self._inbox.put(what)

    def submit(self, stream: Stream, prompt: Prompt) -> None:
        """Queue a request. Only as an order."""
        if stream in self.streams:
            self._waiting.append(_Job(prompt, stream))

    def end(self) -> None:
        """Take nothing more and end. Only as an order."""
        with self._lock:
            self._is_ending = True

    def retire(self) -> bool:
        """End, from any thread, unless a stream is open; return whether it does."""
        with self._lock:
            if self.streams:
                return False
            self._is_ending = True
        self.order(lambda: None)
        return True

    def run(self) -> None:
        failure = SystemicError("the engine was closed while it was asked")
        try:
            while not self._is_ending:
                self._obey()
                if self.core is not None:
                    self._turn(self.core)
                elif self.streams and not self._is_ending:
                    self._load()
        except SystemicError as error:
            failure = error
        except Exception as error:  # noqa: BLE001  raised again in the streams' threads
            failure = SystemicError(f"the engine cannot be used: {_shown(error)}")
            failure.__cause__ = error
        finally:
            self.end()
            for stream in list(self.streams):
                stream.fail(failure)
            self._put_down()

    def _obey(self) -> None:
        """Carry out the orders that came; wait for one where there is nothing else to do."""
        has_work = (
            self._running or self._suspects or self._waiting or self._unwanted
            if self.core is not None
            else self.streams
        )
        with contextlib.suppress(queue.Empty):
            if not has_work:
                self._inbox.get()()
            while True:
                self._inbox.get_nowait()()

    def _load(self) -> None:
        if self._previous is not None:
            self._previous.join()  # until it has freed its memory
            self._previous = None
        started = time.monotonic()
        core = self._start_engine(len(self._unexplained))
        self.load_seconds = time.monotonic() - started
        self._answers = 0
        self.core = core
        for stream in list(self.streams):
            stream.welcome(core)

    def _welcome(self, stream: Stream) -> None:
        if self.core is not None:
            stream.welcome(self.core)

    def _drop(self, stream: Stream) -> None:
        unwanted = [key for key, job in self._running.items() if job.stream is stream]
        for engine_id in unwanted:
            del self._running[engine_id]
        self._unwanted += unwanted
        self._suspects = deque(job for job in self._suspects if job.stream is not stream)
        self._waiting = deque(job for job in self._waiting if job.stream is not stream)

    def _turn(self, core: EngineCore) -> None:
        """Feed the engine, take a step, and hand out what ended."""
        try:
            if self._unwanted:
                core.abort(self._unwanted)
                self._unwanted = []
            self._feed(core)
            if not self._running:
                return
            started = time.monotonic()
            ended = core.step()
            self.busy_seconds += time.monotonic() - started
        except Exception as error:  # noqa: BLE001  an engine can die of anything
            self._bury(error)
            return
        for finished in ended:
            if (job := self._running.pop(finished.engine_id, None)) is not None:
                self._answer(job, finished)

    def _feed(self, core: EngineCore) -> None:
        if any(job.deaths for job in self._running.values()):
            return  # a suspect runs alone
        if self._suspects:
            if not self._running:
                self._add(core, self._suspects.popleft())
            return
        while self._waiting:
            self._add(core, self._waiting.popleft())

    def _add(self, core: EngineCore, job: _Job) -> None:
        self._serial += 1
        engine_id = str(self._serial)
        job.started_at = job.started_at or datetime.now(timezone.utc)
        self._running[engine_id] = job
        try:
            core.add(engine_id, job.prompt.token_ids, job.prompt.sampling)
        except RefusedError as error:
            del self._running[engine_id]
            if job.stream.was_accepted:
                self._answer(job, _failed(f"the engine refuses this request: {error}"))
            else:  # the first one: what is wrong is what all of them share
                self.leave(job.stream)
                job.stream.fail(SystemicError(f"the engine refuses every request: {error}"))
        else:
            job.stream.was_accepted = True

    def _answer(self, job: _Job, finished: Finished) -> None:
        if finished.failure is None:
            self._answers += 1
            self._has_answered = True
            if self._answers >= ANSWERS_OF_A_SOUND_ENGINE:
                self._unexplained.clear()
            self._counted &= self._unexplained  # it lives without the culprits
        job.stream.give(
            Completion(
                job.prompt.request.request_key,
                finished.text,
                finished.finish_reason,
                finished.usage,
                finished.failure,
                finished.error,
                self._model_reported,
                job.started_at,
                datetime.now(timezone.utc),
            )
        )

    def _bury(self, error: Exception) -> None:
        """Sort out what the dead engine was working on, and prepare its restart.

        Raises:
            SystemicError: it died too often.
        """
        self._put_down()
        self.deaths += 1
        self._unwanted = []
        died_with = list(self._running.values())
        self._running.clear()
        self._unexplained.add(self.deaths)
        self._counted.add(self.deaths)
        for job in reversed(died_with):
            job.deaths.add(self.deaths)
            if len(job.deaths) < DEATHS_OF_A_POISON:
                self._suspects.appendleft(job)
            else:
                self._blame(job)
                said = f"the engine died on this prompt {len(job.deaths)} times: {_shown(error)}"
                self._answer(job, _failed(said))
        if len(self._counted) > MAX_RESTARTS:
            raise SystemicError(
                f"the engine died {len(self._counted)} times, though it was started anew: "
                f"{_shown(error)}. Its own reason stands on stderr; lower "
                "engine.max_num_seqs, engine.max_model_len or engine.gpu_memory_utilization"
            ) from error
        until = time.monotonic() + self._pause_seconds
        with contextlib.suppress(queue.Empty):
            while (left := until - time.monotonic()) > 0:
                self._inbox.get(timeout=left)()

    def _blame(self, job: _Job) -> None:
        """Have a request explain the deaths that it was on board of.

        Where nothing was answered since the last culprit, the engine may well die on everything.
        """
        self._unexplained -= job.deaths
        if self._has_answered:
            self._counted -= job.deaths
        self._has_answered = False

    def _put_down(self) -> None:
        core, self.core = self.core, None
        if core is not None:
            with contextlib.suppress(Exception):
                core.close()


def _failed(error: str) -> Finished:
    return Finished("", None, None, failure=Outcome.REJECTED, error=error)


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}"
