"""A worker: asks what runs have put into the queues of a ledger, on the engine of its machine.

Any number of them work on one queue. Who asks a request is decided by claims under leases, as in a
run, so a worker that dies costs what it had not written, and a worker that was silent for longer
than its lease writes nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

import orjson

from batchsql.asking import Asked, OpenPrices, read_asked
from batchsql.backends.base import StreamBackend
from batchsql.counting import ShipCounts
from batchsql.declare.keys import canonical_json
from batchsql.errors import BackendError, BatchsqlError
from batchsql.placement import may_ask
from batchsql.shipping import Pace, Say, SendLimit, Shipper, flush_rows
from batchsql.types import ModelRef
from batchsql.warehouse.ledger import Ledger
from batchsql.warehouse.queue import Queue
from batchsql.warehouse.shards import ShardOrder, process_id

OpenStreamBackend = Callable[[ModelRef, Mapping[str, Any]], StreamBackend]


@dataclass(frozen=True, slots=True)
class Worked:
    """What a worker has done.

    ``set_aside`` are the enrichments that it cannot work on, with the reason.
    """

    counts: ShipCounts
    set_aside: Mapping[str, str]


class Worker:
    """Works on the queues of one ledger. ``worked`` is right at any time, also after an error.

    Args:
        ledger: its tables are brought to this version by whoever opens it.
        name: how people know this worker, such as its host and process.
        open_backend: opens what answers for a model, under engine options.
        engine: options of this machine that go over the declared ones.
        open_prices: opens what a try costs.
        limit: what the worker may take on, shared with others of this process.
        stop: ends the work within a second; what was not answered by then is given back.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        name: str,
        open_backend: OpenStreamBackend,
        engine: Mapping[str, Any],
        open_prices: OpenPrices,
        limit: SendLimit,
        stop: Event,
        say: Say,
        warn: Say,
    ) -> None:
        self._ledger = ledger
        self._name = name
        self._open_backend = open_backend
        self._engine = engine
        self._open_prices = open_prices
        self._limit = limit
        self._stop = stop
        self._say = say
        self._warn = warn
        self._run_id = str(uuid.uuid4())
        self._owner = f"{process_id()}:{self._run_id}"
        self._counts = ShipCounts()
        self._set_aside: dict[str, str] = {}
        self._last_model: str | None = None

    @property
    def worked(self) -> Worked:
        return Worked(self._counts, dict(self._set_aside))

    def work(
        self, enrichments: Sequence[str] | None = None, models: Collection[str] | None = None
    ) -> bool:
        """Work on one queue until nothing in it can be claimed; return whether there was one.

        A queue that this worker cannot work on is set aside with the reason, for good.

        Args:
            enrichments: whose queues to look at; None is all.
            models: only queues of these models; None is all.

        Raises:
            StoppedError: ``stop`` was set; what was answered is kept, the rest given back.
            WarehouseError: the warehouse refuses, or is gone.
        """
        self._ledger.free_lost_shards()
        queue = self._choose(self._ledger.read_queues(enrichments), models)
        if queue is None:
            return False
        self._last_model = queue.model
        try:
            self._work_on(queue)
        except BackendError as error:
            self._put_aside(queue, str(error))
        return True

    def _choose(self, queues: Sequence[Queue], models: Collection[str] | None) -> Queue | None:
        """Take the oldest queue with something to claim, one of the model that is loaded first."""
        free = [
            queue
            for queue in queues
            if queue.free and queue.enrichment not in self._set_aside
            if models is None or queue.model in models
        ]
        free.sort(key=lambda queue: queue.model != self._last_model)  # stable: oldest first
        return free[0] if free else None

    def _work_on(self, queue: Queue) -> None:
        asked = self._read(queue)
        if asked is None:
            return
        backend = self._open(queue, asked)
        if backend is None:
            return
        settings = queue.settings
        pace = Pace(
            _short(queue.enrichment), flush_rows(settings["flush_rows"], backend),
            float(settings["flush_seconds"]), float(settings["lease_seconds"]),
        )  # fmt: skip
        self._ledger.list_queue(queue.enrichment)
        self._say(f"{pace.subject}: {queue.free:,} requests for {queue.model}")
        shipper = Shipper(
            pace, self._ledger, backend,
            order=ShardOrder(
                run_id=self._run_id, owner=self._owner, enrichment=queue.enrichment,
                spec_version=queue.spec_version, backend=asked.model.provider, model=queue.model,
                lease_seconds=pace.lease_seconds, route=queue.route,
                route_reason=queue.route_reason, worker=self._name,
                settings=orjson.dumps(dict(queue.settings), option=orjson.OPT_SORT_KEYS).decode(),
            ),
            call=asked.call, judge=asked.judge(queue.route, backend.version, self._open_prices),
            limit=self._limit, lane=None, stop=self._stop,
            say=lambda message: self._say(f"{pace.subject}: {message}"),
            warn=lambda message: self._warn(f"{pace.subject}: {message}"),
            waits=False, is_over=lambda: self._ledger.is_replaced(queue),
        )  # fmt: skip
        try:
            shipper.ship()
        finally:
            self._counts += shipper.counts
        self._ledger.trim_queue(queue.enrichment)

    def _read(self, queue: Queue) -> Asked | None:
        asked = read_asked(self._ledger, queue.spec_version, queue.model, queue.settings)
        asked = replace(asked, engine={**asked.engine, **self._engine})
        if not may_ask(asked.model, asked.engine, egress=bool(queue.settings.get("egress", True))):
            self._put_aside(queue, f"its rows may not leave, but {queue.model} is asked outside")
            return None
        return asked

    def _open(self, queue: Queue, asked: Asked) -> StreamBackend | None:
        try:
            backend = self._open_backend(asked.model, asked.engine)
            identity = canonical_json(backend.identity()).decode()
        except BatchsqlError as error:
            self._put_aside(queue, str(error))
            return None
        if identity != asked.spec.identity:
            self._put_aside(
                queue,
                f"{queue.model} on this machine is not the one that its rows were prepared for: "
                f"here {identity}, there {asked.spec.identity}; bring the same weights and options "
                "here, or run dbt where these are",
            )
            return None
        return backend

    def _put_aside(self, queue: Queue, reason: str) -> None:
        self._set_aside[queue.enrichment] = reason
        self._warn(f"{_short(queue.enrichment)}: set aside, since {reason}")


def _short(enrichment: str) -> str:
    return enrichment.rpartition(".")[2]
