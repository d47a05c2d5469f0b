"""A ledger in memory and a provider that does what it is told, for tests of single batches."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from batchsql.backends.batch import (
    BatchLimits,
    BatchLine,
    BatchState,
    BatchStatus,
    CreatedBatch,
    Finding,
    MaybeCreatedError,
    ProviderBusyError,
    custom_id,
    read_clock,
)
from batchsql.batches import Batches
from batchsql.declare.returns import parse_returns
from batchsql.judging import Judge
from batchsql.types import Call, Completion, FinishReason, ModelRef, Request, Route
from batchsql.warehouse.duckdb import DuckDBWarehouse
from batchsql.warehouse.ledger import Ledger, SpecRow
from batchsql.warehouse.shards import ShardOrder, ShardState

SPEC = str(uuid.UUID(int=1))
RUN = str(uuid.uuid4())
RETURNS, _ = parse_returns({"label": {"type": "string"}})
CALL = Call(ModelRef("fake", "m"), {}, RETURNS.object_schema(), 50)
ORDER = ShardOrder(RUN, "me", "e", SPEC, "fake", "fake/m", 900.0)
HOUR, DAY = 3600.0, 24 * 3600.0
LIMITS = BatchLimits(1000, 10**6, window_seconds=DAY, retention_seconds=30 * DAY)


class Provider:
    """A batch backend whose calls do, or raise, what they are told to."""

    version = "v"

    def __init__(self, limits: BatchLimits = LIMITS) -> None:
        self.limits = limits
        self.account = "a"
        self.lines: list[BatchLine] = []
        self.discarded: list[str | None] = []
        self.calls: Counter[str] = Counter()
        self.does: dict[str, Any] = {
            "create": CreatedBatch("b"), "find": Finding(is_sure=True), "cancel": None,
            "poll": BatchStatus(BatchState.COMPLETED, "completed"),
        }  # fmt: skip

    def _do(self, name: str) -> Any:
        self.calls[name] += 1
        done = self.does.get(name)
        if isinstance(done, Exception):
            raise done
        return done

    def encoder(self, call: Call) -> Callable[[str, Request], bytes]:
        return lambda name, request: name.encode()

    def upload(self, shard: object, lines: object, call: object) -> str:
        return "file-1"

    def create(self, *_: object) -> Any:
        return self._do("create")

    def find(self, shard: object) -> Any:
        return self._do("find")

    def poll(self, batch_id: str) -> Any:
        return self._do("poll")

    def cancel(self, batch_id: str) -> Any:
        return self._do("cancel")

    def fetch(self, batch_id: str, folder: Path, call: Call) -> Iterator[BatchLine]:
        self._do("fetch")
        return iter(self.lines)

    def discard(self, batch_id: str, uploaded: str | None) -> None:
        self.discarded.append(uploaded)


class Desk:
    """A ledger of a few requests, in memory, and what brings them through batches.

    ``said`` holds all that was told, ``warned`` the warnings among it.
    """

    def __init__(
        self,
        limits: BatchLimits = LIMITS,
        requests: int = 2,
        clock: Callable[[], float] = read_clock,
    ) -> None:
        self.keys = keys = [uuid.UUID(int=100 + n).hex for n in range(requests)]
        self.database = duckdb.connect(":memory:")
        cursor = self.database.cursor()
        self.ledger = Ledger(DuckDBWarehouse(cursor, "memory", cursor.close), "ledger")
        self.ledger.migrate()
        self.ledger.write_spec(SpecRow(SPEC, 1, "fake/m", "t", "{}", "[]", "standard", "{}", "[]"))
        self.ledger.write_items(
            SPEC,
            pa.table({"item_key": keys, "request_key": keys, "unique_key": keys}),
            pa.table({"request_key": keys, "messages": ['[["user","hi"]]'] * requests}),
        )
        todo = {
            "request_key": keys,
            "position": list(range(1, requests + 1)),
            "is_urgent": [False] * requests,
        }
        self.ledger.load_todo([pa.RecordBatch.from_pydict(todo)])
        self.ledger.assign_lanes(
            lane=Route.BATCH, urgent=Route.BATCH, last_try=Route.BATCH, max_item_failures=0
        )
        self.provider = Provider(limits)
        self.said: list[str] = []
        self.warned: list[str] = []
        self.judge = Judge(RETURNS, 3, Route.BATCH, "v")
        self.batches = Batches(
            self.ledger, self.provider, owner="me", judge_of=lambda shard: (self.judge, CALL),
            say=self.said.append, warn=self._warn, clock=clock,
        )  # fmt: skip

    def _warn(self, message: str) -> None:
        self.said.append(message)
        self.warned.append(message)

    def submit(self) -> str:
        size = len(self.keys)
        done = self.batches.submit(ORDER, CALL, (), self.judge, after=0, size=size)
        assert done.shard is not None
        return done.shard.shard_id

    def bring_to(self, state: ShardState, *, until: datetime | None = None) -> str:
        """Return the id of a shard that nobody looks after now, in an open state."""
        if state is ShardState.SUBMITTING:
            self.provider.does["create"] = MaybeCreatedError("no reply")
        shard_id = self.submit()
        if state is ShardState.ENDED:
            self.provider.does["poll"] = BatchStatus(
                BatchState.COMPLETED, "completed", results_until=until
            )
            self.provider.does["fetch"] = ProviderBusyError("not now")
            self.step(shard_id)
        assert self.state(shard_id) is state
        return shard_id

    def step(self, shard_id: str) -> None:
        self.batches.step(shard_id)

    def state(self, shard_id: str) -> ShardState:
        return self.ledger.read_batch(shard_id).state

    def age(self, seconds: float) -> None:
        moments = ("created_at", "intent_at", "intent_expires_at", "submitted_at", "ended_at")
        sets = ", ".join(f"{each} = {each} - interval '{seconds} seconds'" for each in moments)
        self.database.execute(f"update ledger.shards set {sets}")

    def query(self, sql: str) -> list[Any]:
        """Return the rows of a query, or their only column."""
        rows = self.database.execute(sql).fetchall()
        return [row[0] if len(row) == 1 else row for row in rows]

    @property
    def claims(self) -> int:
        return int(self.query("select count(*) from ledger.claims")[0])

    @property
    def outcomes(self) -> list[str]:
        return self.query("select outcome from ledger.attempts order by 1")


def line(key: str, shard_id: str, text: str | None = '{"label":"a"}', **more: Any) -> BatchLine:
    """Return a line of results, by default a good answer."""
    completion = Completion(key, text, FinishReason.STOP if text else None, **more)
    return BatchLine(custom_id(key, shard_id), completion)
