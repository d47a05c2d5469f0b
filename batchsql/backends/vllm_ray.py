"""vLLM on a Ray cluster: many engines behind one backend, for more rows than one machine can do."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from batchsql.backends.base import Capabilities, StreamBackend
from batchsql.backends.ray_engine import EnginePlan
from batchsql.backends.ray_pool import PoolPlan, PoolStream, RayPool, blocks_at_once, disconnect
from batchsql.backends.vllm import open_vllm
from batchsql.backends.vllm_options import (
    EXECUTOR,
    EXECUTOR_OPTIONS,
    LORA,
    ON_RAY,
    RAY_ACTORS,
    RAY_ADDRESS,
    check_vllm,
)
from batchsql.errors import MissingExtraError, SpecError
from batchsql.types import Call, Completion, ModelRef, Request

_SHARD_REQUESTS = 1000
_USUAL_SLOTS = 256
_MOST_SLOTS = 1024  # what vLLM takes on a large GPU unless it is told
_MAX_BLOCK_REQUESTS = 32
# With the time in which one engine is busy, tokens for each second are those of all engines.
_MEANS = frozenset({"kv_cache_use", "prefix_hit_rate", "busy_seconds", "load_seconds"})
_POLL_SECONDS = 0.1
_TICK_SECONDS = 1.0


def open_engine(model: ModelRef, engine: Mapping[str, Any], project_root: Path) -> StreamBackend:
    """Return the backend for a model of vLLM: in this process, or on a Ray cluster.

    Raises:
        MissingExtraError: vLLM or Ray is not installed.
        SpecError: an engine option is unknown or out of range.
        SystemicError: the checkpoint or the adapter cannot be found on this machine.
    """
    if mistakes := check_vllm(engine):
        raise SpecError(f"model {model}", mistakes)
    options = {name: value for name, value in engine.items() if name not in EXECUTOR_OPTIONS}
    if engine.get(EXECUTOR) != ON_RAY:
        return open_vllm(model, options, project_root)
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError(
            f"model {model} has engine.{EXECUTOR}: {ON_RAY}, which needs the package ray; "
            "run: pip install 'batchsql[ray]', on every node of the cluster"
        )
    gpus = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    if gpus > 1:  # all of one node, which its actor holds; vLLM would look for Ray's own
        options.setdefault("distributed_executor_backend", "mp")
    here = open_vllm(model, options, project_root)
    slots = options.get("max_num_seqs")
    block = max(1, min(_MAX_BLOCK_REQUESTS, (slots or _USUAL_SLOTS) // 4))
    at_once = blocks_at_once(slots or _MOST_SLOTS, block)
    root = project_root.resolve()
    named = (root / name for name in (model.name, options.get(LORA)) if name)
    folders = tuple(folder for folder in named if folder.is_dir())
    plan = EnginePlan(open_vllm, model, options, root, here.identity(), folders, at_once)
    address, actors = engine.get(RAY_ADDRESS), engine.get(RAY_ACTORS)
    return RayBackend(here, PoolPlan(plan, address, actors, gpus, block))


class RayBackend:
    """One model in the engines of a Ray cluster, which all threads of the process share."""

    def __init__(self, here: StreamBackend, plan: PoolPlan) -> None:
        """``here`` is a backend of one engine in this process, which is never loaded."""
        self._here = here
        self._plan = plan

    @property
    def capabilities(self) -> Capabilities:
        """The slots of the engines that are loaded, until then the declared ones."""
        pool = _pools.get(_key_of(self._plan))
        declared = self._plan.plan.engine.get("max_num_seqs", _USUAL_SLOTS)
        slots = sum(pool.status.slots) if pool else 0
        return Capabilities(
            slots or declared * (self._plan.engines or 1),
            _SHARD_REQUESTS,
            stays_inside=True,
            is_engine=True,
        )

    @property
    def version(self) -> str:
        return self._here.version

    def identity(self) -> Mapping[str, Any]:
        """Return what it is without Ray: the answers are the same."""
        return self._here.identity()

    def figures(self) -> Mapping[str, float]:
        """Return the figures of all engines together; empty until one is loaded."""
        pool = _pools.get(_key_of(self._plan))
        return _together(pool.status.figures) if pool else {}

    def complete(
        self, requests: Iterator[Request], call: Call, stop: threading.Event
    ) -> Iterator[Completion | None]:
        """Yield one completion for each request taken; see ``StreamBackend.complete``."""
        pool, stream = _open(self._plan, call)
        block_requests = self._plan.block_requests
        in_flight = 0
        is_exhausted = False
        yielded_at = time.monotonic()
        try:
            while True:
                while (
                    not is_exhausted
                    and not stop.is_set()
                    and pool.limit - in_flight >= block_requests
                ):
                    block: list[Request] = []
                    while len(block) < block_requests and not is_exhausted:
                        request = next(requests, None)
                        if request is None:
                            is_exhausted = True
                        else:
                            block.append(request)
                    if block:
                        pool.submit(stream, block)
                        in_flight += len(block)
                if in_flight == 0 and (is_exhausted or stop.is_set()):
                    return
                finished = stream.next_completion(_POLL_SECONDS)
                if finished is not None:
                    in_flight -= 1
                    yield finished
                    yielded_at = time.monotonic()
                elif stop.is_set():
                    return
                elif time.monotonic() - yielded_at >= _TICK_SECONDS:
                    yield None
                    yielded_at = time.monotonic()
        finally:
            pool.leave(stream)


def _together(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return totals as sums, and as means what would mean nothing as a sum."""
    names = sorted({name for each in figures for name in each})
    found = {name: sum(each.get(name, 0.0) for each in figures) for name in names}
    return {
        name: total / len(figures) if name in _MEANS else total for name, total in found.items()
    }


_lock = threading.Lock()
_pools: dict[str, RayPool] = {}


def _key_of(plan: PoolPlan) -> str:
    engine = plan.plan
    made = [str(engine.model), str(engine.project_root), engine.engine, engine.identity]
    return json.dumps([made, plan.address, plan.engines], sort_keys=True, default=str)


def _open(plan: PoolPlan, call: Call) -> tuple[RayPool, PoolStream]:
    """Enter a stream into the pool for a plan, which all backends of the process share."""
    stream = PoolStream(call)
    key = _key_of(plan)
    with _lock:
        pool = _pools.get(key)
        if pool is None or not pool.admit(stream):
            # Their engines take most of a GPU's memory, so two pools rarely fit.
            before = [other for other in _pools.values() if other.retire()]
            pool = RayPool(plan, before)
            pool.admit(stream)
            pool.start()
            _pools[key] = pool
        return pool, stream


def close_pools() -> None:
    """End every pool of this process, and its connection to Ray."""
    with _lock:
        pools = list(_pools.values())
        _pools.clear()
    for pool in pools:
        pool.close()
    disconnect()
