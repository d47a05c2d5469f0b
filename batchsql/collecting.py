"""Look after provider batches, whoever submitted them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from batchsql.asking import OpenPrices, parse_model, read_asked
from batchsql.backends.batch import BatchBackend
from batchsql.batches import Batches, Say
from batchsql.counting import ShipCounts
from batchsql.declare.spec import Declaration
from batchsql.errors import BatchsqlError, SystemicError
from batchsql.judging import Judge
from batchsql.types import Call, ModelRef, Route
from batchsql.warehouse.batch_shards import BatchShard
from batchsql.warehouse.ledger import Ledger

OpenBatchBackend = Callable[[ModelRef, Mapping[str, Any]], "BatchBackend | None"]
"""Opens what speaks to a provider's batches, from the model and the engine options."""


def shard_settings(declaration: Declaration) -> str:
    """Return what a shard keeps of its declaration, so that any process can look after it.

    No secret is in it: keys are named by their environment variable.
    """
    return json.dumps(
        {
            "engine": dict(declaration.engine),
            "egress": declaration.egress,
            "flush_rows": declaration.flush_rows,
            "flush_seconds": declaration.flush_seconds,
            "lease_seconds": declaration.lease_seconds,
            "max_attempts": declaration.max_attempts,
            "max_tokens": declaration.max_tokens,
            "prices": declaration.prices,
            "rescue_before_seconds": declaration.rescue_before_seconds,
            "rescue_max_usd": declaration.rescue_max_usd,
        },
        sort_keys=True,
    )


@dataclass(frozen=True, slots=True)
class Looked:
    """What looking after batches came to.

    ``moved`` are the shards that are over now, ``open`` those that are not.
    """

    moved: tuple[BatchShard, ...]
    open: tuple[BatchShard, ...]
    errors: tuple[BatchsqlError, ...]


class Collector:
    """Takes open batches as far as they go, with a backend for each account they are under."""

    def __init__(
        self,
        ledger: Ledger,
        open_backend: OpenBatchBackend,
        open_prices: OpenPrices,
        *,
        owner: str,
        say: Say,
        warn: Say,
    ) -> None:
        self._ledger = ledger
        self._open_backend = open_backend
        self._open_prices = open_prices
        self._owner = owner
        self._say = say
        self._warn = warn
        self._batches: dict[str, Batches | None] = {}
        self._judges: dict[tuple[str, str], tuple[Judge, Call]] = {}

    @property
    def counts(self) -> ShipCounts:
        """What was submitted and written until now, through all backends."""
        return sum((each.counts for each in self._opened()), ShipCounts())

    def close(self) -> None:
        """Close the connections to the providers."""
        for each in self._opened():
            each.backend.close()

    def _opened(self) -> list[Batches]:
        return [each for each in self._batches.values() if each is not None]

    def find_batches(self, model: ModelRef, engine: Mapping[str, Any]) -> Batches | None:
        """Return what brings batches of a model through their life; None where there are none."""
        key = json.dumps([str(model), dict(engine)], sort_keys=True)
        if key not in self._batches:
            backend = self._open_backend(model, engine)
            self._batches[key] = None if backend is None else self._look_after_with(backend)
        return self._batches[key]

    def _look_after_with(self, backend: BatchBackend) -> Batches:
        return Batches(
            self._ledger, backend, owner=self._owner, judge_of=self.judge_of,
            say=self._say, warn=self._warn,
        )  # fmt: skip

    def batches_of(self, model: ModelRef, engine: Mapping[str, Any]) -> Batches:
        """Return what brings batches of a model through their life.

        Raises:
            SystemicError: there are no batches under these options.
        """
        found = self.find_batches(model, engine)
        if found is None:
            raise SystemicError(
                f"model {model}: the provider {model.provider} offers no batches under the engine "
                "options given; write route: online, or the options that batches need"
            )
        return found

    def look_after(self, shards: Iterable[BatchShard]) -> Looked:
        """Take each of these shards as far as it goes now.

        An error of one account or batch does not keep others from being looked after.
        """
        moved, left, errors = [], [], []
        for shard in shards:
            try:
                model = parse_model(shard.model)
                batches = self.batches_of(model, shard.settings.get("engine", {}))
                after = batches.step(shard.shard_id)
            except BatchsqlError as error:
                errors.append(error)
                after = self._ledger.read_batch(shard.shard_id)
            if after is not None and not after.state.is_open:
                moved.append(after)
            else:
                left.append(after or shard)
        return Looked(tuple(moved), tuple(left), tuple(errors))

    def judge_of(self, shard: BatchShard) -> tuple[Judge, Call]:
        """Return what judges the answers of a shard, by the spec it was submitted under."""
        key = (shard.spec_version, json.dumps(shard.settings, sort_keys=True))
        if key not in self._judges:
            asked = read_asked(self._ledger, shard.spec_version, shard.model, shard.settings)
            backend = self.batches_of(asked.model, asked.engine).backend
            judge = asked.judge(Route.BATCH, backend.version, self._open_prices)
            self._judges[key] = judge, asked.call
        return self._judges[key]
