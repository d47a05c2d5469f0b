"""vLLM on a Ray that this test starts: two engines, of which some are killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("ray")

from batchsql.backends import ray_pool, vllm_ray
from batchsql.backends import vllm as vllm_backend
from batchsql.backends.base import Capabilities
from batchsql.backends.ray_engine import EnginePlan
from batchsql.backends.vllm_ray import RayBackend, open_engine
from batchsql.declare.returns import parse_returns
from batchsql.errors import SystemicError
from batchsql.types import Call, Completion, FinishReason, ModelRef, Outcome, Request
from batchsql.validate.structure import AnswerValidator
from tests.support import lean
from tests.support.project import duckdb_target
from tests.vllm.asking import ALL_KEYWORDS, LABEL, ask, call_for, complete

# Raised by vLLM, torch, transformers and Ray as they are imported.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

SLOTS = 16
ACTORS = 2
IN_PROCESS = {"max_model_len": 512, "max_num_seqs": SLOTS}
ENGINE = {**IN_PROCESS, "executor": "ray", "ray_address": "local", "ray_actors": ACTORS}
STORY = {"story": {"type": "string", "minLength": 300}}
ENGINE_ACTOR = "ray::MapWorker"


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    """Nothing of Ray is left when this module's tests are over."""
    vllm_backend._close_all()  # engines of other modules' tests would be counted as Ray's
    others = {pid for pid, _ in processes()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # or whatever runs beside comes first
        patch.setattr(ray_pool, "LOST_SECONDS", 10.0)
        yield
        ours = {pid for pid, _ in processes()} - others
        vllm_ray.close_pools()
    end = time.monotonic() + 20
    # Ray's agents look for their parent once in a while only.
    while (left := running(ours)) and time.monotonic() < end:
        if all(name.endswith("Agent") for name in left.values()):
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
    assert left == {}


@pytest.fixture(scope="module")
def backend(checkpoint: Path) -> RayBackend:
    return open_on_ray(checkpoint)


def open_on_ray(checkpoint: Path, root: Path | None = None, **options: Any) -> RayBackend:
    opened = open_engine(
        ModelRef("vllm", str(checkpoint)), {**ENGINE, **options}, root or Path.cwd()
    )
    assert isinstance(opened, RayBackend)
    return opened


def processes(prefix: str = "", of: int | None = None) -> list[tuple[int, str]]:
    """Return what a process, this one, has started, and what that has, by pid and command."""
    listed = subprocess.run(
        ["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True
    )
    children: dict[int, list[tuple[int, str]]] = {}
    for line in listed.stdout.splitlines()[1:]:
        pid, parent, command = line.split(None, 2)
        children.setdefault(int(parent), []).append((int(pid), command))
    found, todo = [], [of or os.getpid()]
    while todo:
        for pid, command in children.get(todo.pop(), []):
            found.append((pid, command))
            todo.append(pid)
    return [(pid, command) for pid, command in found if command.startswith(prefix)]


def engine_cores(of: int | None = None) -> list[int]:
    """Return the engines' own processes, which Ray's actors have started, and their workers.

    The first is an engine's. Not each of them has set its title.
    """
    actors = [pid for pid, _ in processes(ENGINE_ACTOR, of)]
    commands = [each for actor in actors for each in processes(of=actor)]
    return [pid for pid, command in commands if "VLLM::" in command or "spawn_main(" in command]


def running(pids: set[int]) -> dict[int, str]:
    """Return those of the processes that have not ended, with their names."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            if "\nState:\tZ" not in status:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0")
                found[pid] = command.split(b"\0")[0].decode()
    return found


def pool() -> ray_pool.RayPool:
    (found,) = (each for each in vllm_ray._pools.values() if not each._is_ending.is_set())
    return found


def take(
    backend: RayBackend, call: Call, total: int, at: int, act: Any
) -> dict[str, list[Completion]]:
    """Ask ``total`` requests, do something after ``at`` answers, and return the answers by key."""
    requests = (ask(number, f"text {number}") for number in range(total))
    found: dict[str, list[Completion]] = {}
    answers = 0
    for completion in backend.complete(requests, call, threading.Event()):
        if completion is None:
            continue
        found.setdefault(completion.request_key, []).append(completion)
        answers += 1
        if answers == at:
            act()
    return found


def check_once(found: dict[str, list[Completion]], total: int) -> None:
    assert sorted(found) == [f"{number:032x}" for number in range(total)]
    assert {len(completions) for completions in found.values()} == {1}
    assert {c.failure for completions in found.values() for c in completions} == {None}


def test_answers_fit_the_schema_and_come_once(backend: RayBackend) -> None:
    returns, _ = parse_returns(ALL_KEYWORDS)
    validator = AnswerValidator(returns)
    call = call_for(ALL_KEYWORDS, max_tokens=400, temperature=1.5, seed=3)
    found = take(backend, call, 24, 0, None)
    check_once(found, 24)
    for (completion,) in found.values():
        verdict = validator.check(completion)
        assert verdict.outcome is Outcome.OK, (verdict.error, completion.text)
        assert completion.usage.input_tokens > 20
        assert completion.model_reported == str(backend._plan.plan.model)


def test_engines_are_as_many_as_declared_and_fed_alike(backend: RayBackend) -> None:
    complete(backend, call_for(LABEL), "Wait until an engine is loaded.")
    lean.wait_for(lambda: len(pool().status.slots) == ACTORS, 300)
    assert backend.capabilities.slots == ACTORS * SLOTS
    before = [each["generated_tokens"] for each in pool().status.figures]
    check_once(take(backend, call_for(LABEL), 200, 0, None), 200)
    lean.wait_for(
        lambda: all(
            now["generated_tokens"] > then
            for now, then in zip(pool().status.figures, before, strict=True)
        )
    )
    assert backend.figures()["generated_tokens"] > sum(before)


def test_requests_are_taken_as_places_become_free(backend: RayBackend) -> None:
    taken = answered = 0

    def feed() -> Iterator[Request]:
        nonlocal taken
        for number in range(300):
            taken += 1
            yield ask(number, f"text {number}")

    for completion in backend.complete(feed(), call_for(LABEL), threading.Event()):
        if completion is not None:
            assert taken - answered <= pool().limit
            answered += 1
    assert answered == 300


def test_bad_requests_fail_alone(backend: RayBackend) -> None:
    call = call_for(LABEL, 32)
    long, broken, good = complete(backend, call, "word " * 200, "half \ud800", "It crashes.")
    assert long.failure is Outcome.TOO_LONG
    assert broken.failure is Outcome.REJECTED
    assert good.failure is None


def test_call_that_cannot_be_asked_ends_its_own_stream_only(backend: RayBackend) -> None:
    with pytest.raises(SystemicError, match="max_tokens is 512"):
        complete(backend, call_for(LABEL, 512), "Hi.")
    assert complete(backend, call_for(LABEL), "Hi.")[0].failure is None


def test_two_threads_with_different_calls_share_the_pool(checkpoint: Path) -> None:
    found: dict[str, list[Completion]] = {}

    def run(name: str, call: Call) -> None:
        found[name] = complete(open_on_ray(checkpoint), call, *(f"{name} {n}" for n in range(60)))

    threads = [
        threading.Thread(target=run, args=("labels", call_for(LABEL))),
        threading.Thread(target=run, args=("scores", call_for({"score": {"enum": [1, 2]}}))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("label" in json.loads(c.text or "") for c in found["labels"])
    assert all("score" in json.loads(c.text or "") for c in found["scores"])
    # One pool for both, and no more engines than it has.
    lean.wait_for(lambda: len(pool().status.slots) == ACTORS, 120)


def test_stop_ends_at_once_and_frees_the_engines(backend: RayBackend) -> None:
    stop = threading.Event()
    endless = (ask(number, "Tell a story.") for number in range(10_000))
    stream = backend.complete(endless, call_for(STORY, 400), stop)
    assert next(completion for completion in stream if completion is not None)
    stop.set()
    started = time.monotonic()
    list(stream)
    assert time.monotonic() - started < 1.5
    assert pool()._asked == {}
    # An engine's figures are of its last step, so each must take one.
    complete(backend, call_for(LABEL), *(f"text {number}" for number in range(6 * SLOTS)))

    def is_idle() -> bool:
        figures = backend.figures()
        return figures["running"] + figures["waiting"] == 0

    lean.wait_for(is_idle)


def test_killed_actor_costs_what_was_in_it(backend: RayBackend) -> None:
    total = 100
    before = pool().status.begun
    pid, _ = processes(ENGINE_ACTOR)[0]

    def kill() -> None:
        os.kill(pid, signal.SIGKILL)

    # Stories are long, so the actor has some in it when it dies.
    check_once(take(backend, call_for(STORY, 400), total, 20, kill), total)
    time.sleep(2 * ray_pool._WATCH_SECONDS)
    again = pool().status.begun - before - total
    assert again <= pool()._plan.plan.threads * pool()._plan.block_requests
    lean.wait_for(lambda: len(pool().status.slots) == ACTORS, 300)


def test_killed_engine_inside_an_actor_is_started_anew(backend: RayBackend) -> None:
    def kill() -> None:
        os.kill(engine_cores()[0], signal.SIGKILL)

    deaths = backend.figures()["deaths"]
    check_once(take(backend, call_for(LABEL), 200, 60, kill), 200)
    lean.wait_for(lambda: backend.figures()["deaths"] == deaths + 1, 120)


def test_actor_that_falls_silent_is_done_without(backend: RayBackend) -> None:
    """As when its node is cut off: nobody says that it died, and nobody starts it anew."""
    silent: list[int] = []

    def silence() -> None:
        silent.append(processes(ENGINE_ACTOR)[0][0])
        os.kill(silent[0], signal.SIGSTOP)

    try:
        check_once(take(backend, call_for(LABEL), 200, 60, silence), 200)
        lean.wait_for(lambda: len(pool().status.slots) == ACTORS - 1)
    finally:
        os.kill(silent[0], signal.SIGCONT)
    lean.wait_for(lambda: len(pool().status.slots) == ACTORS)


def test_dead_feeder_is_replaced_and_nothing_is_lost(backend: RayBackend) -> None:
    def kill() -> None:
        os.kill(processes("ray::Feeder")[0][0], signal.SIGKILL)

    check_once(take(backend, call_for(LABEL), 100, 30, kill), 100)


def test_dead_reader_starts_over_and_nothing_comes_twice(backend: RayBackend) -> None:
    def kill() -> None:
        os.kill(processes("ray::ReadBlocks")[0][0], signal.SIGKILL)

    before = pool().status.begun
    check_once(take(backend, call_for(LABEL), 100, 30, kill), 100)
    time.sleep(2 * ray_pool._WATCH_SECONDS)
    assert pool().status.begun == before + 100


def test_run_with_a_killed_actor_answers_every_row_once(checkpoint: Path, tmp_path: Path) -> None:
    import duckdb

    rows = 240
    job = lean.Job(
        duckdb_target(tmp_path / "warehouse.duckdb"),
        "",
        [f"ticket {number}" for number in range(rows)],
        model=f"vllm/{checkpoint}",
        engine=ENGINE,
    )
    engines = pool()
    begun = engines.status.begun

    def kill() -> None:
        lean.wait_for(lambda: engines.status.begun > begun + rows // 4, 300)
        os.kill(processes(ENGINE_ACTOR)[0][0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    counts = lean.run_job(job)
    killer.join()
    assert (counts.ok, counts.requests_sent, counts.requests_failed) == (rows, rows, 0)
    with duckdb.connect(str(tmp_path / "warehouse.duckdb")) as connection:
        found = connection.execute(
            "select count(*), count(distinct id), count(category) "
            f'from "{job.target.schema}".labels'
        ).fetchone()
        ledger = connection.execute(
            "select count(*), count(distinct request_key) "
            f"from \"{job.target.ledger}\".attempts where outcome = 'ok'"
        ).fetchone()
    assert found == (rows, rows, rows)
    assert ledger == (rows, rows)
    assert lean.run_job(job).requests_sent == 0


def test_identity_is_that_without_ray(backend: RayBackend, checkpoint: Path) -> None:
    alone = open_engine(ModelRef("vllm", str(checkpoint)), IN_PROCESS, Path.cwd())
    assert not isinstance(alone, RayBackend)
    assert backend.identity() == alone.identity()
    assert backend.version == alone.version


def test_checkpoint_that_a_node_lacks_is_systemic(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    backend = open_on_ray(copy, ray_actors=1)
    shutil.rmtree(copy)
    with pytest.raises(SystemicError, match=r"on the node .*there is no folder"):
        complete(backend, call_for(LABEL), "Hi.")


def test_checkpoint_that_differs_on_a_node_is_systemic(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    backend = open_on_ray(copy, ray_actors=1)
    template = copy / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    with pytest.raises(SystemicError, match=r"on the node .*differ"):
        complete(backend, call_for(LABEL), "Hi.")


def test_engine_that_cannot_load_is_systemic(checkpoint: Path) -> None:
    backend = open_on_ray(checkpoint, ray_actors=1, max_model_len=1_000_000)
    with pytest.raises(SystemicError, match=r"on the node .*vLLM cannot load"):
        complete(backend, call_for(LABEL), "Hi.")


def test_cluster_that_is_not_there_is_systemic(checkpoint: Path) -> None:
    vllm_ray.close_pools()
    backend = open_on_ray(checkpoint, ray_address="127.0.0.1:9")
    with pytest.raises(SystemicError, match=r"127\.0\.0\.1:9.*engine\.ray_address"):
        complete(backend, call_for(LABEL), "Hi.")


class SlowBackend:
    """An engine that needs no model, for what Ray alone can spoil."""

    version = "slow"
    capabilities = Capabilities(SLOTS, 100, stays_inside=True, is_engine=True)

    def identity(self) -> dict[str, str]:
        return {}

    def complete(
        self, requests: Iterator[Request], call: Call, stop: threading.Event
    ) -> Iterator[Completion | None]:
        for request in requests:
            time.sleep(0.02)
            yield Completion(request.request_key, "{}", FinishReason.STOP)


def open_slow(model: ModelRef, engine: Mapping[str, Any], project_root: Path) -> SlowBackend:
    return SlowBackend()


def test_node_that_vanishes_from_a_cluster_costs_what_was_on_it() -> None:
    from ray.cluster_utils import Cluster

    model = ModelRef("vllm", "slow")
    engine = EnginePlan(open_slow, model, {}, Path(), {}, (), threads=12)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(ACTORS)]
        plan = ray_pool.PoolPlan(engine, cluster.address, ACTORS, 1, block_requests=2)
        backend = RayBackend(SlowBackend(), plan)

        def vanish() -> None:
            lean.wait_for(lambda: len(pool().status.slots) == ACTORS, 120)
            cluster.remove_node(nodes[0], allow_graceful=False)

        total = 300
        check_once(take(backend, Call(model, {}, {}, 1), total, 20, vanish), total)
        time.sleep(2 * ray_pool._WATCH_SECONDS)
        assert len(pool().status.slots) == ACTORS - 1  # there is no other node for it
        assert pool().status.begun - total <= engine.threads * plan.block_requests
    finally:
        vllm_ray.close_pools()
        cluster.shutdown()


def test_killed_run_leaves_no_engine_behind(checkpoint: Path, tmp_path: Path) -> None:
    """Nobody is left of Ray either, to end them."""
    code = f"""
        import threading
        from pathlib import Path
        from tests.vllm.test_vllm_ray import LABEL, ask, call_for, open_on_ray

        backend = open_on_ray(Path({str(checkpoint)!r}), ray_actors=1)
        endless = (ask(number, "Hi.") for number in range(10**9))
        for completion in backend.complete(endless, call_for(LABEL), threading.Event()):
            if completion is not None:
                Path({str(tmp_path / "answered")!r}).touch()
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)]) as run:
        try:
            lean.wait_for(lambda: (tmp_path / "answered").exists() or run.poll() is not None, 300)
            started = {pid for pid, _ in processes(of=run.pid)}
            assert engine_cores(run.pid)
        finally:
            run.kill()

    def is_over() -> bool:
        return all(name.endswith("Agent") for name in running(started).values())

    lean.wait_for(is_over)
