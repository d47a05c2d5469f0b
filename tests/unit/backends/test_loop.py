"""Work that blocks, waited for on the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from batchsql.backends.loop import in_thread, submit


def test_blocking_work_gives_its_result_from_a_thread_that_ends_with_the_process() -> None:
    thread = submit(in_thread(threading.current_thread)).result(10)
    assert thread is not threading.current_thread()
    assert thread.daemon


def test_blocking_work_raises_where_it_is_waited_for() -> None:
    def fail() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        submit(in_thread(fail)).result(10)


def test_wait_that_is_broken_off_leaves_the_work_alone() -> None:
    go_on, is_over = threading.Event(), threading.Event()

    def work() -> None:
        go_on.wait(10)
        is_over.set()

    with pytest.raises(asyncio.TimeoutError):
        submit(asyncio.wait_for(in_thread(work), 0.01)).result(10)
    assert not is_over.is_set()
    go_on.set()
    assert is_over.wait(10)
