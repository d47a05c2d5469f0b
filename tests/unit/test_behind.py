"""Calls in a thread beside the one that makes them."""

from __future__ import annotations

import sys
import threading

import pytest

from batchsql.behind import SWITCH_SECONDS, Behind


def fail(said: str) -> None:
    raise ValueError(said)


def test_calls_run_beside_their_caller_one_after_another() -> None:
    may_go_on = threading.Event()
    done: list[int] = []

    def first() -> None:
        assert may_go_on.wait(10)
        done.append(1)

    with Behind() as behind:
        behind.do(first)
        assert done == []  # and yet we are here
        may_go_on.set()
        behind.do(done.append, 2)
        behind.do(done.append, 3)
    assert done == [1, 2, 3]


def test_next_call_is_not_made_after_one_that_failed() -> None:
    done: list[int] = []
    with pytest.raises(ValueError, match="full"), Behind() as behind:
        behind.do(fail, "full")
        behind.do(done.append, 2)
    assert done == []


def test_failure_of_the_last_call_is_raised_when_the_block_is_left() -> None:
    with pytest.raises(ValueError, match="full"), Behind() as behind:
        behind.do(fail, "full")


def test_call_that_failed_comes_before_what_its_caller_raised_later() -> None:
    with pytest.raises(ValueError, match="full") as caught, Behind() as behind:
        behind.do(fail, "full")
        raise KeyError("later")
    assert isinstance(caught.value.__context__, KeyError)


def test_interruption_waits_for_the_call_and_stays_an_interruption() -> None:
    begun, ended = threading.Event(), threading.Event()

    def last() -> None:
        begun.set()
        assert left.wait(10)
        ended.set()
        raise ValueError("full")

    left = threading.Event()
    with pytest.raises(KeyboardInterrupt), Behind() as behind:
        behind.do(last)
        assert begun.wait(10)
        threading.Timer(0.05, left.set).start()
        raise KeyboardInterrupt
    assert ended.is_set()


def test_threads_give_way_sooner_until_the_last_block_is_left() -> None:
    before = sys.getswitchinterval()
    with Behind():
        with Behind():
            assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
        assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    assert sys.getswitchinterval() == pytest.approx(before)
