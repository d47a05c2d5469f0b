"""The life of provider batches: submit, find again, poll, cancel, collect. See ``ShardState``.

The order of durable steps, and what a death between two of them costs:

1. requests are claimed for a planned shard: its lease runs out, or its process is seen to be gone,
   and the claims are freed;
2. the input is uploaded: the upload is forgotten, which costs nothing;
3. the intent is committed: whoever looks after the shard next waits until the creation call can
   no longer be running, and then asks the provider whether there is a batch;
4. the batch is created: it is found, by the mark that it carries or by what it holds;
5. its id is recorded: from here on it is polled;
6. its end is recorded: the results are fetched;
7. answers are written, many in one transaction with their claims: what is not written yet is
   fetched again, which costs nothing;
8. the shard is closed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import orjson

from batchsql.backends.batch import (
    BUFFER_BYTES,
    BatchBackend,
    BatchFault,
    BatchGoneError,
    BatchState,
    BatchStatus,
    MaybeCreatedError,
    NotCreatedError,
    ProviderBusyError,
    ShardLabel,
    custom_id,
    read_clock,
)
from batchsql.counting import ShipCounts, count_attempts
from batchsql.errors import BackendError, LeaseLostError, SystemicError
from batchsql.garbage import without_collector
from batchsql.ingest import Ingest
from batchsql.judging import Judge
from batchsql.plan.cost import estimate_tokens
from batchsql.progress import format_seconds
from batchsql.types import Call, Completion, Message, Outcome, Request, Route, Usage
from batchsql.warehouse.batch_shards import BatchShard
from batchsql.warehouse.ledger import Ledger
from batchsql.warehouse.shards import Attempt, ShardOrder, ShardState, Tries

INGEST_ROWS = 5_000
"""How many results are written at a time: fetching them again costs nothing."""

LEASE_SECONDS = 900.0
"""How long whoever looks after a batch may be silent: an upload can take minutes."""

RENEW_SECONDS = 60.0
"""How old a lease gets while results are written: a transfer still fits into the rest of it."""

GONE_AFTER_SECONDS = 600.0
"""A batch younger than this that its provider does not know may just not be listed yet.

