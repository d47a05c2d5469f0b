"""Decide how a run's requests travel and see them through: lanes, batches, waiting."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from batchsql.backends.base import StreamBackend
from batchsql.backends.batch import BatchFault, BatchGoneError, BatchState, ProviderBusyError
from batchsql.batches import Batches
from batchsql.collecting import Collector, shard_settings
from batchsql.context import RunContext
from batchsql.counting import ShipCounts
from batchsql.declare.spec import Declaration
from batchsql.judging import Judge
from batchsql.plan.route import RouteFacts, RoutePlan, plan_route
from batchsql.shipping import Pace, SendLimit, Shipper, StoppedError, flush_rows
from batchsql.sizing import batch_size
from batchsql.types import Call, Message, Route, RouteChoice, Runner
from batchsql.warehouse.batch_shards import BatchShard
from batchsql.warehouse.shards import ShardOrder, ShardState
from batchsql.warehouse.todo import TodoCounts

FIRST_POLL_SECONDS = 1.0
"""How soon after its submission a batch is looked at first; then ever less often."""

CHECK_SECONDS = 30.0
"""How long the first of several batches is watched for being refused as a whole."""

_CREATE_TRIES = 4
_CREATE_BACKOFF_SECONDS = 1.0
_BLOCKED_SECONDS = 60.0
_HALVINGS = 5  # before others of the account may have made room


@dataclass(frozen=True, slots=True)
class Question:
    """What a run asks, apart from its rows: the call, its shared messages, and its spec."""

    call: Call
    prefix: tuple[Message, ...]
    spec_version: str


class Dispatcher:
    """Brings everything on a run's list to where it is answered.

    ``counts`` is right at any time, also after an error.
    """

    def __init__(
        self,
        declaration: Declaration,
        context: RunContext,
        backend: StreamBackend,
        collector: Collector,
        question: Question,
        *,
        run_id: str,
        owner: str,
    ) -> None:
        self._declaration = declaration
        self._context = context
        self._backend = backend
        self._collector = collector
        self._question = question
        self._limit = SendLimit(declaration.limit)
        self._shipped = ShipCounts()
        self._order = ShardOrder(
            run_id=run_id,
            owner=owner,
            enrichment=context.enrichment,
            spec_version=question.spec_version,
            backend=declaration.model.provider,
            model=str(declaration.model),
            lease_seconds=declaration.lease_seconds,
            settings=shard_settings(declaration),
        )
        self._deadline_at: float | None = None
        if declaration.deadline is not None:
            now = datetime.now(timezone.utc)
            self._deadline_at = time.monotonic() + declaration.deadline.seconds_from(now)
        self._blocked_until = 0.0
        self._left_over = 0
        self._said = ""

    @property
    def counts(self) -> ShipCounts:
        """What was sent, and what came of it, also of batches that earlier runs submitted."""
        return self._shipped + self._collector.counts

    @property
    def stream_tries(self) -> int:
        """How many tries this run has made one by one, and written."""
        return self._shipped.tries

    def ship(self) -> None:
        """Send what is wanted, and wait for batches as long as declared.

        Raises:
            SystemicError: the provider refuses everything; what was answered before is kept.
            StoppedError: ``stop`` was set; what was answered before is kept.
        """
        ledger = self._context.ledger
        self._borrow()
        wait_until = time.monotonic() + self._declaration.wait_seconds
        if self._declaration.runner is Runner.DETACHED:
            self._enqueue(wait_until)
            return
        ledger.drop_queue(self._context.enrichment)
        self._look_after_others()
        while True:
            ledger.trim_todo()
            ledger.mark_overdue(self._declaration.rescue_before_seconds)
            wanted = self._count()
            if wanted.free + wanted.elsewhere:
                submitted_before, tries_before = self.counts.submitted, self.stream_tries
                self._send(wanted)
                ledger.trim_todo()
                wanted = self._count()
                # What a batch was too small for goes into the next one.
                has_more = wanted.free and self._limit.left != 0
                has_moved = self.counts.submitted > submitted_before
                # What is too little for a batch may go another way once the rest is on its way.
                has_moved |= bool(self._left_over) and self.stream_tries > tries_before
                if has_more and has_moved and time.monotonic() >= self._blocked_until:
                    continue
            if not wanted.in_batch:
                has_more = wanted.free > self._left_over and self._limit.left != 0
                if has_more and self._can_wait(wait_until):
                    again_at = max(self._blocked_until, time.monotonic() + FIRST_POLL_SECONDS)
                    self._pause(min(wait_until, again_at))
                    continue
                return
            if not self._can_wait(wait_until):
                self._context.info(
                    f"{wanted.in_batch:,} requests are in batches; their answers are collected by "
                    "batchsql collect or by the next run"
                )
                return
            self._await_batches(wait_until)

    def _enqueue(self, wait_until: float) -> None:
        """Leave what is wanted to workers, and wait for them as long as declared."""
        ledger, declaration = self._context.ledger, self._declaration
        ledger.trim_todo()
        is_engine = self._backend.capabilities.is_engine
        order = replace(
            self._order,
            route=Route.ENGINE if is_engine else Route.ONLINE,
            route_reason="runner is detached",
        )
        queued = ledger.enqueue(order, declaration.limit)
        if not queued:
            return
        self._context.info(
            f"{queued:,} requests wait for a worker: batchsql work --model {declaration.model}"
        )
        if not self._context.warehouse.has_foreign_writers:
            return  # no worker gets at the warehouse while this run has it
        while self._can_wait(wait_until) and ledger.count_queued(order.enrichment):
            self._say_once("waiting for workers")
            self._pause(min(wait_until, time.monotonic() + FIRST_POLL_SECONDS))

    def _look_after_others(self) -> None:
        """Look after what is wanted here and in a batch that another enrichment submitted."""
        shards = self._context.ledger.read_open_batches([], or_wanted=True)
        others = (each for each in shards if each.enrichment != self._context.enrichment)
        for error in self._collector.look_after(others).errors:
            self._context.warn(str(error))

    def _count(self) -> TodoCounts:
        return self._context.ledger.count_wanted(
            max_item_failures=self._declaration.max_attempts - 1
        )

    def _can_wait(self, until: float) -> bool:
        return time.monotonic() < until

    def _borrow(self) -> None:
        declaration, context = self._declaration, self._context
        borrowed = 0
        for name in declaration.read_from:
            borrowed += context.ledger.borrow(context.open_ledger(name), self._order.run_id)
        if borrowed:
            context.info(f"{borrowed:,} answers copied from {', '.join(declaration.read_from)}")
        self._shipped += ShipCounts(borrowed=borrowed)

    # --- sending ------------------------------------------------------------------------------

    def _send(self, wanted: TodoCounts) -> None:
        plan = self._plan(wanted)
        self._context.ledger.assign_lanes(
            lane=plan.lane, urgent=plan.urgent, last_try=plan.last_try,
            max_item_failures=self._declaration.max_attempts - 1,
        )  # fmt: skip
        if plan.lane is not Route.ENGINE:
            self._say_once(f"{wanted.free:,} requests: {plan.lane.value}, since {plan.reason}")
        lanes = {plan.lane, plan.urgent, plan.last_try}
        if Route.BATCH in lanes:
            self._submit(plan)  # first, since it works while the others are sent
        else:
            self._left_over = 0
        for lane in sorted(lanes - {Route.BATCH}):
            self._stream(lane, plan)

    def _plan(self, wanted: TodoCounts) -> RoutePlan:
        declaration = self._declaration
        batches = self._collector.find_batches(declaration.model, declaration.engine)
        return plan_route(
            RouteFacts(
                choice=declaration.route,
                is_engine=self._backend.capabilities.is_engine,
                batch_min=batches.backend.limits.min_requests if batches else 0,
                requests=wanted.free,
                urgent=wanted.urgent,
                online_up_to=declaration.online_up_to,
                deadline_seconds=self._deadline_seconds(),
                retry_last_online=declaration.retry_last_online,
            )
        )

    def _deadline_seconds(self) -> float | None:
        return None if self._deadline_at is None else self._deadline_at - time.monotonic()

    def _stream(self, lane: Route, plan: RoutePlan) -> None:
        declaration = self._declaration
        shipper = Shipper(
            Pace(
                declaration.subject,
                flush_rows(declaration.flush_rows, self._backend), declaration.flush_seconds,
                declaration.lease_seconds,
            ),
            self._context.ledger, self._backend,
            order=replace(self._order, route=lane, route_reason=plan.reason),
            call=self._question.call,
            judge=self._judge(lane, self._backend.version),
            limit=self._limit, lane=lane, stop=self._context.stop,
            say=self._context.info, warn=self._context.warn,
        )  # fmt: skip
        try:
            shipper.ship()
        finally:
            self._shipped += shipper.counts

    def _judge(self, route: Route, version: str) -> Judge:
        declaration = self._declaration
        tier = declaration.params.get("service_tier")
        prices = self._context.open_prices(declaration.model, declaration.prices, tier)
        return Judge(declaration.returns, declaration.max_attempts, route, version, prices)

    # --- batches ------------------------------------------------------------------------------

    def _submit(self, plan: RoutePlan) -> None:
        """Submit the batch lane shard by shard, until it is empty or the provider has enough."""
        declaration, context = self._declaration, self._context
        if time.monotonic() < self._blocked_until:
            return
        context.ledger.free_lost_shards()
        batches = self._collector.batches_of(declaration.model, declaration.engine)
        judge = self._judge(Route.BATCH, batches.backend.version)
        position, tries, halved, submitted = 0, 0, 0, 0
        size = self._batch_size(batches)
        order = replace(
            self._order, route_reason=plan.reason, deadline_seconds=self._deadline_seconds()
        )
        while self._limit.left != 0:
            self._raise_if_stopped()
            if self._is_below_minimum(batches.backend.limits.min_requests):
                return
            done = batches.submit(
                order, self._question.call, self._question.prefix, judge,
                after=position, size=self._limit.fit(size),
            )  # fmt: skip
            if done.shard is None and done.last == position:
                return
            before, size = size, self._batch_size(batches)
            if done.fault is None:
                position, tries = done.last, 0
                if done.shard is None or not done.shard.state.is_open:
                    continue
                submitted += 1
                context.info(
                    f"submitted {done.shard.requests:,} requests as the batch "
                    f"{done.shard.provider_batch_id or 'of shard ' + done.shard.shard_id}"
                )
                if submitted > 1 or not self._is_first_refused(batches, done.shard):
                    self._limit.take(done.shard.requests)
                    continue
                position, submitted = 0, 0
                size = self._batch_size(batches)
            if size < before and halved < _HALVINGS:
                halved += 1
                if done.message:
                    context.warn(f"{done.message}; a batch of {size:,} requests is tried")
                continue
            if done.fault is None:  # more like it would be refused too
                self._blocked_until = time.monotonic() + _BLOCKED_SECONDS
                return
            tries += 1
            pause = done.retry_after_seconds or _CREATE_BACKOFF_SECONDS * 2 ** (tries - 1)
            if done.fault is BatchFault.TRANSIENT and tries < _CREATE_TRIES:
                context.warn(f"no batch could be created: {done.message}; trying again")
                context.stop.wait(min(pause, 60.0))
                continue
            context.warn(f"no more batches now: {done.message}; the rest stays pending")
            self._blocked_until = time.monotonic() + max(pause, _BLOCKED_SECONDS)
            return

    def _is_below_minimum(self, least: int) -> bool:
        """Say if fewer requests are left for a batch than its provider takes."""
        if least <= 1:
            return False
        free = self._context.ledger.count_wanted(lane=Route.BATCH).free
        count = self._limit.fit(free)
        if count >= least:
            self._left_over = 0
            return False
        stays = count < free or self._declaration.route is RouteChoice.BATCH
        if stays and 0 < free != self._left_over:
            self._context.warn(
                f"{count:,} requests are fewer than the provider takes in a batch ({least:,}), so "
                "they stay pending; raise limit, or write route: auto or online"
            )
        self._left_over = free
        return True

    def _batch_size(self, batches: Batches) -> int:
        """Return the most requests for the next batch."""
        limits, declared = batches.backend.limits, self._declaration.max_batch_requests
        past = self._context.ledger.read_past_batches(str(self._declaration.model))
        most = min(limits.max_requests, declared or limits.max_requests)
        return batch_size(past, most=most, least=limits.min_requests)

    def _is_first_refused(self, batches: Batches, shard: BatchShard) -> bool:
        """Watch the first batch before more like it are submitted; say if all of it is refused."""
        if not batches.backend.limits.settles_late or shard.provider_batch_id is None:
            return False
        if not self._context.ledger.count_wanted(lane=Route.BATCH).free:
            return False
        until = time.monotonic() + CHECK_SECONDS
        pause = 0.1
        while time.monotonic() < until and not self._context.stop.is_set():
            try:
                status = batches.backend.poll(shard.provider_batch_id)
            except (ProviderBusyError, BatchGoneError):
                return False
            if status.is_checked:
                if status.state is not BatchState.FAILED:
                    return False
                after = batches.step(shard.shard_id)
                return after is not None and not after.state.is_open
            self._context.stop.wait(pause)
            pause = min(pause * 2, 5.0)
        return False

    def _await_batches(self, until: float) -> None:
        """Look after batches until one is over or gives requests back, or the time is up."""
        context = self._context
        pause = FIRST_POLL_SECONDS
        began = time.monotonic()
        free = self._count().free
        while True:
            shards = context.ledger.read_open_batches([context.enrichment], or_wanted=True)
            looked = self._collector.look_after(shards)
            if looked.errors:
                raise looked.errors[0]
            states = {each.state for each in looked.moved}
            if ShardState.FAILED in states:
                # What refused one batch as a whole is not over by now.
                self._blocked_until = time.monotonic() + _BLOCKED_SECONDS
            elif states:
                self._blocked_until = 0.0  # there is room in the provider's queue
            if looked.moved or not looked.open or self._count().free > free:
                return
            if not self._can_wait(until):
                return
            waiting = sum(shard.requests for shard in looked.open)
            self._say_once(f"waiting for {len(looked.open)} batches with {waiting:,} requests")
            self._pause(min(until, time.monotonic() + pause))
            pause = min(pause * 1.5, max(10.0, (time.monotonic() - began) / 20), 120.0)

    def _pause(self, until: float) -> None:
        self._context.stop.wait(max(0.0, until - time.monotonic()))
        self._raise_if_stopped()

    def _raise_if_stopped(self) -> None:
        if self._context.stop.is_set():
            raise StoppedError(
                f"{self._declaration.subject}: stopped; what was answered is kept, batches go on "
                "at the provider, and the next run or batchsql collect goes on from there"
            )

    def _say_once(self, message: str) -> None:
        if message != self._said:
            self._said = message
            self._context.info(message)
