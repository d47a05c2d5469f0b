from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from batchsql.backends import pump as pump_module
from batchsql.backends.pump import LOOK_AHEAD, pump
from batchsql.types import Completion, FinishReason, Request


def requests(count: int, taken: list[str] | None = None) -> Iterator[Request]:
    for number in range(count):
        if taken is not None:
            taken.append(str(number))
        yield Request(str(number), ())


def answer(request: Request) -> Completion:
    return Completion(request.request_key, "{}", FinishReason.STOP)


@pytest.mark.parametrize("count", [0, 1, 3, 200])
@pytest.mark.parametrize("slots", [1, 4])
def test_pump_answers_each_request_once(count: int, slots: int) -> None:
    completions = list(pump(requests(count), answer, slots, threading.Event()))
    assert sorted(int(c.request_key) for c in completions) == list(range(count))


def test_pump_fills_every_slot_and_takes_only_a_few_more() -> None:
    taken: list[str] = []
    together = threading.Barrier(4, timeout=10)

    def ask(request: Request) -> Completion:
        if int(request.request_key) < 4:
            together.wait()  # passes only when four are asked at once
        return answer(request)

    stream = pump(requests(100, taken), ask, 4, threading.Event())
    for yielded in range(1, 20):
        next(stream)
        assert len(taken) <= yielded + 4 + LOOK_AHEAD
    stream.close()


def test_pump_refills_a_slot_before_it_yields() -> None:
    asked = threading.Semaphore(0)

    def ask(request: Request) -> Completion:
        asked.release()
        return answer(request)

    stream = pump(requests(100), ask, 2, threading.Event())
    next(stream)  # the caller is now busy, and the generator stands still
    for _ in range(2 + LOOK_AHEAD + 1):
        assert asked.acquire(timeout=10)
    stream.close()


def test_pump_yields_in_order_of_finishing() -> None:
    first_may_end = threading.Event()

    def ask(request: Request) -> Completion:
        if request.request_key == "0":
            assert first_may_end.wait(10)
        return answer(request)

    stream = pump(requests(5), ask, 2, threading.Event())
    keys = [next(stream).request_key for _ in range(4)]
    first_may_end.set()
    keys += [c.request_key for c in stream]
    assert keys == ["1", "2", "3", "4", "0"]


def test_pump_advances_the_requests_only_in_the_callers_thread() -> None:
    threads = set()

    def source() -> Iterator[Request]:
        for request in requests(50):
            threads.add(threading.get_ident())
            yield request

    list(pump(source(), answer, 4, threading.Event()))
    assert threads == {threading.get_ident()}


def test_pump_ends_soon_after_stop_and_closes_once() -> None:
    stop, hang, running = threading.Event(), threading.Event(), threading.Event()
    closed: list[bool] = []

    def ask(request: Request) -> Completion:
        if request.request_key != "0":
            running.set()
            hang.wait(30)
        return answer(request)

    stream = pump(requests(100), ask, 2, stop, lambda: closed.append(True))
    assert next(stream).request_key == "0"
    assert running.wait(10)
    stop.set()
    started = time.monotonic()
    assert list(stream) == []
    assert time.monotonic() - started < 1
    assert closed == [True]
    hang.set()


def test_pump_takes_nothing_when_already_stopped() -> None:
    taken: list[str] = []
    stop = threading.Event()
    stop.set()
    assert list(pump(requests(3, taken), answer, 2, stop)) == []
    assert taken == []


def test_pump_raises_what_a_call_raised_and_closes() -> None:
    closed: list[bool] = []

    def ask(request: Request) -> Completion:
        raise RuntimeError(f"broken {request.request_key}")

    with pytest.raises(RuntimeError, match="broken 0"):
        list(pump(requests(3), ask, 1, threading.Event(), lambda: closed.append(True)))
    assert closed == [True]


def test_pump_yields_what_else_has_finished_before_it_raises() -> None:
    asked = threading.Semaphore(0)

    def ask(request: Request) -> Completion:
        asked.release()
        if request.request_key == "1":
            raise RuntimeError("broken")
        return answer(request)

    stream = pump(requests(4), ask, 1, threading.Event())
    assert next(stream).request_key == "0"
    for _ in range(4):  # the only worker is past the first three when it asks the fourth
        assert asked.acquire(timeout=10)
    rest = []
    with pytest.raises(RuntimeError, match="broken"):
        rest.extend(completion.request_key for completion in stream)
    assert "2" in rest


def test_pump_raises_what_the_source_raised_and_closes() -> None:
    closed: list[bool] = []

    def source() -> Iterator[Request]:
        yield Request("0", ())
        raise KeyError("lease")

    with pytest.raises(KeyError):
        list(pump(source(), answer, 4, threading.Event(), lambda: closed.append(True)))
    assert closed == [True]


def test_pump_closes_when_the_caller_leaves_early() -> None:
    closed: list[bool] = []
    stream = pump(requests(100), answer, 2, threading.Event(), lambda: closed.append(True))
    next(stream)
    stream.close()
    assert closed == [True]


def test_pump_yields_none_while_nothing_finishes(monkeypatch: pytest.MonkeyPatch) -> None:
    # The caller renews its leases on these; without them a slow answer would lose its shard.
    monkeypatch.setattr(pump_module, "_TICK_SECONDS", 0.0)
    release = threading.Event()

    def ask(request: Request) -> Completion:
        release.wait(10)
        return answer(request)

    stream = pump(requests(1), ask, 1, threading.Event())
    assert next(stream) is None
    release.set()
    assert [completion for completion in stream if completion is not None]
