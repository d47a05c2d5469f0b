"""Feeding and restarting an engine, with one that lives in the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from batchsql.backends import engine_host, engine_owner
from batchsql.backends.engine_host import EngineHost, in_flight_limit
from batchsql.backends.engine_owner import EngineCore, Finished, Prompt, RefusedError
from batchsql.errors import SystemicError
from batchsql.types import Call, Completion, FinishReason, Outcome, Request

SLOTS = 4
GOOD, POISON, REFUSED, NEVER = 1, 2, 3, 4


class Engine:
    """Answers at each step what runs in its slots, and dies while it works on a poison."""

    max_model_len = 100
    tokenizer: Any = None

    def __init__(self, max_num_seqs: int = SLOTS) -> None:
        self.max_num_seqs = max_num_seqs
        self.queued: dict[str, int] = {}
        self.most_at_once = 0
        self.aborted: list[str] = []
        self.is_closed = False
        self.die_at_step: int | None = None
        self.steps = 0
        self.steps_per_answer = 1
        self.in_hand: list[int] = []  # how many requests it had at each step

    def make_sampling(self, call: Call) -> None: ...

    def add(self, engine_id: str, token_ids: Sequence[int], sampling: Any) -> None:
        if token_ids[0] == REFUSED:
            raise RefusedError("not like this")
        self.queued[engine_id] = token_ids[0]

    def step(self) -> list[Finished]:
        self.steps += 1
        self.in_hand.append(len(self.queued))
        running = list(self.queued)[: self.max_num_seqs]
        self.most_at_once = max(self.most_at_once, len(running))
        if self.steps == self.die_at_step or any(self.queued[key] == POISON for key in running):
            raise RuntimeError("out of memory")
        if self.steps % self.steps_per_answer:
            return []
        done = [key for key in running if self.queued[key] != NEVER]
        for key in done:
            del self.queued[key]
        return [Finished(key, "{}", FinishReason.STOP) for key in done]

    def abort(self, engine_ids: Sequence[str]) -> None:
        self.aborted += engine_ids
        for key in engine_ids:
            self.queued.pop(key, None)

    def figures(self) -> Mapping[str, float]:
        return {"steps": float(self.steps)}

    def close(self) -> None:
        self.is_closed = True


class Engines:
    """Starts engines, each with half of the slots of the one before, and remembers them."""

    def __init__(
        self, prepare: Callable[[Engine, int], None] = lambda engine, deaths: None
    ) -> None:
        self.started: list[Engine] = []
        self.deaths: list[int] = []
        self._prepare = prepare

    def __call__(self, deaths: int) -> Engine:
        engine = Engine(max(1, SLOTS >> deaths))
        self._prepare(engine, deaths)
        self.started.append(engine)
        self.deaths.append(deaths)
        return engine


@pytest.fixture
def opened() -> Iterator[list[EngineHost]]:
    hosts: list[EngineHost] = []
    yield hosts
    for host in hosts:
        host.close()


@pytest.fixture
def host_of(opened: list[EngineHost]) -> Callable[[Callable[[int], EngineCore]], EngineHost]:
    def make(start: Callable[[int], EngineCore]) -> EngineHost:
        host = EngineHost(start, "vllm/tiny", pause_seconds=0)
        opened.append(host)
        return host

    return make


HostOf = Callable[[Callable[[int], EngineCore]], EngineHost]


def prepare(core: EngineCore, request: Request) -> Prompt:
    return Prompt(request, [int(request.request_key.split("-")[0])], None)


def requests(*kinds: int) -> list[Request]:
    return [Request(f"{kind}-{number}", ()) for number, kind in enumerate(kinds)]


def complete(host: EngineHost, asked: Sequence[Request]) -> dict[str, Completion]:
    found = [c for c in host.complete(iter(asked), prepare, threading.Event()) if c is not None]
    by_key = {completion.request_key: completion for completion in found}
    assert len(by_key) == len(found)
    return by_key


def test_every_request_is_answered_once_by_one_engine(host_of: HostOf) -> None:
    engines = Engines()
    host = host_of(engines)
    for _ in range(2):
        found = complete(host, requests(*[GOOD] * 50))
        assert len(found) == 50
        assert all(c.text == "{}" and c.model_reported == "vllm/tiny" for c in found.values())
    assert engines.deaths == [0]
    assert engines.started[0].most_at_once == SLOTS
    assert host.figures()["steps"] == engines.started[0].steps


def test_place_of_an_answer_is_filled_before_it_is_handed_out(host_of: HostOf) -> None:
    taken, answered = 0, 0

    def feed() -> Iterator[Request]:
        nonlocal taken
        for request in requests(*[GOOD] * 60):
            taken += 1
            yield request

    for completion in host_of(Engines()).complete(feed(), prepare, threading.Event()):
        if completion is not None:
            limit = in_flight_limit(SLOTS)
            assert taken - answered in (limit, limit + 1) or taken == 60
            answered += 1
    assert answered == 60


def test_request_that_cannot_be_asked_is_given_back_alone(host_of: HostOf) -> None:
    def prepare_some(core: EngineCore, request: Request) -> Prompt | Completion:
        if request.request_key.endswith("3"):
            return Completion(request.request_key, None, None, failure=Outcome.TOO_LONG)
        return prepare(core, request)

    stream = host_of(Engines()).complete(
        iter(requests(*[GOOD] * 10)), prepare_some, threading.Event()
    )
    failures = {c.request_key: c.failure for c in stream if c is not None}
    assert len(failures) == 10
    assert {key for key, failure in failures.items() if failure} == {f"{GOOD}-3"}


def test_dead_engine_is_started_with_less_and_asked_again(host_of: HostOf) -> None:
    def prepare_engine(engine: Engine, deaths: int) -> None:
        engine.die_at_step = 3 if deaths == 0 else None

    engines = Engines(prepare_engine)
    found = complete(host_of(engines), requests(*[GOOD] * 30))
    assert len(found) == 30
    assert all(completion.failure is None for completion in found.values())
    assert engines.deaths == [0, 1]
    assert engines.started[0].is_closed
    assert [engine.max_num_seqs for engine in engines.started] == [SLOTS, SLOTS // 2]
    assert engines.started[1].most_at_once == SLOTS // 2  # the fullness returns


def test_what_an_engine_died_on_is_asked_alone_while_the_others_wait(host_of: HostOf) -> None:
    most_taken = threading.Event()

    def prepare_engine(engine: Engine, deaths: int) -> None:
        if deaths == 0:
            engine.die_at_step = 1
        else:
            assert most_taken.wait(30)
        engine.steps_per_answer = 2

    def feed() -> Iterator[Request]:
        asked = requests(*[GOOD] * in_flight_limit(SLOTS))
        yield asked[0]
        while not engines.started or not engines.started[0].steps:
            most_taken.wait(0.001)  # until the engine has died on the first
        yield from asked[1:-1]
        most_taken.set()
        yield asked[-1]

    engines = Engines(prepare_engine)
    stream = host_of(engines).complete(feed(), prepare, threading.Event())
    assert sum(completion is not None for completion in stream) == in_flight_limit(SLOTS)
    first, second, *later = engines.started[1].in_hand
    assert (first, second) == (1, 1)
    assert max(later) > 1


@pytest.mark.parametrize("place", [0, 2, 20, 29])
def test_prompt_that_kills_the_engine_twice_is_rejected_alone(host_of: HostOf, place: int) -> None:
    kinds = [GOOD] * 30
    kinds[place] = POISON
    engines = Engines()
    found = complete(host_of(engines), requests(*kinds))
    assert len(found) == 30
    failed = {key: c for key, c in found.items() if c.failure is not None}
    assert list(failed) == [f"{POISON}-{place}"]
    (completion,) = failed.values()
    assert completion.failure is Outcome.REJECTED
    assert "the engine died on this prompt 2 times" in (completion.error or "")
    assert engines.deaths == [0, 1, 0]


def test_poison_of_one_stream_leaves_the_other_whole(host_of: HostOf) -> None:
    host = host_of(Engines())
    found: dict[int, dict[str, Completion]] = {}

    def run(name: int, kinds: list[int]) -> None:
        found[name] = complete(host, [Request(f"{k}-{name}{n}", ()) for n, k in enumerate(kinds)])

    threads = [
        threading.Thread(target=run, args=(1, [GOOD] * 20)),
        threading.Thread(target=run, args=(2, [GOOD, POISON, GOOD])),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(found[1]), len(found[2])] == [20, 3]
    assert all(completion.failure is None for completion in found[1].values())
    assert sum(completion.failure is not None for completion in found[2].values()) == 1


@pytest.mark.parametrize(
    "kinds",
    [
        [GOOD] * 100 + [POISON] + [GOOD] * 100 + [POISON] + [GOOD] * 100,
        [POISON] + [GOOD] * 100 + [POISON] + [GOOD] * 100,
        [GOOD] * 100 + [POISON, POISON] + [GOOD] * 100,
        ([GOOD] * 20 + [POISON]) * 6,
    ],
    ids=["apart", "one before any answer", "neighbours", "many"],
)
def test_poisons_are_rejected_one_by_one_without_an_end(host_of: HostOf, kinds: list[int]) -> None:
    host = host_of(Engines())
    found = complete(host, requests(*kinds))
    assert len(found) == len(kinds)
    for key, completion in found.items():
        is_poison = key.startswith(str(POISON))
        assert completion.failure is (Outcome.REJECTED if is_poison else None)
        assert ("died on this prompt 2 times" in (completion.error or "")) is is_poison


def test_poisons_leave_the_engine_at_full_size_and_are_counted(host_of: HostOf) -> None:
    kinds = ([GOOD] * 40 + [POISON]) * 6 + [GOOD]
    engines = Engines()
    host = host_of(engines)
    assert len(complete(host, requests(*kinds))) == len(kinds)
    assert engines.deaths == [0] + [1, 0] * 6
    assert host.figures()["deaths"] == 12


@pytest.mark.parametrize(
    ("first_dies_at_step", "starts"),
    # The first it dies on alone is believed to be a poison if it has answered before.
    [(1, 3), (3, 5)],
    ids=["from the start", "after some answers"],
)
def test_engine_that_dies_on_everything_is_given_up(
    host_of: HostOf, first_dies_at_step: int, starts: int
) -> None:
    def prepare_engine(engine: Engine, deaths: int) -> None:
        engine.die_at_step = 1 if engines.started else first_dies_at_step

    engines = Engines(prepare_engine)
    host = host_of(engines)
    with pytest.raises(SystemicError, match=r"died 3 times.*out of memory.*max_num_seqs"):
        complete(host, requests(*[GOOD] * 50))
    assert len(engines.started) == starts
    assert all(engine.is_closed for engine in engines.started)


def test_deaths_that_nothing_explains_end_it_in_spite_of_answers(host_of: HostOf) -> None:
    def prepare_engine(engine: Engine, deaths: int) -> None:
        engine.die_at_step = 20

    engines = Engines(prepare_engine)
    with pytest.raises(SystemicError, match="died 3 times"):
        complete(host_of(engines), requests(*[GOOD] * 200))
    assert engines.deaths == [0, 1, 2]


def test_deaths_are_forgotten_after_many_answers(
    host_of: HostOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_owner, "ANSWERS_OF_A_SOUND_ENGINE", 10)

    def prepare_engine(engine: Engine, deaths: int) -> None:
        engine.die_at_step = 20 if len(engines.started) < 4 else None

    engines = Engines(prepare_engine)
    assert len(complete(host_of(engines), requests(*[GOOD] * 200))) == 200
    assert engines.deaths == [0, 1, 1, 1, 1]


def test_engine_that_cannot_be_loaded_is_tried_again_by_the_next_stream(host_of: HostOf) -> None:
    tries = []

    def start(deaths: int) -> EngineCore:
        tries.append(deaths)
        if len(tries) == 1:
            raise SystemicError("no memory")
        return Engine()

    host = host_of(start)
    with pytest.raises(SystemicError, match="no memory"):
        complete(host, requests(GOOD))
    assert len(complete(host, requests(GOOD))) == 1


def test_refusal_of_the_first_request_is_systemic_and_of_a_later_one_its_own(
    host_of: HostOf,
) -> None:
    host = host_of(Engines())
    with pytest.raises(SystemicError, match="refuses every request: not like this"):
        complete(host, requests(REFUSED, GOOD))
    found = complete(host, requests(GOOD, REFUSED, GOOD))
    assert [completion.failure for _, completion in sorted(found.items())] == [
        None, None, Outcome.REJECTED,
    ]  # fmt: skip


def test_loading_ticks_and_can_be_stopped(host_of: HostOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_host, "_TICK_SECONDS", 0.0)
    monkeypatch.setattr(engine_host, "_POLL_SECONDS", 0.001)
    go_on, stop = threading.Event(), threading.Event()

    def start(deaths: int) -> EngineCore:
        go_on.wait(60)
        return Engine()

    taken: list[Request] = []
    feed = (taken.append(request) or request for request in requests(GOOD))  # type: ignore[func-returns-value]
    stream = host_of(start).complete(feed, prepare, stop)
    assert next(stream) is None
    stop.set()
    assert list(stream) == []
    assert taken == []
    go_on.set()


def test_stopped_stream_aborts_what_is_unfinished(host_of: HostOf) -> None:
    engines, stop = Engines(), threading.Event()
    host = host_of(engines)
    stream = host.complete(iter(requests(GOOD, NEVER, NEVER)), prepare, stop)
    assert next(c for c in stream if c is not None).text == "{}"
    stop.set()
    assert [c for c in stream if c is not None] == []
    assert len(complete(host, requests(GOOD))) == 1
    assert len(engines.started[0].aborted) == 2
    assert engines.started[0].queued == {}


def test_idle_engine_is_closed_and_a_busy_one_is_not(host_of: HostOf) -> None:
    engines = Engines()
    host = host_of(engines)
    stream = host.complete(iter(requests(GOOD, NEVER)), prepare, threading.Event())
    assert next(c for c in stream if c is not None)
    host.close_if_idle()
    assert not engines.started[0].is_closed
    stream.close()  # type: ignore[attr-defined]
    host.close_if_idle()
    assert engines.started[0].is_closed
    assert host.figures() == {}
    assert len(complete(host, requests(GOOD))) == 1
    assert len(engines.started) == 2


def test_engine_is_loaded_only_after_the_one_before_has_freed_its_memory(host_of: HostOf) -> None:
    is_freeing, go_on, order = threading.Event(), threading.Event(), []

    class Slow(Engine):
        def close(self) -> None:
            is_freeing.set()
            assert go_on.wait(30)
            order.append("freed")

    def start(deaths: int) -> EngineCore:
        order.append("loaded")
        return Slow()

    host = host_of(start)
    complete(host, requests(GOOD))
    closing = threading.Thread(target=host.close_if_idle)
    closing.start()
    assert is_freeing.wait(30)
    stream = host.complete(iter(requests(GOOD)), prepare, threading.Event())
    assert next(stream) is None  # it waits
    go_on.set()
    assert [completion for completion in stream if completion is not None]
    closing.join()
    assert order == ["loaded", "freed", "loaded"]


def test_closing_ends_open_streams(host_of: HostOf) -> None:
    engines = Engines()
    host = host_of(engines)
    stream = host.complete(iter(requests(GOOD, NEVER)), prepare, threading.Event())
    assert next(c for c in stream if c is not None)
    host.close()
    with pytest.raises(SystemicError, match="closed"):
        list(stream)
    assert engines.started[0].is_closed
