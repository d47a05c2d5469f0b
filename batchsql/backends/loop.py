"""The process's own event loop, in a background thread, on which the providers' clients live."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")
_lock = threading.Lock()
_running: tuple[int, asyncio.AbstractEventLoop] | None = None


def background_loop() -> asyncio.AbstractEventLoop:
    """Return the process's event loop, started in a daemon thread when it is first asked for."""
    global _running
    with _lock:
        if _running is None or _running[0] != os.getpid():  # threads do not survive a fork
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="batchsql-loop", daemon=True).start()
            _running = os.getpid(), loop
        return _running[1]


def submit(coroutine: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
    """Run a coroutine on the loop; wait for its outcome with the future's ``result``."""
    return asyncio.run_coroutine_threadsafe(coroutine, background_loop())


async def in_thread(work: Callable[[], _T]) -> _T:
    """Wait for work that blocks, done in a thread of its own; for clients that are not async.

    When the wait is broken off the work goes on, and its outcome is dropped. Unlike a thread of
    ``asyncio.to_thread`` it does not hold up the end of the process.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # noqa: BLE001  raised again where it is waited for
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="batchsql-blocking", daemon=True).start()
    return await outcome
