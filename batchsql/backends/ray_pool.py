"""A pool of engines on a Ray cluster: feeds one unbroken Ray Data execution and hands out answers.

Written against Ray 2.60. Ray is imported inside the functions that need it.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import math
import os
import pickle
import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from batchsql.backends.ray_board import Status
from batchsql.backends.ray_engine import (
    Answer,
    EnginePlan,
    Feeder,
    RayEngine,
    pack_block,
    unpack_answers,
)
from batchsql.errors import SystemicError
from batchsql.types import Call, Completion, Request

LOST_SECONDS = 30.0
MAX_EXECUTIONS = 3
_WATCH_SECONDS = 0.5
_CLOSE_SECONDS = 10.0
_CONNECT_SECONDS = 5.0
_AUTO, _LOCAL = "auto", "local"
_connecting = threading.Lock()
_connection: threading.Event | None = None  # of ours, not of the program around us


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """How a pool is made: where, how many engines, and what each of them needs.

    ``engines`` of None means as many as the cluster's GPUs hold, one without GPUs.
    ``block_requests`` is how many requests travel together.
    """

    plan: EnginePlan
    address: str | None
    engines: int | None
    gpus: int
    block_requests: int


class PoolStream:
    """What one ``complete`` waits for. Filled by the pool, read by the caller's thread."""

    def __init__(self, call: Call) -> None:
        self.call = pickle.dumps(call)
        self._done: queue.SimpleQueue[Completion | SystemicError] = queue.SimpleQueue()

    def next_completion(self, seconds: float) -> Completion | None:
        """Return the next answer, or None while there is none.

        Raises:
            SystemicError: the pool cannot go on, or this stream's call cannot be asked.
        """
        try:
            result = self._done.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(result, SystemicError):
            raise result
        return result

    def give(self, answer: Answer) -> None:
        self._done.put(SystemicError(answer) if isinstance(answer, str) else answer)

    def fail(self, error: SystemicError) -> None:
        self._done.put(error)


@dataclass(frozen=True, slots=True)
class _Asked:
    stream: PoolStream
    request: Request


