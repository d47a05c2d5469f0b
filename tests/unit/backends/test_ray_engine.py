"""One engine of a pool, with a backend that fails as it is told."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Iterator

from batchsql.backends.base import Capabilities
from batchsql.backends.ray_engine import Asker, Gate
from batchsql.errors import SystemicError
from batchsql.types import Call, Completion, FinishReason, Message, ModelRef, Outcome, Request, Role

MODEL = ModelRef("vllm", "tiny")
CALL = Call(MODEL, {}, {}, 10)
PACKED = pickle.dumps(CALL)


class Backend:
    """Answers with the text itself, breaks off at the text "bad", and at every text once broken."""

    version = "test"
    capabilities = Capabilities(4, 10, stays_inside=True, is_engine=True)

    def __init__(self) -> None:
        self.is_broken = False
        self.asked: list[str] = []

    def identity(self) -> dict[str, str]:
        return {}

    def complete(
        self, requests: Iterator[Request], call: Call, stop: threading.Event
    ) -> Iterator[Completion | None]:
        assert call == CALL
        for request in requests:
            text = request.messages[0].content
            self.asked.append(text)
            yield None
            if stop.is_set():
                return
            if self.is_broken or text == "bad":
                raise SystemicError(f"the engine refuses every request: {text}")
            if text == "odd":
                raise ValueError("odd")
            yield Completion(request.request_key, text, FinishReason.STOP)


def asked(*texts: str) -> list[tuple[int, Request]]:
    return [
        (ticket, Request(f"key {ticket}", (Message(Role.USER, text),)))
        for ticket, text in enumerate(texts, 1)
    ]


def test_answers_have_tickets_and_the_requests_own_keys() -> None:
    answers = Asker(Backend()).ask(PACKED, asked("a", "b"), threading.Event())
    assert [(t, c.request_key, c.text) for t, c in answers if isinstance(c, Completion)] == [
        (1, "key 1", "a"),
        (2, "key 2", "b"),
    ]


def test_first_failure_of_a_call_is_that_of_all_its_requests() -> None:
    answers = Asker(Backend()).ask(PACKED, asked("bad", "a"), threading.Event())
    assert len(answers) == 2
    assert all(isinstance(said, str) and "refuses every request" in said for _, said in answers)


def test_bad_request_of_a_call_that_was_answered_fails_alone() -> None:
    asker = Asker(Backend())
    asker.ask(PACKED, asked("good"), threading.Event())
    answers = dict(asker.ask(PACKED, asked("a", "bad", "b", "bad"), threading.Event()))
    assert {t: c.failure for t, c in answers.items() if isinstance(c, Completion)} == {
        1: None,
        2: Outcome.REJECTED,
        3: None,
        4: Outcome.REJECTED,
    }


def test_engine_that_breaks_later_is_not_taken_for_sound() -> None:
    backend = Backend()
    asker = Asker(backend)
    asker.ask(PACKED, asked("good"), threading.Event())
    backend.is_broken = True
    ((_, said),) = asker.ask(PACKED, asked("a"), threading.Event())
    assert isinstance(said, str)
    assert backend.asked == ["good", "a", "good"]


def test_unexpected_exception_is_an_answer_too() -> None:
    ((_, said),) = Asker(Backend()).ask(PACKED, asked("odd"), threading.Event())
    assert isinstance(said, str)
    assert "ValueError: odd" in said


def test_stopped_requests_have_no_answer() -> None:
    stop = threading.Event()
    stop.set()
    assert Asker(Backend()).ask(PACKED, asked("a"), stop) == []


def test_gate_lets_one_alone_pass_before_those_who_come_together() -> None:
    seen: list[str] = []

    async def together(gate: Gate, name: str, hold: asyncio.Event) -> None:
        async with gate.together():
            seen.append(f"+{name}")
            await hold.wait()
            seen.append(f"-{name}")

    async def alone(gate: Gate, name: str) -> None:
        async with gate.alone():
            seen.append(f"+{name}")
            await asyncio.sleep(0)
            seen.append(f"-{name}")

    async def run() -> None:
        gate, hold, free = Gate(), asyncio.Event(), asyncio.Event()
        free.set()
        tasks = [
            asyncio.create_task(one)
            for one in (
                together(gate, "a", hold),
                together(gate, "b", hold),
                alone(gate, "x"),
                together(gate, "c", free),
                alone(gate, "y"),
            )
        ]
        for _ in range(10):
            await asyncio.sleep(0)
        assert seen == ["+a", "+b"]
        hold.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())
    assert seen == ["+a", "+b", "-a", "-b", "+x", "-x", "+y", "-y", "+c", "-c"]
