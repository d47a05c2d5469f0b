"""Serves streams of requests from one engine, loaded when it is first asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from batchsql.backends.engine_owner import EngineCore, Owner, Prompt, Start, Stream
from batchsql.types import Completion, Request

_POLL_SECONDS = 0.1
_TICK_SECONDS = 1.0
_CLOSE_SECONDS = 10.0

Prepare = Callable[[EngineCore, Request], Prompt | Completion]
"""Puts a request into the engine's words, or says at once why it cannot be asked."""


class EngineHost:
    """One engine, its streams, and the thread that owns it.

    The engine is loaded when the first stream opens and then serves every stream of the process,
    until ``close``. Requests enter as others leave, so it never drains between two shards.
    """

    def __init__(self, start: Start, model_reported: str, pause_seconds: float = 1.0) -> None:
        """``pause_seconds`` is waited for before a dead engine is started anew.

        Ctrl-C reaches an engine's own process too, and it may die before its streams are closed.
        """
        self._start = start
        self._model_reported = model_reported
        self._pause_seconds = pause_seconds
        self._lock = threading.Lock()
        self._owner: Owner | None = None

    @property
    def core(self) -> EngineCore | None:
        """The engine, or None while it is not loaded."""
        owner = self._owner
        return None if owner is None else owner.core

    def figures(self) -> Mapping[str, float]:
        """Return the engine's own figures and the host's; empty while nothing is loaded."""
        owner = self._owner
        core = None if owner is None else owner.core  # the owner's thread may put it down now
        if owner is None or core is None:
            return {}
        return {
            **core.figures(),
            "load_seconds": owner.load_seconds,
            "busy_seconds": owner.busy_seconds,
            "deaths": float(owner.deaths),
        }

    def complete(
        self, requests: Iterator[Request], prepare: Prepare, stop: threading.Event
    ) -> Iterator[Completion | None]:
        """Yield one completion for each request taken; see ``StreamBackend.complete``.

        In flight are a few more than the engine's slots, so that none stands empty while the
        caller stores an answer.
        """
        owner, stream = self._open()
        yielded_at = time.monotonic()
        try:
            while (core := stream.wait_loaded(_POLL_SECONDS)) is None:
                if stop.is_set():
                    return
                if time.monotonic() - yielded_at >= _TICK_SECONDS:
                    yield None
                    yielded_at = time.monotonic()
            in_flight = 0
            is_exhausted = False
            finished: Completion | None = None
            while True:
                core = stream.core or core  # another one after a restart
                limit = in_flight_limit(core.max_num_seqs)
                while not is_exhausted and in_flight < limit and not stop.is_set():
                    request = next(requests, None)
                    if request is None:
                        is_exhausted = True
                        break
                    made = prepare(core, request)
                    if isinstance(made, Completion):
                        yield made
                        yielded_at = time.monotonic()
                        continue
                    owner.order(partial(owner.submit, stream, made))
                    in_flight += 1
                if finished is not None:
                    # Only now that its place is filled: the caller may take long to come back.
                    yield finished
                    finished = None
                    yielded_at = time.monotonic()
                if in_flight == 0 and (is_exhausted or stop.is_set()):
                    return
                finished = stream.next_completion(_POLL_SECONDS)
                if finished is not None:
                    in_flight -= 1
                elif stop.is_set():
                    return
                elif time.monotonic() - yielded_at >= _TICK_SECONDS:
                    yield None
                    yielded_at = time.monotonic()
        finally:
            owner.leave(stream)

    def close(self) -> None:
        """End the engine and wait for it, at most some seconds. A later stream loads it again."""
        owner = self._owner
        if owner is not None:
            owner.order(owner.end)
            owner.join(_CLOSE_SECONDS)

    def close_if_idle(self) -> None:
        """Free what the engine holds unless a stream is open."""
        owner = self._owner
        if owner is not None and owner.retire():
            owner.join(_CLOSE_SECONDS)

    def _open(self) -> tuple[Owner, Stream]:
        stream = Stream()
        with self._lock:
            owner = self._owner
            if owner is None or not owner.admit(stream):
                owner = Owner(self._start, self._model_reported, self._pause_seconds, owner)
                owner.admit(stream)
                owner.start()
                self._owner = owner
            return owner, stream


def in_flight_limit(max_num_seqs: int) -> int:
    """Return how many requests of one stream are handed to the engine at once."""
    return max_num_seqs + max(2, max_num_seqs // 4)
