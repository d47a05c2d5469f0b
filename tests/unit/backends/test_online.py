from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import pytest

from batchsql.backends import online
from batchsql.backends.endpoint import check_endpoint, plan_endpoint, scrub
from batchsql.backends.online import Gate, failure_by_status, read_error_reply, read_retry_after
from batchsql.types import Outcome

OWN = "https://api.example.com/v1"


def in_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())  # type: ignore[arg-type]

    run.__name__ = test.__name__
    return run


async def answered(gate: Gate, times: int, cap: int = 1000) -> None:
    """Go through the gate as often as its places allow, each time with a good reply."""
    for _ in range(times):
        places = int(gate.places)
        for _ in range(places):
            await gate.enter(cap, 0)
        for _ in range(places):
            gate.praise(cap)
            gate.leave()


@in_loop
async def test_gate_climbs_one_place_a_round() -> None:
    gate = Gate()
    before = gate.places
    await answered(gate, 1)
    assert before < gate.places <= before * 2
    gate.slow_down(began_at=asyncio.get_running_loop().time())
    gate.places = 10.0
    await answered(gate, 1)
    assert 10 < gate.places <= 11


@in_loop
async def test_gate_does_not_climb_while_it_is_not_full() -> None:
    gate = Gate()
    for _ in range(100):
        await gate.enter(1000, 0)
        gate.praise(1000)
        gate.leave()
    assert gate.places == online.START_CONCURRENCY


@in_loop
async def test_gate_halves_once_for_all_requests_of_one_window() -> None:
    gate = Gate()
    gate.places = 16.0
    for _ in range(16):
        await gate.enter(1000, 0)
    began_at = asyncio.get_running_loop().time()
    await asyncio.sleep(0)
    for _ in range(16):
        gate.slow_down(began_at)
        gate.leave()
    assert gate.places == 8
    await gate.enter(1000, 0)
    for _ in range(9):
        gate.slow_down(asyncio.get_running_loop().time() + 1)
    assert gate.places == 1, "never below one"


@in_loop
async def test_gate_lets_nobody_in_beyond_its_places_and_keeps_the_order() -> None:
    gate = Gate()
    gate.places = 1.0
    order: list[int] = []

    async def go(number: int, cap: int) -> None:
        await gate.enter(cap, 0)
        assert gate.in_flight == 1
        order.append(number)
        await asyncio.sleep(0)
        gate.leave()

    await asyncio.gather(*[go(number, 1 + number % 3) for number in range(9)])
    assert order == list(range(9))


@in_loop
async def test_gate_gives_the_place_of_a_cancelled_request_on() -> None:
    gate = Gate()
    gate.places = 1.0
    await gate.enter(1, 0)
    first = asyncio.ensure_future(gate.enter(1, 0))
    second = asyncio.ensure_future(gate.enter(1, 0))
    await asyncio.sleep(0)
    gate.leave()  # the first has its turn by now, but has not woken up
    first.cancel()
    await second
    assert gate.in_flight == 1


@in_loop
async def test_gate_gap_is_shared_and_holds_up_nobody_else() -> None:
    loop = asyncio.get_running_loop()
    gate = Gate()
    gate.places = 100.0
    entered: list[tuple[str, float]] = []

    async def go(name: str, gap_seconds: float) -> None:
        await gate.enter(100, gap_seconds)
        entered.append((name, loop.time()))

    slow = [go("slow", 0.05) for _ in range(4)]
    fast = [go("fast", 0) for _ in range(4)]
    began_at = loop.time()
    await asyncio.gather(*slow, *fast)
    assert [name for name, _ in entered] == ["slow"] + ["fast"] * 4 + ["slow"] * 3
    assert entered[-1][1] - began_at >= 0.14


