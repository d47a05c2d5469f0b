"""The results of one batch on their way into the ledger."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from batchsql.backends.batch import BatchBackend
from batchsql.behind import Behind
from batchsql.garbage import without_collector
from batchsql.judging import Judge
from batchsql.progress import PROGRESS_SECONDS, Progress
from batchsql.types import Call, Outcome
from batchsql.warehouse.batch_shards import BatchShard
from batchsql.warehouse.ledger import Ledger
from batchsql.warehouse.shards import Attempt

_REFUSED = "every request is refused"


class Ingest:
    """Takes the results of one shard, of as many downloads as it needs, each line once.

    ``members`` are the requests still without a result, with the tries they had. ``copied`` are
    those that were freed to be asked online too, whose lines are recorded all the same. ``flush``
    writes up to ``max_rows`` tries and is told how many of them are of ``copied``.
    """

    def __init__(
        self,
        ledger: Ledger,
        backend: BatchBackend,
        shard: BatchShard,
        judge: Judge,
        flush: Callable[[BatchShard, list[Attempt], int], None],
        *,
        max_rows: int,
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self.members = ledger.read_members(shard.shard_id)
        self.copied = ledger.read_copied(shard.shard_id) if shard.copied else {}
        self.ok = self.failed = self.refused = self.repeated = self.unknown = 0
        self.refusal: str | None = None
        self._backend = backend
        self._shard = shard
        self._judge = judge
        self._flush = flush
        self._max_rows = max_rows
        self._say = say
        self._clock = clock
        # What a collection that broke off has written already comes again, and is no news.
        self._written = ledger.read_handled(shard.shard_id)
        self._seen: set[str] = set()

    @property
    def is_complete(self) -> bool:
        """Whether everything that was asked for is written, also what was freed for copies."""
        return not self.members and self.copied.keys() <= self._written

    def run(self, call: Call) -> None:
        """Fetch the results and write those of requests that are still claimed.

        Raises:
            BatchGoneError, ProviderBusyError: as ``BatchBackend.fetch``.
        """
        shard = self._shard
        pending: list[Attempt] = []
        self._seen = set()
        self.repeated = self.unknown = 0
        started = shown = self._clock()
        with (
            tempfile.TemporaryDirectory(prefix="batchsql-") as folder,
            without_collector(),
            Behind() as behind,
        ):
            for line in self._backend.fetch(shard.provider_batch_id or "", Path(folder), call):
                key = line.completion.request_key
                tries = self.members.get(key) or self.copied.get(key)
                if tries is None or key in self._seen or key in self._written:
                    self._count_other(key)
                    continue
                self._seen.add(key)
                pending.append(self._judge.attempt(line.completion, shard.shard_id, tries))
                if len(pending) >= self._max_rows:
                    behind.do(self._write, pending)
                    pending = []
                    if self._clock() - shown >= PROGRESS_SECONDS:
                        shown = self._clock()
                        done = self.ok + self.failed
                        progress = Progress(done, shard.requests, shown - started, "results")
                        self._say(str(progress))
            behind.do(self._write, pending)

    def _count_other(self, key: str) -> None:
        if key in self._seen:
            self.repeated += 1
        elif key in self._written:
            self._seen.add(key)
        else:
            self.unknown += 1

    def _write(self, attempts: list[Attempt]) -> None:
        """Write a block, while ``run`` makes the next one: a key of this one is in ``_seen``."""
        if not attempts:
            return
        copies = sum(attempt.request_key in self.copied for attempt in attempts)
        self._flush(self._shard, attempts, copies)
        for attempt in attempts:
            self.members.pop(attempt.request_key, None)
            self._written.add(attempt.request_key)
            if attempt.outcome is Outcome.OK:
                self.ok += 1
                continue
            self.failed += 1
            if attempt.outcome is Outcome.REJECTED and (attempt.error or "").startswith(_REFUSED):
                self.refused += 1
                self.refusal = attempt.error
