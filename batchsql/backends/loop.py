"""The process's own event loop, in a background thread, on which the providers' clients live."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
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