@in_loop
async def test_gate_pause_ends_after_a_minute_at_most() -> None:
    gate = Gate()
    gate.pause(3600)
    assert gate._paused_until <= asyncio.get_running_loop().time() + online.MAX_PAUSE_SECONDS


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "2"}, 2),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "-3"}, 0),
        ({"retry-after": "soon"}, None),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after-ms": "x", "retry-after": "9"}, 9),
        ({"retry-after": "Mon, 01 Jan 2024 00:00:00 GMT"}, 0),
    ],
)
def test_retry_after_is_read(headers: dict[str, str], seconds: float | None) -> None:
    assert read_retry_after(headers) == seconds


def test_retry_after_may_be_a_date() -> None:
    moment = datetime.now(timezone.utc) + timedelta(seconds=30)
    seconds = read_retry_after({"retry-after": format_datetime(moment, usegmt=True)})
    assert seconds is not None and 25 < seconds <= 30


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"error": {"message": "m", "code": 7}}', "m"),
        (b'{"type": "error", "error": {"message": "m"}}', "m"),
        (b'{"object": "error", "message": "m"}', "m"),
        (b'{"error": "m"}', "m"),
        (b"m", "m"),
        (b"", "no reason given"),
        (b"[]", "[]"),
        (b'{"error": {"message": null}}', '{"error": {"message": null}}'),
    ],
)
def test_error_replies_of_every_form_are_read(content: bytes, message: str) -> None:
    assert read_error_reply(400, {}, content).message == message


@pytest.mark.parametrize(
    ("status", "outcome", "is_overload"),
    [
        (307, None, False),
        (400, Outcome.REJECTED, False),
        (401, None, False),
        (402, None, False),
        (403, None, False),
        (404, None, False),
        (405, None, False),
        (408, Outcome.TRANSIENT, False),
        (409, Outcome.TRANSIENT, False),
        (413, Outcome.TOO_LONG, False),
        (422, Outcome.REJECTED, False),
        (429, Outcome.TRANSIENT, True),
        (500, Outcome.TRANSIENT, False),
        (503, Outcome.TRANSIENT, True),
        (529, Outcome.TRANSIENT, True),
    ],
)
def test_status_decides_the_failure(
    status: int, outcome: Outcome | None, is_overload: bool
) -> None:
    failure = failure_by_status(read_error_reply(status, {}, b"m"))
    assert (failure.outcome, failure.is_overload) == (outcome, is_overload)


@pytest.mark.parametrize(
    ("engine", "is_own", "key_env"),
    [
        ({}, True, "OWN_KEY"),
        ({"base_url": OWN + "/"}, True, "OWN_KEY"),
        ({"base_url": "https://API.example.com:443/other"}, True, "OWN_KEY"),
        ({"api_key_env": "MINE"}, True, "MINE"),
        ({"api_key_env": "none"}, True, None),
        ({"base_url": "http://api.example.com/v1"}, False, None),
        ({"base_url": "https://api.example.com.evil.org/v1"}, False, None),
        ({"base_url": "https://api.example.com:8443/v1"}, False, None),
        ({"base_url": "https://eu.example.com/v1", "api_key_env": "MINE"}, False, "MINE"),
    ],
)
def test_default_key_goes_to_the_own_origin_only(
    engine: dict[str, str], is_own: bool, key_env: str | None
) -> None:
    endpoint = plan_endpoint(engine, OWN, "OWN_KEY")
    assert (endpoint.is_own, endpoint.api_key_env) == (is_own, key_env)
    needs_a_name = not is_own and "api_key_env" not in engine
    assert bool(check_endpoint(engine, OWN)) is needs_a_name


def test_own_origin_is_named_without_the_port_that_goes_without_saying() -> None:
    (mistake,) = check_endpoint({"base_url": "http://127.0.0.1:8089/v1"}, OWN)
    assert "engine.base_url is not https://api.example.com, so the default key" in mistake.message


@pytest.mark.parametrize("text", ["key abc-123 is bad", "key sk-proj-abcd****wxyz is bad"])
def test_keys_are_scrubbed(text: str) -> None:
    assert scrub(text, "abc-123") == "key [key] is bad"
