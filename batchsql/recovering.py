"""Bring back what a lost ledger had paid for, from the batches that providers still keep.

The custom id of a batch's line holds the request's key, which is made of what is asked. So once the
requests are rendered anew, their old answers can be told apart in any batch of the account.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchsql.backends.batch import (
    BatchBackend,
    BatchGoneError,
    BatchState,
    ListedBatch,
    ProviderBusyError,
)
from batchsql.batches import END_STATES
from batchsql.collecting import Collector
from batchsql.types import Call, ModelRef
from batchsql.warehouse.adopting import FoundBatch, adopt_batch
from batchsql.warehouse.batch_shards import BatchShard
from batchsql.warehouse.ledger import Ledger
from batchsql.warehouse.shards import ShardState

OnBatch = Callable[[int, int], None]
"""Told how many of the listed batches are looked through, and of how many."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model whose requests are recorded and may be answered in old batches.

    ``run_id`` is the run that recorded them; ``settings`` what ``shard_settings`` returns.
    """

    enrichment: str
    run_id: str
    spec_version: str
    model: ModelRef
    engine: Mapping[str, Any]
    settings: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """What was found: batches first, then the lines of those whose results were read.

    ``known`` batches are in the ledger already, ``open`` ones have not ended, ``gone`` ones have no
    results, or none any more; ``foreign`` ones hold no line that is wanted. ``answers`` and
    ``failures`` were written. Other lines are ``answered`` already, ``claimed`` by work that goes
    on, ``unmatched``, of requests that no selected model asks now, or ``others``, not of batchsql.
    """

    batches: int = 0
    recovered: int = 0
    known: int = 0
    open: int = 0
    gone: int = 0
    foreign: int = 0
    answers: int = 0
    failures: int = 0
    answered: int = 0
    claimed: int = 0
    unmatched: int = 0
    others: int = 0
    errors: tuple[str, ...] = ()

    def __add__(self, other: Recovered) -> Recovered:
        return Recovered(
            *(getattr(self, each.name) + getattr(other, each.name) for each in fields(self))
        )


def recover(
    ledger: Ledger,
    wanted: Sequence[Wanted],
    collector: Collector,
    since: datetime,
    on_batch: OnBatch = lambda done, total: None,
) -> Recovered:
    """Write the answers that batches of these models' accounts hold for requests still open.

    A batch with such answers gets a shard of its own, which is collected like that of any batch: so
    nothing is written twice, and a death in between is made up for by the next call. Sends no
    request to a model.

    Args:
        ledger: knows the requests, as ``plan`` records them.
        wanted: the models, all of this ledger.
        collector: fetches and judges; the caller closes it.
        since: batches created before are not looked at.
        on_batch: told how far it is.

    Raises:
        SystemicError: a provider refuses the key, or offers no batches.
    """
    counts: Counter[str] = Counter()
    errors: list[str] = []
    # A shard whose batch has ended, but is not collected, may be of a call that died.
    ended = {shard.provider_batch_id: shard for shard in _read_ended(ledger)}
    known = _read_known(ledger)
    # The oldest first, so that the tries of a request are written in their order.
    listed = sorted(_list(wanted, collector, since), key=lambda pair: pair[1].created_at)
    for number, (first, batch) in enumerate(listed):
        on_batch(number, len(listed))
        batch_id = batch.provider_batch_id
        if batch_id in known:
            counts["known"] += 1
            if batch_id in ended:
                errors += _collect(collector, ended[batch_id])
        elif not batch.status.state.is_final:
            counts["open"] += 1
        elif batch.status.state is BatchState.FAILED:
            counts["gone"] += 1
        else:
            try:
                lines = _count_lines(ledger, wanted, first, collector, batch)
            except BatchGoneError:
                counts["gone"] += 1
                continue
            except ProviderBusyError as error:
                errors.append(f"batch {batch_id}: {error}; it was left out, so try again later")
                continue
            counts.update(lines.counts)
            shard = None if lines.wanted is None else _adopt(ledger, collector, lines, batch)
            counts["foreign" if shard is None else "recovered"] += 1
            if shard is not None:
                errors += _collect(collector, shard)
    on_batch(len(listed), len(listed))
    shipped = collector.counts
    return Recovered(
        **counts, batches=len(listed), answers=shipped.ok, failures=shipped.tries - shipped.ok,
        errors=tuple(errors),
    )  # fmt: skip


def _read_known(ledger: Ledger) -> set[str]:
    rows = ledger.warehouse.fetch(
        ledger.sql("select provider_batch_id from {shards} where provider_batch_id is not null")
    )
    return {str(batch_id) for (batch_id,) in rows}


def _read_ended(ledger: Ledger) -> list[BatchShard]:
    return [each for each in ledger.read_open_batches() if each.state is ShardState.ENDED]


def _collect(collector: Collector, shard: BatchShard) -> list[str]:
    """Fetch and write what a shard's batch holds; return what went wrong."""
    looked = collector.look_after([shard])
    return [f"batch {shard.provider_batch_id}: {error}" for error in looked.errors]