class RayPool(threading.Thread):
    """One connection to Ray and the thread that takes answers out of it, until closed or broken.

    Every request is kept here until its answer is, and given to its stream once: what comes twice,
    since an engine was taken for dead, is dropped. When an execution of Ray Data breaks, whatever
    has no answer is put into another one, ``MAX_EXECUTIONS`` times in a row without an answer.
    """

    def __init__(self, plan: PoolPlan, before: Sequence[RayPool] = ()) -> None:
        """``before`` are pools that end, and are waited for."""
        super().__init__(name="batchsql-ray", daemon=True)
        self._plan = plan
        self._before = before
        self._lock = threading.Lock()
        self._streams: set[PoolStream] = set()
        self._asked: dict[int, _Asked] = {}
        self._tickets = itertools.count(1)
        self._feeder: Any = None
        self._engines: list[Any] = []
        self._is_ending = threading.Event()
        self._status = Status()
        self._executions = 0

    @property
    def status(self) -> Status:
        """How the engines did half a second ago."""
        return self._status

    @property
    def limit(self) -> int:
        """How many requests of one stream are handed to the pool at once.

        A quarter more than the engines' slots, and two blocks for each, since a place is free only
        when the last request of its block has its answer.
        """
        spare = 2 * self._plan.block_requests
        return sum(slots + max(2, slots // 4) + spare for slots in self._status.slots)

    def admit(self, stream: PoolStream) -> bool:
        """Enter a stream, from any thread; return False when the pool has ended."""
        with self._lock:
            if self._is_ending.is_set():
                return False
            self._streams.add(stream)
            return True

    def submit(self, stream: PoolStream, requests: Sequence[Request]) -> None:
        """Hand a block of requests to the engines."""
        with self._lock:
            asked = [(next(self._tickets), request) for request in requests]
            self._asked.update((ticket, _Asked(stream, request)) for ticket, request in asked)
            self._put(stream.call, asked)

    def leave(self, stream: PoolStream) -> None:
        """Forget a stream and what it asked, from any thread. The engines break it off."""
        with self._lock:
            self._streams.discard(stream)
            unwanted = [t for t, asked in self._asked.items() if asked.stream is stream]
            for ticket in unwanted:
                del self._asked[ticket]
            self._settle(unwanted, is_answered=False)

    def retire(self) -> bool:
        """End unless a stream is open; return whether it does."""
        with self._lock:
            if self._streams:
                return False
            self._is_ending.set()
        self._kill_feeder()
        return True

    def close(self) -> None:
        """End, whatever is open, and wait for it some seconds."""
        self._end(SystemicError("the engines were closed while they were asked"))
        self.join(_CLOSE_SECONDS)

    def run(self) -> None:
        failure = SystemicError("the engines were closed while they were asked")
        try:
            for pool in self._before:
                pool.join(_CLOSE_SECONDS)
            connect(self._plan.address, self._plan.engines)
            atexit.register(self.close)  # before Ray's own end, which it does not outlive
            while not self._is_ending.is_set():
                self._execute()
        except SystemicError as error:
            failure = error
        except Exception as error:  # noqa: BLE001  raised again in the streams' threads
            failure = SystemicError(f"Ray cannot be used: {type(error).__name__}: {_short(error)}")
            failure.__cause__ = error
        finally:
            self._end(failure)
            atexit.unregister(self.close)

    def _execute(self) -> None:
        """Run one execution of Ray Data until the pool ends.

        Raises:
            SystemicError: it broke, and so did those before it.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if not ray.is_initialized():
            raise SystemicError("the program around this one has closed its connection to Ray")
        engines = _count_engines(self._plan)
        here = ray.get_runtime_context().get_node_id()
        feeder = (
            ray.remote(Feeder)
            .options(  # beside the run, whose end would be its own anyway
                num_cpus=0,
                max_concurrency=10_000,
                scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
            )
            .remote(LOST_SECONDS, 3 * engines + 3)
        )
        with self._lock:
            self._feeder = feeder
            self._put_again()
        if self._is_ending.is_set():
            self._kill_feeder()
        over = threading.Event()
        threading.Thread(
            target=self._watch, args=(feeder, over), name="batchsql-ray-watch", daemon=True
        ).start()
        cause = "it ended"
        self._executions += 1
        try:
            for answers in _answers_of(self._plan, feeder, engines):
                self._deliver(unpack_answers(answers))
        except Exception as error:  # noqa: BLE001  tried again, and then raised
            cause = f"{type(error).__name__}: {_short(error)}"
        finally:
            over.set()
            self._status = Status()
            self._kill_feeder()
            self._kill_engines()
        if self._executions >= MAX_EXECUTIONS and not self._is_ending.is_set():
            raise SystemicError(
                f"Ray Data broke off {self._executions} times without an answer in between: "
                f"{cause}; see Ray's logs for the reason"
            )

    def _watch(self, feeder: Any, over: threading.Event) -> None:
        """Learn which engines are loaded, and whether the pool can go on."""
        import ray

        while not over.wait(_WATCH_SECONDS):
            try:
                status, self._engines = ray.get(feeder.status.remote())
            except Exception:  # noqa: BLE001  the execution ends of it too
                return
            if over.is_set():
                return
            self._status = status
            if status.failure is not None:
                self._end(SystemicError(status.failure))
                return

    def _deliver(self, answers: Sequence[tuple[int, Answer]]) -> None:
        is_answered = False
        with self._lock:
            for ticket, answer in answers:
                asked = self._asked.pop(ticket, None)
                if asked is not None:
                    asked.stream.give(answer)
                is_answered |= isinstance(answer, Completion) and answer.failure is None
            self._settle([ticket for ticket, _ in answers], is_answered=is_answered)
        if is_answered:
            self._executions = 0

    def _put(self, call: bytes, asked: Sequence[tuple[int, Request]]) -> None:
        if self._feeder is not None:
            tickets = [ticket for ticket, _ in asked]
            self._feeder.put.remote(tickets, pack_block(call, asked))

    def _put_again(self) -> None:
        """Give everything that has no answer to a new feeder."""
        for stream in self._streams:
            left = [
                (t, asked.request) for t, asked in self._asked.items() if asked.stream is stream
            ]
            for start in range(0, len(left), self._plan.block_requests):
                self._put(stream.call, left[start : start + self._plan.block_requests])

    def _settle(self, tickets: Sequence[int], *, is_answered: bool) -> None:
        if tickets and self._feeder is not None:
            self._feeder.settle.remote(tickets, is_answered)

    def _end(self, failure: SystemicError) -> None:
        with self._lock:
            self._is_ending.set()
            streams, self._streams = self._streams, set()
            self._asked.clear()
        for stream in streams:
            stream.fail(failure)
        self._kill_feeder()

    def _kill_feeder(self) -> None:
        """End the execution at once: its reader fails, and with it everything."""
        if self._feeder is not None:
            import ray

            with contextlib.suppress(Exception):
                ray.kill(self._feeder)

    def _kill_engines(self) -> None:
        """Make room for other engines. Ray Data leaves its actors to whoever still refers to them,
        such as a traceback in a log.
        """
        import ray

        engines, self._engines = self._engines, []
        for engine in engines:
            with contextlib.suppress(Exception):
                ray.kill(engine)


def connect(address: str | None, engines: int | None) -> None:
    """Connect this process to a Ray cluster, or start one for it alone.

    Without an address it is that of ``RAY_ADDRESS``, or of what ``ray start`` has started on this
    machine.

    Raises:
        SystemicError: there is no cluster at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report to its makers
    import ray
    import ray.data

    global _connection
    outcome: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    over = threading.Event()

    def keep() -> None:
        try:
            _connect(address or os.environ.get("RAY_ADDRESS"), engines)
        except Exception as error:  # noqa: BLE001  raised again in the caller's thread
            outcome.put(error)
            return
        outcome.put(None)
        over.wait()

    with _connecting:
        if not ray.is_initialized():
            # Linux ends the processes of a Ray that is started here with the thread, not only with
            # the process, that started them.
            threading.Thread(target=keep, name="batchsql-ray-keep", daemon=True).start()
            if (error := outcome.get()) is not None:
                raise error
            _connection = over


def _connect(chosen: str | None, engines: int | None) -> None:
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if chosen is None or chosen == _LOCAL:
        cpus = max(os.cpu_count() or 1, engines or 1)
        try:
            with _loopback_only():
                ray.init(address=chosen, num_cpus=cpus, include_dashboard=False, **quiet)
            return
        except ValueError:  # there is a cluster of ray start, which takes no such arguments
            if chosen == _LOCAL:
                raise
    elif chosen != _AUTO:
        _check_reachable(chosen)
    try:
        ray.init(address=chosen, **quiet)
    except Exception as error:
        raise SystemicError(
            f"no Ray cluster is found at the address {chosen or _AUTO} ({type(error).__name__}: "
            f"{_short(error)}); start one with ray start --head, run this on one of its nodes, or "
            "set engine.ray_address"
        ) from error


def disconnect() -> None:
    """End the connection to Ray that ``connect`` made, and a Ray that it started."""
    global _connection
    if _connection is not None:
        import ray

        ray.shutdown()
        _connection.set()
        _connection = None


def _check_reachable(address: str) -> None:
    """Fail at once where nobody listens; Ray itself tries for a minute and may end the process."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise SystemicError(
            f"no Ray cluster answers at the address {address} ({error}); start one with ray start "
            "--head, and set engine.ray_address or RAY_ADDRESS to its host:port"
        ) from error


@contextlib.contextmanager
def _loopback_only() -> Iterator[None]:
    """Have a Ray that is started listen to this machine only, as it does on a Mac."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _quieten() -> None:
    """Keep Ray off the terminal: what matters of it is raised, the rest is in its own logs."""
    from ray._private import worker

    if _connection is not None:  # it prints the deaths of actors to stdout, which belongs to dbt
        worker.print_to_stdstream = lambda *args, **kwargs: None
    for handler in logging.getLogger("ray.data").handlers:
        if type(handler).__name__ == "PlainRayHandler":
            handler.setLevel(logging.CRITICAL)


def _count_engines(plan: PoolPlan) -> int:
    """Return how many engines the pool has.

    Raises:
        SystemicError: the cluster has GPUs, but no node has as many as one engine needs.
    """
    import ray

    nodes = [node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]]
    if not any(nodes):
        return plan.engines or 1
    fitting = sum(int(gpus // plan.gpus) for gpus in nodes)
    if not fitting:
        raise SystemicError(
            f"an engine needs {plan.gpus} GPUs on one node (engine.tensor_parallel_size times "
            f"engine.pipeline_parallel_size), but no node of the cluster has more than "
            f"{max(nodes):g}; lower them, or add a node"
        )
    return plan.engines or fitting


def _answers_of(plan: PoolPlan, feeder: Any, engines: int) -> Iterator[bytes]:
    """Run the dataset and yield what the engines' tasks have made, in the order they finish."""
    import pyarrow as pa
    import ray
    from ray.data import ActorPoolStrategy, Datasource, ReadTask
    from ray.data.block import BlockMetadata

    schema = pa.schema([("index", pa.int64()), ("payload", pa.binary())])

    def read() -> Iterator[Any]:
        for index in itertools.count():
            payload = ray.get(feeder.next_payload.remote(index))
            yield pa.table({"index": [index], "payload": [payload]}, schema=schema)

    class Blocks(Datasource):  # type: ignore[misc]
        """What the feeder holds, in one task that goes on as long as the pool does."""

        @property
        def supports_distributed_reads(self) -> bool:
            return False  # beside the feeder

        def estimate_inmemory_data_size(self) -> int | None:
            return None

        def get_read_tasks(self, *args: Any, **kwargs: Any) -> list[Any]:
            unknown = BlockMetadata(
                num_rows=None, size_bytes=None, input_files=None, exec_stats=None
            )
            return [ReadTask(read, unknown)]

    at_once = plan.plan.threads
    needs = {"num_gpus": plan.gpus} if ray.cluster_resources().get("GPU") else {}
    dataset = ray.data.read_datasource(Blocks(), override_num_blocks=1, num_cpus=0).map_batches(
        RayEngine,
        fn_constructor_args=(plan.plan, feeder),
        batch_size=None,
        batch_format="pyarrow",
        zero_copy_batch=True,
        compute=ActorPoolStrategy(
            size=engines,
            max_tasks_in_flight_per_actor=at_once,
            max_concurrent_calls_per_actor=at_once,
        ),
        num_cpus=1,
        **needs,
    )
    context = dataset.context
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.target_max_block_size = 1  # or small blocks would wait to become a large one
    _quieten()
    for bundle in dataset.iter_internal_ref_bundles():
        for block in ray.get(list(bundle.block_refs)):
            yield from block["answers"].to_pylist()


def blocks_at_once(slots: int, block_requests: int) -> int:
    """Return how many blocks an engine with so many slots works on at once."""
    return math.ceil((slots + max(2, slots // 4)) / block_requests) + 2


def _short(error: BaseException | None) -> str:
    return " ".join(str(error).split())[:500]
