"""The way onto a Ray cluster, as far as it goes without Ray and vLLM."""

from __future__ import annotations

import importlib.util
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from batchsql.backends import registry, vllm_ray
from batchsql.backends.ray_engine import EnginePlan
from batchsql.backends.ray_pool import PoolPlan, PoolStream, RayPool, blocks_at_once
from batchsql.backends.vllm_options import check_vllm
from batchsql.backends.vllm_ray import open_engine
from batchsql.errors import MissingExtraError, SpecError, SystemicError
from batchsql.types import Call, Completion, FinishReason, Message, ModelRef, Request, Role

MODEL = ModelRef("vllm", "models/tiny")
CALL = Call(MODEL, {}, {}, 10)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"executor": "process"}, []),
        ({"executor": "ray"}, []),
        ({"executor": "ray", "ray_address": "10.0.0.1:6379", "ray_actors": 4}, []),
        ({"executor": "dask"}, ["engine.executor: got 'dask'; accepted: process, ray"]),
        ({"ray_actors": 2}, ["engine.ray_actors: is for engine.executor: ray alone"]),
        (
            {"executor": "process", "ray_address": "auto"},
            ["engine.ray_address: is for engine.executor: ray alone"],
        ),
        ({"executor": "ray", "ray_actors": 0}, ["engine.ray_actors: got 0"]),
        ({"executor": "ray", "ray_address": "ray://head:10001"}, ["engine.ray_address: Ray's cl"]),
    ],
)
def test_options_for_ray_are_checked(engine: dict[str, Any], said: list[str]) -> None:
    mistakes = [str(mistake) for mistake in check_vllm(engine)]
    assert len(mistakes) == len(said)
    assert all(m.startswith(s) for m, s in zip(mistakes, said, strict=True))
    assert registry.check_model(MODEL, {}, engine) == check_vllm(engine)


def test_wrong_options_are_refused_before_anything_is_opened() -> None:
    with pytest.raises(SpecError, match="accepted: process, ray"):
        open_engine(MODEL, {"executor": "dask"}, Path())


def test_missing_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'batchsql\[ray\]'"):
        open_engine(MODEL, {"executor": "ray"}, Path())


@pytest.mark.parametrize(("slots", "block"), [(1, 1), (4, 1), (16, 4), (256, 32), (1024, 32)])
def test_engine_takes_blocks_for_its_slots_and_a_quarter_more(slots: int, block: int) -> None:
    at_once = blocks_at_once(slots, block)
    assert (at_once - 2) * block >= slots * 1.25
    assert (at_once - 3) * block < slots * 1.25 + 2


def test_figures_of_engines_are_sums_and_means() -> None:
    figures = [
        {"running": 2.0, "kv_cache_use": 0.5, "busy_seconds": 10.0},
        {"running": 4.0, "kv_cache_use": 0.1, "busy_seconds": 20.0},
    ]
    together = vllm_ray._together(figures)
    assert together == {"running": 6.0, "kv_cache_use": 0.3, "busy_seconds": 15.0}
    assert vllm_ray._together([]) == {}


class _Method:
    def __init__(self, calls: list[tuple[Any, ...]], name: str) -> None:
        self._calls, self._name = calls, name

    def remote(self, *args: Any) -> None:
        self._calls.append((self._name, *args))


class Feeder:
    """Notes what it is told, in the place of the actor."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.put = _Method(self.calls, "put")
        self.settle = _Method(self.calls, "settle")


@pytest.fixture
def pool() -> RayPool:
    plan = EnginePlan(open_engine, MODEL, {}, Path(), {}, (), 4)
    pool = RayPool(PoolPlan(plan, None, 1, 1, block_requests=2))
    pool._feeder = Feeder()
    return pool


def opened(pool: RayPool) -> PoolStream:
    stream = PoolStream(CALL)
    assert pool.admit(stream)
    return stream


def requests(*keys: str) -> list[Request]:
    return [Request(key, (Message(Role.USER, key),)) for key in keys]


def answered(key: str) -> Completion:
    return Completion(key, "{}", FinishReason.STOP)


def put(pool: RayPool) -> list[tuple[list[int], Sequence[str]]]:
    """Return the tickets and keys of each block that the pool's feeder was given."""
    found = []
    for name, tickets, payload in (call for call in pool._feeder.calls if call[0] == "put"):
        assert name == "put"
        call, asked = pickle.loads(payload)
        assert pickle.loads(call) == CALL
        assert [ticket for ticket, _ in asked] == tickets
        found.append((tickets, [request.request_key for _, request in asked]))
    return found


def test_answer_that_comes_twice_is_given_once(pool: RayPool) -> None:
    stream = opened(pool)
    pool.submit(stream, requests("a"))
    for _ in range(2):
        pool._deliver([(1, answered("a"))])
    assert stream.next_completion(0) == answered("a")
    assert stream.next_completion(0) is None
    assert ("settle", [1], True) in pool._feeder.calls


def test_streams_that_ask_the_same_get_their_own_answers(pool: RayPool) -> None:
    one, two = opened(pool), opened(pool)
    pool.submit(one, requests("a"))
    pool.submit(two, requests("a"))
    pool._deliver([(2, answered("a"))])
    assert one.next_completion(0) is None
    assert two.next_completion(0) == answered("a")


def test_new_execution_gets_what_has_no_answer(pool: RayPool) -> None:
    one, two = opened(pool), opened(pool)
    pool.submit(one, requests("a", "b"))
    pool.submit(one, requests("c", "d"))
    pool.submit(two, requests("e"))
    pool._deliver([(2, answered("b"))])
    pool._feeder = Feeder()
    pool._put_again()
    assert sorted(put(pool)) == [([1, 3], ["a", "c"]), ([4], ["d"]), ([5], ["e"])]


def test_stream_that_leaves_is_forgotten_with_what_it_asked(pool: RayPool) -> None:
    one, two = opened(pool), opened(pool)
    pool.submit(one, requests("a", "b"))
    pool.submit(two, requests("c"))
    pool.leave(one)
    assert pool._feeder.calls[-1] == ("settle", [1, 2], False)
    pool._deliver([(1, answered("a")), (3, answered("c"))])
    assert one.next_completion(0) is None
    assert two.next_completion(0) == answered("c")


def test_pool_retires_only_without_a_stream(pool: RayPool) -> None:
    pool._feeder = None
    stream = opened(pool)
    assert not pool.retire()
    pool.leave(stream)
    assert pool.retire()
    assert not pool.admit(PoolStream(CALL))


def test_systemic_answer_ends_its_own_stream_only(pool: RayPool) -> None:
    one, two = opened(pool), opened(pool)
    pool.submit(one, requests("a"))
    pool.submit(two, requests("b"))
    pool._deliver([(1, "no chat template"), (2, answered("b"))])
    with pytest.raises(SystemicError, match="no chat template"):
        one.next_completion(0)
    assert two.next_completion(0) == answered("b")