So may the results of one that ended this short a time ago.
"""

OVERDUE_SECONDS = 24 * 3600.0
"""How long after its window a batch that does not end is cancelled."""

THINKING_TOKENS = 8192
"""What backends add for models that think, where the user sets no limit."""

VANISH_WARNING_SECONDS = 3 * 24 * 3600.0
"""How long before results are deleted people are warned, where they are kept for weeks."""

_DOWNLOADS = 3
END_STATES = {
    BatchState.COMPLETED: ShardState.COLLECTED,
    BatchState.EXPIRED: ShardState.EXPIRED,
    BatchState.CANCELLED: ShardState.CANCELLED,
}

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Submission:
    """What became of an attempt to submit the next requests.

    ``last`` is the position up to which the run's list was looked at; ``fault`` is set where the
    provider surely has nothing of the shard.
    """

    shard: BatchShard | None
    last: int
    fault: BatchFault | None = None
    message: str | None = None
    retry_after_seconds: float | None = None


class Batches:
    """Brings the shards of one provider and account through their life.

    ``counts`` is right at any time, also after an error.
    """

    def __init__(
        self,
        ledger: Ledger,
        backend: BatchBackend,
        *,
        owner: str,
        judge_of: Callable[[BatchShard], tuple[Judge, Call]],
        say: Say,
        warn: Say,
        clock: Callable[[], float] = read_clock,
    ) -> None:
        self.counts = ShipCounts()
        self.backend = backend
        self._ledger = ledger
        self._owner = owner
        self._judge_of = judge_of
        self._say = say
        self._warn = warn
        self._clock = clock
        self._leased_at = clock()

    # --- submitting ---------------------------------------------------------------------------

    def submit(
        self,
        order: ShardOrder,
        call: Call,
        prefix: Sequence[Message],
        judge: Judge,
        *,
        after: int,
        size: int,
    ) -> Submission:
        """Claim the next wanted requests of the batch lane and bring them to the provider.

        Without a shard nothing was left to claim in the window. A shard that comes back as
        submitting may or may not be at the provider; ``step`` finds out later.

        Raises:
            SystemicError: the provider refuses every batch. Nothing is claimed any more.
        """
        limits = self.backend.limits
        self._leased_at = self._clock()
        encode = self.backend.encoder(call)
        sample = Request("0" * 32, tuple(prefix))
        shard, last = self._ledger.claim_batch(
            replace(
                order,
                owner=self._owner,
                lease_seconds=LEASE_SECONDS,
                route=Route.BATCH,
                settings=self._with_window(order.settings),
            ),
            after=after,
            size=min(size, limits.max_requests),
            max_bytes=limits.max_bytes,
            overhead_bytes=len(encode(custom_id(sample.request_key, "0" * 32), sample)) + 64,
            lane=Route.BATCH,
        )
        if shard is None:
            return Submission(None, last)
        try:
            with tempfile.TemporaryDirectory(prefix="batchsql-") as folder:
                lines = Path(folder) / "input.jsonl"
                shard = self._write_lines(shard, lines, call, judge)
                if not shard.state.is_open:
                    return Submission(shard, last)
                return replace(self._bring(shard, lines, call), last=last)
        except LeaseLostError:
            self._warn(f"the shard {shard.shard_id} was taken over; its new owner goes on with it")
            return Submission(None, last)

    def _with_window(self, settings: str | None) -> str:
        """Keep the provider's ceiling with a shard, so that it can be told without a backend."""
        known = {"window_seconds": self.backend.limits.window_seconds}
        return orjson.dumps({**orjson.loads(settings or "{}"), **known}).decode()

    def _write_lines(self, shard: BatchShard, lines: Path, call: Call, judge: Judge) -> BatchShard:
        """Write a shard's input; what does not fit after all is given back."""
        encode, max_bytes = self.backend.encoder(call), self.backend.limits.max_bytes
        size = 0
        left_out: list[str] = []
        too_long: list[Completion] = []
        with lines.open("wb", BUFFER_BYTES) as file, without_collector():
            for request in self._ledger.stream_requests(shard.shard_id):
                line = encode(custom_id(request.request_key, shard.shard_id), request) + b"\n"
                if len(line) > max_bytes:
                    said = f"it takes {len(line):,} bytes, a whole batch at most {max_bytes:,}"
                    too_long.append(
                        Completion(
                            request.request_key, None, None, failure=Outcome.TOO_LONG, error=said
                        )
                    )
                elif size + len(line) > max_bytes:
                    left_out.append(request.request_key)
                else:
                    file.write(line)
                    size += len(line)
        if too_long:
            # Its number must follow the tries before it, or it would not be the last word.
            members = self._ledger.read_members(shard.shard_id)
            # The claims of a shard whose lease ended meanwhile are gone; the flush then refuses.
            attempts = [
                judge.attempt(each, shard.shard_id, members[each.request_key])
                for each in too_long
                if each.request_key in members
            ]
            self._flush(shard, attempts)
        if too_long or left_out:
            shard = self._ledger.release(shard, left_out)
        if not shard.requests:
            return self._ledger.close_batch(shard, ShardState.ABANDONED)
        return shard

    def _bring(self, shard: BatchShard, lines: Path, call: Call) -> Submission:
        """Upload and create, the intent in between."""
        ledger, backend = self._ledger, self.backend
        try:
            account = backend.account
            uploaded = backend.upload(shard_label(shard), lines, call)
            must_end_by = self._clock() + backend.limits.create_seconds
            try:
                shard = ledger.begin_submission(
                    shard, account, uploaded, backend.limits.create_seconds
                )
            except Exception:
                self._discard(replace(shard, uploaded=uploaded))
                raise
            created = backend.create(shard_label(shard), lines, uploaded, call, must_end_by)
        except (NotCreatedError, ProviderBusyError) as error:
            fault = error.fault if isinstance(error, NotCreatedError) else BatchFault.TRANSIENT
            shard = ledger.close_batch(
                shard, ShardState.FAILED, error=str(error), fault=fault.value
            )
            self._discard(shard)
            return Submission(shard, 0, fault, str(error), error.retry_after_seconds)
        except MaybeCreatedError as error:
            shard = ledger.record_trouble(shard, str(error))
            ledger.leave(shard)
            self._warn(
                f"the reply to the creation of a batch of {shard.requests:,} requests was lost "
                f"({error}); it is looked for later and not sent again before"
            )
            return self._submitted(shard)
        except BackendError as error:
            shard = ledger.close_batch(
                shard, ShardState.FAILED, error=str(error), fault=BatchFault.SYSTEMIC.value
            )
            self._discard(shard)
            raise
        shard = ledger.record_submission(shard, created.provider_batch_id, created.results_until)
        ledger.leave(shard)
        return self._submitted(shard)

    def _submitted(self, shard: BatchShard) -> Submission:
        self.counts += ShipCounts(submitted=shard.requests, batches=1)
        return Submission(shard, 0)

    # --- looking after ------------------------------------------------------------------------

    def step(self, shard_id: str) -> BatchShard | None:
        """Take the shard of a batch as far as it goes now; return it as it then is.

        Returns None where somebody else looks after it, or it is over.

        Raises:
            SystemicError: the provider refuses us, or refused the whole batch. The shard itself is
                in a state from which the next call goes on.
        """
        shard = self._attend(shard_id)
        if shard is None:
            return None
        try:
            return self._step(shard)
        except LeaseLostError:
            self._warn(f"the shard {shard_id} was taken over; its new owner goes on with it")
            return None

    def _attend(self, shard_id: str) -> BatchShard | None:
        self._leased_at = self._clock()
        return self._ledger.attend(shard_id, self._owner, LEASE_SECONDS)

    def _step(self, shard: BatchShard) -> BatchShard:
        try:
            if shard.state is ShardState.SUBMITTING:
                shard = self._find(shard)
            if shard.state is ShardState.SUBMITTED:
                shard = self._poll(shard)
            if shard.state is ShardState.ENDED:
                shard = self._collect(shard)
        except (ProviderBusyError, BatchGoneError) as error:
            shard = self._ledger.record_trouble(shard, str(error))
            shard = self._give_up_if_late(shard, str(error))
            if shard.state.is_open:
                self._warn(f"{self._name(shard)}: {error}; it is asked again later")
        except (BackendError, OSError) as error:
            if self._ledger.read_batch(shard.shard_id).state.is_open:
                shard = self._ledger.record_trouble(shard, str(error))
                shard = self._give_up_if_late(shard, str(error))
            if not shard.state.is_open:
                return shard
            self._ledger.leave(shard)
            raise
        if shard.state.is_open:
            self._warn_before_results_vanish(shard)
            self._ledger.leave(shard)
        return shard

    def _warn_before_results_vanish(self, shard: BatchShard) -> None:
        left = shard.seconds_to_vanish
        soon = min(VANISH_WARNING_SECONDS, self.backend.limits.retention_seconds / 4)
        if left is not None and left < soon:
            self._warn(
                f"{self._name(shard)}: the provider deletes its results in "
                f"{format_seconds(max(0.0, left))}; find out why it is not collected"
            )

    def _find(self, shard: BatchShard) -> BatchShard:
        """Look for the batch of a shard whose creation call nobody saw the end of."""
        limits = self.backend.limits
        waited = shard.seconds_since_intent or 0.0
        if not self._is_same_account(shard):
            return self._give_up_if_late(shard, "the account that submitted it was not seen again")
        if waited < limits.settle_seconds:
            return shard
        others = self._ledger.read_other_batches(shard)
        finding = self.backend.find(replace(shard_label(shard), not_ours=others))
        if finding.provider_batch_id is not None:
            self._say(
                f"found the batch {finding.provider_batch_id} of {shard.requests:,} requests, "
                "which a run that ended too early had created"
            )
            return self._ledger.record_submission(shard, finding.provider_batch_id, None)
        if finding.is_sure:
            self._say(f"a batch of {shard.requests:,} requests was never created; they wait again")
            shard = self._ledger.close_batch(
                shard, ShardState.ABANDONED, error="the provider has no batch of this shard"
            )
            self._discard(shard)
            return shard
        shard = self._ledger.record_trouble(shard, finding.reason or "it cannot be told yet")
        return self._give_up_if_late(shard, finding.reason or "its batch was never seen")

    def _give_up_if_late(self, shard: BatchShard, reason: str) -> BatchShard:
        """Leave a shard as it is, unless no result of it can be had any more."""
        left = self.backend.limits.retention_seconds - shard.age_seconds
        if shard.state is ShardState.ENDED and shard.seconds_to_vanish is not None:
            # Some providers say of other files only how long they are kept, so not to the minute.
            left = shard.seconds_to_vanish + OVERDUE_SECONDS
        if left >= 0:
            return shard
        self._warn(f"{self._name(shard)} is given up: {reason}; its requests wait again")
        shard = self._ledger.close_batch(shard, ShardState.FAILED, error=reason, fault="lost")
        self._discard(shard)
        return shard

    def _is_same_account(self, shard: BatchShard) -> bool:
        if shard.account in (None, self.backend.account):
            return True
        self._warn(
            f"{self._name(shard)} was submitted under another key or address than the one that is "
            "set now, so nothing can be said of it; set the key that it was submitted with"
        )
        return False

    def _poll(self, shard: BatchShard) -> BatchShard:
        assert shard.provider_batch_id is not None  # noqa: S101  set by the move to this state
        try:
            status = self.backend.poll(shard.provider_batch_id)
        except BatchGoneError as error:
            return self._handle_gone(shard, error)
        if status.state is BatchState.FAILED:
            return self._handle_failed(shard, status)
        if status.state.is_final:
            return self._ledger.record_end(
                shard, status.provider_state, END_STATES[status.state], status.error,
                status.results_until,
            )  # fmt: skip
        shard = self._ledger.record_status(shard, status.provider_state, status.ok, status.failed)
        return self._hurry(shard, status)

    def _hurry(self, shard: BatchShard, status: BatchStatus) -> BatchShard:
        """See to a batch near its deadline, or long after its window, that does not end.

        It is cancelled, and what it leaves is asked again. Where that would throw paid answers
        away, or does not end either, requests may be asked online too.
        """
        limits = self.backend.limits
        to_deadline = shard.seconds_to_deadline
        rescue_before = float(shard.settings.get("rescue_before_seconds", 0.0))
        is_due = to_deadline is not None and to_deadline <= rescue_before
        since = shard.seconds_since_submission or 0.0
        if shard.is_cancel_requested:
            if to_deadline is not None and to_deadline <= rescue_before / 2:
                shard = self._copy_tail(shard)
            return self._give_up_if_late(shard, "cancelling it never ended")
        kept = "what is finished is kept"
        if not limits.keeps_partial:
            kept = "its provider gives nothing of it" if status.has_begun else "it has not begun"
        if since > limits.window_seconds + OVERDUE_SECONDS:
            said = f"it has not ended {format_seconds(since)} after it was submitted"
        elif not is_due:
            return shard
        elif status.has_begun and not limits.keeps_partial:
            return self._copy_tail(shard)
        else:
            said = f"its deadline is in {format_seconds(max(0.0, to_deadline or 0.0))}"
        self._say(f"{self._name(shard)} is cancelled: {said}; {kept}")
        try:
            self.backend.cancel(shard.provider_batch_id or "")
        except BatchGoneError as error:  # it was just there, so it is the call that is not
            self._warn(f"{self._name(shard)} is not cancelled: {error}")
        # A call that failed otherwise is made again by the next look; one that went well is not.
        shard = self._ledger.record_cancel(shard)
        return self._give_up_if_late(shard, "it never ended")

    def _copy_tail(self, shard: BatchShard) -> BatchShard:
        """Free requests of a batch that does not end, for as much money as was allowed."""
        max_usd = float(shard.settings.get("rescue_max_usd", 0.0))
        if shard.copied is not None:
            return shard
        if not max_usd:
            if self.backend.limits.keeps_partial or shard.is_cancel_requested:
                return shard
            return self._warn_once(
                shard,
                "the deadline has come, and the provider gives nothing of a cancelled batch, so it "
                "is waited for; set rescue_max_usd to ask its requests online too",
            )
        judge, call = self._judge_of(shard)
        tokens = estimate_tokens(int(self._ledger.read_mean_bytes(shard.shard_id)))
        most = call.max_tokens
        if "max_tokens" not in call.params:
            most += THINKING_TOKENS
        worst = Usage(input_tokens=tokens, output_tokens=most)
        cost_usd = judge.price_of(Route.ONLINE, worst, None)
        if not cost_usd:
            return self._warn_once(
                shard,
                f"nothing is asked twice, since no price of {shard.model} is known; declare prices "
                "to allow it",
            )
        size = int(max_usd / cost_usd)
        shard = self._ledger.free_for_copies(shard, size)
        self._warn(
            f"{self._name(shard)} does not end: {shard.copied:,} of its requests may be asked "
            f"online too, for at most {max_usd:g} USD (rescue_max_usd)"
        )
        return shard

    def _warn_once(self, shard: BatchShard, message: str) -> BatchShard:
        """Say what keeps a batch from being rescued, and not again with each look."""
        if shard.error == message:
            return shard
        self._warn(f"{self._name(shard)}: {message}")
        return self._ledger.record_trouble(shard, message)

    def cancel(self, shard_id: str) -> BatchShard | None:
        """Ask for a batch to be cancelled; what is kept of it is collected later.

        That is what it finished until then, or nothing: see ``BatchLimits.keeps_partial``.

        Returns None where somebody else looks after it now, or it is over.
        """
        shard = self._attend(shard_id)
        if shard is None:
            return None
        try:
            if shard.state is ShardState.SUBMITTED and shard.provider_batch_id is not None:
                try:
                    self.backend.cancel(shard.provider_batch_id)
                except BatchGoneError as error:
                    # A server that cannot cancel says the same as one that has no such batch.
                    try:
                        self.backend.poll(shard.provider_batch_id)
                    except BatchGoneError as gone:
                        shard = self._handle_gone(shard, gone)
                    else:
                        self._warn(f"{self._name(shard)} is not cancelled: {error}")
                        shard = self._ledger.record_trouble(shard, str(error))
                else:
                    shard = self._ledger.record_cancel(shard)
        except LeaseLostError:
            return None
        finally:
            if shard.state.is_open:
                self._ledger.leave(shard)
        return shard

    def _handle_gone(self, shard: BatchShard, error: BatchGoneError) -> BatchShard:
        if not self._is_same_account(shard):
            return self._give_up_if_late(shard, str(error))
        if (shard.seconds_since_submission or 0.0) < GONE_AFTER_SECONDS:
            return self._ledger.record_trouble(shard, str(error))
        self._warn(f"{self._name(shard)} is lost: {error}; its requests wait again")
        self._write_leftovers(shard, self._ledger.read_members(shard.shard_id), str(error))
        shard = self._ledger.close_batch(shard, ShardState.FAILED, error=str(error), fault="gone")
        self._discard(shard)
        return shard

    def _handle_failed(self, shard: BatchShard, status: BatchStatus) -> BatchShard:
        """Close a shard that the provider refused as a whole: no row is at fault, none is paid."""
        fault = status.fault or BatchFault.SYSTEMIC
        message = status.error or f"the provider calls it {status.provider_state}"
        shard = self._ledger.close_batch(shard, ShardState.FAILED, error=message, fault=fault.value)
        self._discard(shard)
        if fault is BatchFault.SYSTEMIC:
            raise SystemicError(f"{self._name(shard)} was refused: {message}")
        self._warn(f"{self._name(shard)} was refused: {message}; its requests wait again")
        return shard

    # --- collecting ---------------------------------------------------------------------------

    def _collect(self, shard: BatchShard) -> BatchShard:
        """Write what a batch that is over has brought, and close its shard."""
        end_state = shard.end_state or ShardState.COLLECTED
        judge, call = self._judge_of(shard)
        ingest = Ingest(
            self._ledger, self.backend, shard, judge, self._flush,
            max_rows=INGEST_ROWS, say=self._say, clock=self._clock,
        )  # fmt: skip
        leftover = "the results hold no line for it"
        has_results = end_state is ShardState.COLLECTED or self.backend.limits.keeps_partial
        if has_results and (ingest.members or ingest.copied):
            try:
                # A line that is missing may be on a download that was cut without a trace.
                for _ in range(_DOWNLOADS):
                    ingest.run(call)
                    if ingest.is_complete:
                        break
            except BatchGoneError as error:
                if not self._is_same_account(shard):
                    return self._give_up_if_late(shard, str(error))
                if self._may_still_come(shard):
                    raise
                leftover = f"the results were deleted before they were fetched ({error})"
                self._warn(f"{self._name(shard)}: {leftover}")
        else:
            leftover = f"the batch is {end_state.value}, and its provider keeps nothing of it"
        self._write_leftovers(shard, ingest.members, leftover, judge)
        shard = self._ledger.close_batch(shard, end_state)
        self._discard(shard)
        self._tell(shard, ingest, len(ingest.members))
        if ingest.refused and ingest.refused == shard.requests:
            raise SystemicError(f"{self._name(shard)}: {ingest.refusal}")
        return shard

    def _may_still_come(self, shard: BatchShard) -> bool:
        """Say if results that are not there may only be late: they are paid for."""
        since, left = shard.seconds_since_end, shard.seconds_to_vanish
        return since is not None and since < GONE_AFTER_SECONDS and (left is None or left > 0)

    def _write_leftovers(
        self, shard: BatchShard, members: dict[str, Tries], reason: str, judge: Judge | None = None
    ) -> None:
        judge = judge or self._judge_of(shard)[0]
        attempts = []
        for key, tries in members.items():
            lost = Completion(key, None, None, failure=Outcome.TRANSIENT, error=reason)
            attempts.append(judge.attempt(lost, shard.shard_id, tries))
        for start in range(0, len(attempts), INGEST_ROWS):
            self._flush(shard, attempts[start : start + INGEST_ROWS])

    def _flush(self, shard: BatchShard, attempts: list[Attempt], copies: int = 0) -> None:
        """Write tries in one transaction, for the run that submitted them; keep the lease."""
        epochs = {shard.shard_id: shard.epoch}
        if self._ledger.flush(attempts, epochs, shard.run_id, self._owner, copies=copies):
            raise LeaseLostError(shard.shard_id)
        self.counts += count_attempts(attempts)
        now = self._clock()
        if now - self._leased_at >= RENEW_SECONDS:
            if self._ledger.renew(epochs, self._owner, LEASE_SECONDS):
                raise LeaseLostError(shard.shard_id)
            self._leased_at = now

    def _discard(self, shard: BatchShard) -> None:
        if shard.uploaded is None:
            return
        try:
            self.backend.discard(shard.provider_batch_id or "", shard.uploaded)
        except BackendError as error:
            self._warn(f"{self._name(shard)}: its input was not deleted ({error}); no harm done")

    def _tell(self, shard: BatchShard, ingest: Ingest, missing: int) -> None:
        said = [f"{ingest.ok:,} answers"]
        for count, noun in (
            (ingest.failed, "failures"),
            (missing, "requests without a result"),
            (ingest.repeated, "lines that came twice"),
            (ingest.unknown, "lines that are not of this batch"),
        ):
            if count:
                said.append(f"{count:,} {noun}")
        tell = self._warn if missing or ingest.repeated or ingest.unknown else self._say
        tell(f"{self._name(shard)} is {shard.state.value}: {', '.join(said)}")

    def _name(self, shard: BatchShard) -> str:
        return f"the batch {shard.provider_batch_id or f'of shard {shard.shard_id}'}"


def shard_label(shard: BatchShard) -> ShardLabel:
    """Return what a provider is told of a shard."""

    def moment(epoch: float | None) -> datetime | None:
        return None if epoch is None else datetime.fromtimestamp(epoch, timezone.utc)

    return ShardLabel(
        shard.shard_id, shard.requests, moment(shard.intent_at), moment(shard.intent_expires_at)
    )
