"""Feeds a stream of requests to a fixed number of worker threads and yields what they answer."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator

from batchsql.types import Completion, Request

LOOK_AHEAD = 2
_STOP_POLL_SECONDS = 0.1
_TICK_SECONDS = 1.0

_Result = Completion | Exception


def pump(
    requests: Iterator[Request],
    ask: Callable[[Request], Completion],
    slots: int,
    stop: threading.Event,
    close: Callable[[], None] = lambda: None,
) -> Iterator[Completion | None]:
    """Yield one completion for each request taken, in the order in which they finish.

    Yields None about once a second while nothing finishes, so that the caller can renew its leases.

    ``ask`` runs in up to ``slots`` threads. ``requests`` is advanced only in the caller's thread,
    since it may read from a database connection, and never by more than ``slots + LOOK_AHEAD``
    beyond what has been yielded; the look-ahead keeps the slots busy while the caller stores a
    completion.

    Once ``stop`` is set nothing more is taken, and the generator yields what has already finished
    and ends without waiting for the rest. An exception in ``ask`` ends it too: it is raised here,
    once what else has finished is yielded. However it ends, also when the caller closes it early,
    ``close`` is called once: it breaks off what is still running and frees what the workers hold.

    The threads are daemons: an executor's would be waited for at interpreter exit, which an
    answer still being written could hold up for minutes.
    """
    todo: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
    done: queue.SimpleQueue[_Result] = queue.SimpleQueue()
    closed = threading.Event()

    def work() -> None:
        while (request := todo.get()) is not None and not closed.is_set():
            try:
                result: _Result = ask(request)
            except Exception as error:  # noqa: BLE001  raised again in the caller's thread
                result = error
            done.put(result)

    threads = 0
    in_flight = 0
    is_exhausted = False
    finished: Completion | None = None
    yielded_at = time.monotonic()
    try:
        while True:
            while not is_exhausted and in_flight < slots + LOOK_AHEAD and not stop.is_set():
                request = next(requests, None)
                if request is None:
                    is_exhausted = True
                    break
                todo.put(request)
                in_flight += 1
                if threads < min(slots, in_flight):
                    threads += 1
                    threading.Thread(target=work, name="batchsql-pump", daemon=True).start()
            if finished is not None:
                # Only now that its place is filled: the caller may take long before it comes back.
                yield finished
                finished = None
                yielded_at = time.monotonic()
            if in_flight == 0 and (is_exhausted or stop.is_set()):
                return
            try:
                result = done.get(timeout=_STOP_POLL_SECONDS)
            except queue.Empty:
                if stop.is_set():
                    return
                if time.monotonic() - yielded_at >= _TICK_SECONDS:
                    yield None
                    yielded_at = time.monotonic()
                continue
            in_flight -= 1
            if isinstance(result, Exception):
                yield from _finished(done)  # those answers may be paid for
                raise result
            finished = result
    finally:
        closed.set()
        for _ in range(threads):
            todo.put(None)
        close()


def _finished(done: queue.SimpleQueue[_Result]) -> Iterator[Completion]:
    """Yield the completions that are there already, whatever else failed."""
    with contextlib.suppress(queue.Empty):
        while True:
            result = done.get_nowait()
            if isinstance(result, Completion):
                yield result
