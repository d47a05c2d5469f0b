"""One thing done in a thread while the next is got ready."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

SWITCH_SECONDS = 0.0005

_guard = threading.Lock()
_open = 0
_interval_before = 0.0


class Behind:
    """Runs calls one after another in a thread of its own, never more than one ahead of its caller.

    For writes that a database does while Python makes the next ones: the two hardly need the same
    core. Until the block is left, nobody else may use what the calls use. Leaving it waits for the
    last call, whatever happened, so nothing goes on unseen.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "batchsql-behind")
        self._last: Future[Any] | None = None

    def __enter__(self) -> Behind:
        _switch_often(1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread.shutdown()
        _switch_often(-1)
        if error is None or isinstance(error, Exception):  # but Ctrl-C stays what it is
            self.wait()

    def do(self, call: Callable[..., Any], *args: Any) -> None:
        """Begin a call, once the one before it has ended.

        Raises:
            Exception: what the call before raised; this one is not made.
        """
        self.wait()
        self._last = self._thread.submit(call, *args)

    def wait(self) -> None:
        """Wait until the last call has ended, and raise what it raised."""
        last, self._last = self._last, None
        if last is not None:
            last.result()


def _switch_often(more: int) -> None:
    """Have busy threads give way sooner while a block is open anywhere in the process.

    A thread waits for its turn after each statement that the database ends, by default 5 ms, which
    is longer than most statements take: without this most of what ``Behind`` gains was lost.
    """
    global _open, _interval_before
    with _guard:
        if _open == 0:
            _interval_before = sys.getswitchinterval()
        _open += more
        sys.setswitchinterval(min(SWITCH_SECONDS, _interval_before) if _open else _interval_before)
