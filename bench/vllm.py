"""The whole way through vLLM against one bare ``LLM.generate`` over the same prompts.

Needs an environment with vLLM, such as that of ``.ci/vllm``; on a CPU, with a checkpoint of 100 KB
made on the spot. Both sides use one loaded engine, in turns, its prefix cache emptied before each.
Our side is a whole run on DuckDB, from the SELECT to the built table.

``python -m bench.vllm`` prints four results: against the bare call; twenty shards against one;
ordered against shuffled on a template of two columns; the share of a worker's time that it spends
with the warehouse.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import duckdb
import orjson

from batchsql import shipping
from batchsql.backends import vllm_core
from batchsql.backends.registry import open_backend
from batchsql.backends.vllm import open_vllm
from batchsql.candidate import Candidate
from batchsql.declare.spec import Declaration, parse_declaration
from batchsql.pricing import open_prices
from batchsql.shipping import SendLimit
from batchsql.types import Call, ModelRef
from batchsql.warehouse.duckdb import DuckDBWarehouse
from batchsql.warehouse.ledger import Ledger
from batchsql.working import Worker
from bench.lean import open_run

PROMPT = "system:\nYou label support tickets.\nuser:\n{{ policy }}\n{{ body }}\n"
RETURNS = {
    "category": {"enum": ["billing", "bug", "how_to", "other"]},
    "urgency": {"type": "integer", "minimum": 1, "maximum": 5},
}
ENGINE = {"max_num_seqs": 32, "max_model_len": 1024}
POLICIES = 40
ROUNDS = 3
SHARDS = 20

_loaded: list[Any] = []  # the vllm.LLM itself, which our side does not keep


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rows", type=int, default=2000)
    arguments.add_argument("--rounds", type=int, default=ROUNDS)
    arguments.add_argument("--only", choices=["bare", "shards", "worker", "orders"])
    given = arguments.parse_args()
    from tests.vllm.conftest import write_checkpoint

    with tempfile.TemporaryDirectory() as name, keep_llm():
        folder = Path(name)
        write_checkpoint(folder / "model")
        bench = Bench(folder, given.rows)
        bench.ours("warm", rows=64)
        print(f"vLLM on a CPU, {given.rows:,} prompts, median of {given.rounds} turns")
        if given.only in (None, "bare"):
            compare(bench, given.rounds)
        if given.only in (None, "shards"):
            compare_shards(bench, given.rounds)
        if given.only in (None, "worker"):
            bench_worker(bench)
        _loaded.clear()
        bench.close()
        if given.only in (None, "orders"):
            compare_orders(folder, given.rows, given.rounds)


def compare(bench: Bench, rounds: int) -> None:
    bare, ours = [], []
    for number in range(rounds):
        bare.append(bench.bare())
        ours.append(bench.ours(f"whole_{number}"))
    ratio = statistics.median(bare) / statistics.median(ours)
    show("bare LLM.generate", bench.rows, bare)
    show("the whole way", bench.rows, ours, f"{ratio:.3f} of bare (bar 0.95)")


def compare_shards(bench: Bench, rounds: int) -> None:
    one, many = [], []
    for number in range(rounds):
        one.append(bench.ours(f"one_{number}", shard_requests=bench.rows))
        many.append(bench.ours(f"many_{number}", shard_requests=bench.rows // SHARDS))
    ratio = statistics.median(one) / statistics.median(many)
    show("in one shard", bench.rows, one)
    show(f"in {SHARDS} shards", bench.rows, many, f"{ratio:.3f} of one (bar 0.95)")


def compare_orders(folder: Path, rows: int, rounds: int) -> None:
    # Room for some of the beginnings, not for all: else any order would do.
    bench = Bench(folder, rows, {"kv_cache_memory_bytes": 5 << 20, "max_num_seqs": 12})
    bench.ours("warm", rows=64)
    seconds: dict[str, list[float]] = {"ordered": [], "shuffled": []}
    hits: dict[str, list[float]] = {"ordered": [], "shuffled": []}
    for number in range(rounds):
        for order in seconds:
            with shuffled() if order == "shuffled" else mock.patch.object(bench, "folder", folder):
                seconds[order].append(bench.ours(f"{order}_{number}"))
            hits[order].append(bench.hit_rate)
    ratio = statistics.median(seconds["shuffled"]) / statistics.median(seconds["ordered"])
    for order, rates in hits.items():
        more = f"prefix hits {statistics.median(rates):.2f}"
        if order == "shuffled":
            more += f"; ordered is {ratio:.2f} times as fast (bar 1)"
        show(order, rows, seconds[order], more)
    bench.close()


def bench_worker(bench: Bench) -> None:
    wall, calls = bench.worker()
    share = 100 * sum(calls.values()) / wall
    print(f"  a worker: {share:.1f} % of {wall:.1f} s with the warehouse (bar 3 %)")
    for name, seconds in sorted(calls.items(), key=lambda item: -item[1])[:4]:
        print(f"    {name:20} {100 * seconds / wall:4.1f} %")


def show(name: str, rows: int, seconds: list[float], more: str = "") -> None:
    print(f"  {name:20} {rows / statistics.median(seconds):8.1f} requests/s  {more}", flush=True)


class Bench:
    """One loaded engine and tables of rows for it. Each job has a DuckDB file of its own."""

    def __init__(self, folder: Path, rows: int, engine: dict[str, Any] | None = None) -> None:
        self.folder = folder
        self.rows = rows
        self.engine = {**ENGINE, **(engine or {})}
        self.model = ModelRef("vllm", str(folder / "model"))
        self.backend = open_vllm(self.model, self.engine, folder)
        self.hit_rate = 0.0

    def declare(self, **more: Any) -> Declaration:
        return parse_declaration(
            "bench",
            {"model": str(self.model), "prompt": PROMPT, "returns": RETURNS, "engine": self.engine,
             **more},
            unique_key="id", project_root=self.folder, check_model=lambda *_: [],
        )  # fmt: skip

    @contextmanager
    def table(self, name: str, rows: int) -> Iterator[duckdb.DuckDBPyConnection]:
        (self.folder / f"{name}.duckdb").unlink(missing_ok=True)
        with duckdb.connect(str(self.folder / f"{name}.duckdb")) as connection:
            connection.execute(
                "create table tickets as select i as id, "
                f"'policy ' || (i * 7919 % {POLICIES}) || ' ' || "
                f"repeat(md5((i * 7919 % {POLICIES})::varchar), 10) as policy, "
                "'ticket ' || i || ' ' || repeat('x', (i % 60)::int) as body "
                f"from range({rows}) t(i)"
            )
            yield connection

    def ours(self, name: str, rows: int = 0, shard_requests: int = 0) -> float:
        """Run a whole job; return its seconds, and keep the hit rate of its prompts."""
        sized: Callable[..., int] = shipping.shard_size
        if shard_requests:
            sized = lambda *_, **__: shard_requests  # noqa: E731
        self._empty_cache()
        before = dict(self.backend.figures())
        with (
            self.table(name, rows or self.rows) as connection,
            mock.patch.object(shipping, "shard_size", sized),
        ):
            run = open_run(connection, self.declare(), self.backend)
            started = time.perf_counter()
            run.prepare("select * from tickets")
            run.record()
            run.ship()
            run.reconcile()
            connection.execute(f"create table built as {run.candidate.build_sql()}")
            seconds = time.perf_counter() - started
            run.finish()
            run.close()
            assert run.counts.ok == (rows or self.rows), run.counts
        after = self.backend.figures()
        queried = after["prefix_queried_tokens"] - before.get("prefix_queried_tokens", 0.0)
        hit = after["prefix_hit_tokens"] - before.get("prefix_hit_tokens", 0.0)
        self.hit_rate = hit / queried
        return seconds

    def bare(self) -> float:
        """Do what a script does: read the rows, render them, generate, parse."""
        (llm,) = _loaded
        returns = self.declare().returns
        call = Call(self.model, {}, returns.object_schema(), returns.default_max_tokens())
        core = self.backend._host.core
        assert core is not None
        sampling = core.make_sampling(call)
        self._empty_cache()
        with self.table(f"bare_{time.monotonic_ns()}", self.rows) as connection:
            started = time.perf_counter()
            # In our own order, so that the cache helps both alike.
            rows = connection.execute(
                "select policy, body from tickets order by policy, length(body)"
            ).fetchall()
            tokenizer = llm.get_tokenizer()
            prompts = [
                tokenizer.apply_chat_template(
                    [{"role": "system", "content": "You label support tickets."},
                     {"role": "user", "content": f"{policy}\n{body}"}],
                    tokenize=False, add_generation_prompt=True,
                )
                for policy, body in rows
            ]  # fmt: skip
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            answers = [orjson.loads(output.outputs[0].text) for output in outputs]
            seconds = time.perf_counter() - started
        assert len(answers) == self.rows
        return seconds

    def worker(self) -> tuple[float, dict[str, float]]:
        """Let a worker answer a queue; return its seconds, and those in each call of the ledger."""
        spent: dict[str, float] = {}
        self._empty_cache()
        with self.table("worker", self.rows) as connection:
            run = open_run(connection, self.declare(runner="detached"), self.backend)
            run.prepare("select * from tickets")
            run.record()
            run.ship()
            run.finish()
            run.close()
            own = connection.cursor()
            warehouse = DuckDBWarehouse(own, "worker", own.close)
            ledger = Timed(Ledger(warehouse, "ledger"), spent)
            worker = Worker(
                ledger, name="bench",  # type: ignore[arg-type]
                open_backend=lambda model, engine: open_backend(model, engine, self.folder),
                engine={}, open_prices=open_prices, limit=SendLimit(None), stop=mock.Mock(
                    is_set=lambda: False, wait=time.sleep
                ),
                say=lambda message: None, warn=print,
            )  # fmt: skip
            started = time.perf_counter()
            while worker.work():
                pass
            seconds = time.perf_counter() - started
            assert worker.worked.counts.ok == self.rows
        return seconds, spent

    def _empty_cache(self) -> None:
        if _loaded:
            assert _loaded[0].reset_prefix_cache()

    def close(self) -> None:
        self.backend._host.close()


class Timed:
    """A ledger that counts the seconds spent in its methods."""

    def __init__(self, ledger: Ledger, spent: dict[str, float]) -> None:
        self._ledger = ledger
        self._spent = spent

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ledger, name)
        if not callable(found):
            return found

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return found(*args, **kwargs)
            finally:
                taken = time.perf_counter() - started
                self._spent[name] = self._spent.get(name, 0.0) + taken

        return timed


@contextmanager
def keep_llm() -> Iterator[None]:
    """Keep the ``vllm.LLM`` that our side loads, for the bare calls."""
    original = vllm_core.VllmCore.__init__

    def init(self: Any, llm: Any, lora: Any) -> None:
        _loaded[:] = [llm]
        original(self, llm, lora)

    with mock.patch.object(vllm_core.VllmCore, "__init__", init):
        yield


@contextmanager
def shuffled() -> Iterator[None]:
    """Send requests in the order of their keys, which are hashes."""
    wanted_sql = Candidate._wanted_sql

    def by_key(self: Candidate, *, is_engine: bool) -> str:
        wanted = wanted_sql(self, is_engine=is_engine)
        return f"select * from ({wanted}) w order by __batchsql_wanted"

    with mock.patch.object(Candidate, "_wanted_sql", by_key):
        yield


if __name__ == "__main__":
    main()
