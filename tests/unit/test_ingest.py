"""The results of a batch on their way into the ledger: a block at a time, whatever their number."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from batchsql.backends.batch import BatchBackend, BatchLine
from batchsql.ingest import Ingest
from batchsql.judging import Judge
from batchsql.types import Call, Route
from batchsql.warehouse.batch_shards import BatchShard
from batchsql.warehouse.ledger import Ledger
from batchsql.warehouse.shards import Attempt, Tries
from tests.support.desk import CALL, RETURNS, line

SHARD_ID = str(uuid.UUID(int=7))
MAX_ROWS = 10


class Counted:
    """A backend that counts the lines taken of its results."""

    def __init__(self, keys: list[str]) -> None:
        self.keys = keys
        self.taken = 0

    def fetch(self, batch_id: str, folder: Path, call: Call) -> Iterator[BatchLine]:
        for key in self.keys:
            self.taken += 1
            yield line(key, SHARD_ID)


@pytest.mark.parametrize("rows", [100, 105])
def test_no_more_than_two_blocks_of_results_are_in_memory(rows: int) -> None:
    keys = [uuid.UUID(int=1000 + n).hex for n in range(rows)]
    backend = Counted(keys)
    ledger = SimpleNamespace(
        read_members=lambda shard_id: {key: Tries(0, 0, 0) for key in keys},
        read_copied=lambda shard_id: {},
        read_handled=lambda shard_id: set(),
    )
    shard = SimpleNamespace(
        shard_id=SHARD_ID, copied=None, requests=rows, provider_batch_id="b"
    )  # fmt: skip
    written: list[str] = []
    ahead: list[int] = []

    def flush(shard: BatchShard, attempts: list[Attempt], copies: int) -> None:
        ahead.append(backend.taken - len(written))
        assert len(attempts) <= MAX_ROWS
        written.extend(attempt.request_key for attempt in attempts)

    ingest = Ingest(
        cast(Ledger, ledger), cast(BatchBackend, backend), cast(BatchShard, shard),
        Judge(RETURNS, 3, Route.BATCH, "v"), cast(Any, flush),
        max_rows=MAX_ROWS, say=lambda message: None, clock=lambda: 0.0,
    )  # fmt: skip
    ingest.run(CALL)
    assert written == keys
    assert (ingest.ok, ingest.members) == (rows, {})
    # While one block is written, the next one is made.
    assert max(ahead) <= 2 * MAX_ROWS