def _list(
    wanted: Sequence[Wanted], collector: Collector, since: datetime
) -> Iterator[tuple[Wanted, ListedBatch]]:
    """Yield each batch once, with a model through whose account it is seen."""
    seen = set()
    for each in wanted:
        for batch in _backend_of(each, collector).list_batches(since):
            if batch.provider_batch_id not in seen:
                seen.add(batch.provider_batch_id)
                yield each, batch


def _backend_of(wanted: Wanted, collector: Collector) -> BatchBackend:
    return collector.batches_of(wanted.model, wanted.engine).backend


@dataclass(frozen=True, slots=True)
class _Lines:
    """What the lines of a batch are: counts, and the requests of one model that are wanted."""

    counts: Mapping[str, int]
    wanted: Wanted | None
    request_keys: pa.Array


def _count_lines(
    ledger: Ledger, wanted: Sequence[Wanted], first: Wanted, collector: Collector,
    batch: ListedBatch,
) -> _Lines:  # fmt: skip
    keys, others = _fetch_keys(_backend_of(first, collector), first.model, batch)
    account = _backend_of(first, collector).account
    by_spec = {
        each.spec_version: each
        for each in reversed(wanted)
        if _backend_of(each, collector).account == account
    }
    specs = ", ".join(f"'{each}'::uuid" for each in by_spec)
    warehouse = ledger.warehouse
    with warehouse.transaction():
        staged = warehouse.stage("lines", pa.table({"key": keys}))
        rows = warehouse.fetch(
            ledger.sql(
                "select k.key, max(case when r.request_key is null then 0 else 1 end), "
                "max(case when c.request_key is null then 0 else 1 end), i.spec_version::text "
                f"from {staged} k left join (select distinct request_key, spec_version from "
                f"{{items}} where spec_version in ({specs})) i on i.request_key = k.key::uuid "
                "left join {results} r on r.request_key = k.key::uuid "
                "left join {claims} c on c.request_key = k.key::uuid group by 1, 4"
            )
        )
    found: dict[str, list[str]] = {}
    states: dict[str, str] = {}
    for key, is_answered, is_claimed, spec_version in rows:
        if is_answered or is_claimed:
            states[key] = "answered" if is_answered else "claimed"
        elif spec_version is None:
            states[key] = "unmatched"
        else:
            found.setdefault(spec_version, []).append(key)
    # A batch was made for one spec; others may share requests with it.
    spec_version, mine = max(found.items(), key=lambda pair: len(pair[1]), default=(None, []))
    counts = Counter(states.values())
    counts["unmatched"] += len(keys) - len(states) - len(mine)
    counts["others"] = others
    return _Lines(
        counts, by_spec[spec_version] if spec_version else None, pa.array(mine, pa.string())
    )


def _fetch_keys(backend: BatchBackend, model: ModelRef, batch: ListedBatch) -> tuple[pa.Array, int]:
    """Return the request keys in a batch's results, each once, and how many ids are not ours."""
    # Only the ids are looked at, so it does not matter what was asked.
    call = Call(model, {}, {"type": "object", "properties": {}}, 1)
    keys: dict[str, None] = {}
    others = 0
    with tempfile.TemporaryDirectory(prefix="batchsql-") as folder:
        for line in backend.fetch(batch.provider_batch_id, Path(folder), call):
            if line.completion.request_key:
                keys[line.completion.request_key] = None
            else:
                others += 1
    return pa.array(list(keys), pa.string()), others


def _adopt(
    ledger: Ledger, collector: Collector, lines: _Lines, batch: ListedBatch
) -> BatchShard | None:
    """Make a shard of a batch; return it, or None where its requests were claimed meanwhile."""
    assert lines.wanted is not None  # noqa: S101  by the caller
    found = FoundBatch(
        provider_batch_id=batch.provider_batch_id,
        provider_state=batch.status.provider_state,
        end_state=END_STATES[batch.status.state],
        account=_backend_of(lines.wanted, collector).account,
        run_id=lines.wanted.run_id,
        enrichment=lines.wanted.enrichment,
        spec_version=lines.wanted.spec_version,
        model=str(lines.wanted.model),
        settings=lines.wanted.settings,
    )
    if not adopt_batch(ledger, found, lines.request_keys):
        return None
    return next(each for each in _read_ended(ledger) if each.shard_id == found.shard_id)
