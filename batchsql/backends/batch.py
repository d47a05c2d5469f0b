"""The protocol of batch backends, and the small things that all of them share.

A batch backend brings many requests to a provider at once and fetches their answers hours later.
It holds no state: what must survive a crash is in the ledger, and ``batchsql.batches`` decides
what to do when. A backend translates: calls into the provider's, and the provider's words into
ours, an unknown one being an error.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from batchsql.errors import BackendError
from batchsql.types import Call, Completion, Request

BUFFER_BYTES = 1 << 20
"""How much of a file of lines is read or written at once: a line is often shorter than 1 kB."""

_CUSTOM_ID = re.compile(r"([0-9a-f]{32})-([0-9a-f]{24})")


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What a provider takes in one batch, and how its batches live.

    ``create_seconds`` is the longest that a creation call may take. ``settle_seconds`` is how long
    after it a batch that was created may still be missing from the provider's list.
    ``window_seconds`` is the age at which the provider ends a batch that is not finished;
    ``retention_seconds`` how long, from its creation, results can be fetched. ``keeps_partial`` is
    whether an expired or cancelled batch gives the answers it already had. ``settles_late`` is
    whether a batch may still be refused as a whole after it was created.
    """

    max_requests: int
    max_bytes: int
    window_seconds: float
    retention_seconds: float
    min_requests: int = 1
    create_seconds: float = 60.0
    settle_seconds: float = 60.0
    keeps_partial: bool = True
    settles_late: bool = False


@dataclass(frozen=True, slots=True)
class ShardLabel:
    """What a provider is told of a shard, and what helps to find its batch again.

    The batch was created, if it was, between ``created_after`` and ``created_before`` by the
    warehouse's clock, which may differ from the provider's by minutes. ``not_ours`` are batches
    known to belong to other shards.
    """

    shard_id: str
    requests: int
    created_after: datetime | None = None
    created_before: datetime | None = None
    not_ours: frozenset[str] = frozenset()

    @property
    def hex(self) -> str:
        """The shard's id as 32 hex digits."""
        return self.shard_id.replace("-", "")


class BatchState(str, Enum):
    """Where a batch stands at its provider, in one vocabulary for all."""

    RUNNING = "running"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    FAILED = "failed"  # refused as a whole: nothing was run, nothing is billed

    @property
    def is_final(self) -> bool:
        """Whether the batch stays as it is."""
        return self not in (BatchState.RUNNING, BatchState.CANCELLING)


class BatchFault(str, Enum):
    """Why a batch was refused as a whole."""

    QUEUE_FULL = "queue_full"  # too much is waiting already: later, or less at once
    TOO_LARGE = "too_large"  # more requests or bytes than it takes: smaller batches
    TRANSIENT = "transient"  # no fault of the batch: again
    SYSTEMIC = "systemic"  # every batch like it will be refused


@dataclass(frozen=True, slots=True)
class BatchStatus:
    """What a provider says of a batch. Counts are None where it does not tell.

    ``is_checked`` is False while the provider may still refuse the whole batch; ``has_begun`` where
    it says that nothing of it was worked on, so that nothing is paid yet.
    """

    state: BatchState
    provider_state: str
    total: int | None = None
    ok: int | None = None
    failed: int | None = None
    fault: BatchFault | None = None
    error: str | None = None
    results_until: datetime | None = None
    is_checked: bool = True
    has_begun: bool = True


@dataclass(frozen=True, slots=True)
class CreatedBatch:
    """A batch that the provider has confirmed."""

    provider_batch_id: str
    results_until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """What a search for a shard's batch found.

    Without an id, ``is_sure`` says that the provider surely has none; otherwise ``reason`` says
    why that cannot be told yet.
    """

    provider_batch_id: str | None = None
    is_sure: bool = False
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class ListedBatch:
    """A batch in a provider's list, as ``recover`` looks for them."""

    provider_batch_id: str
    status: BatchStatus
    created_at: datetime
    shard_hex: str | None = None
    """The shard that it says it belongs to, where the provider keeps such a mark."""


@dataclass(slots=True)
class BatchLine:
    """One line of a batch's results. ``request_key`` is empty where the id is not one of ours."""

    custom_id: str
    completion: Completion


class NotCreatedError(BackendError):
    """The provider surely has no batch from this call."""

    def __init__(
        self, fault: BatchFault, message: str, retry_after_seconds: float | None = None
    ) -> None:
        self.fault = fault
        self.retry_after_seconds = retry_after_seconds
        super().__init__(message)


class MaybeCreatedError(BackendError):
    """The call failed in a way that leaves open whether there is a batch now."""


class BatchGoneError(BackendError):
    """The provider does not know the batch, or has deleted its results."""


class ProviderBusyError(BackendError):
    """A call that costs nothing failed for no fault of its own: again later."""

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        self.retry_after_seconds = retry_after_seconds
        super().__init__(message)


class BatchBackend(Protocol):
    """One model behind a provider's batch API.

    Every call raises ``SystemicError`` where the provider refuses everything (bad key, unknown
    model, no credit) and, but for ``create``, ``ProviderBusyError`` where the same call may
    succeed later. Messages never hold a key.
    """

    @property
    def limits(self) -> BatchLimits: ...

    @property
    def version(self) -> str:
        """Name and version of the software that speaks to the provider, for the ledger."""
        ...

    @property
    def account(self) -> str:
        """A fingerprint of the endpoint and the account behind it; see ``account_of``.

        Raises:
            SystemicError: there is no key.
        """
        ...

    def identity(self) -> Mapping[str, Any]:
        """Return what ``StreamBackend.identity`` of the same model returns."""
        ...

    def encoder(self, call: Call) -> Callable[[str, Request], bytes]:
        """Return a function from custom id and request to its line, without a line end."""
        ...

    def upload(self, shard: ShardLabel, lines: Path, call: Call) -> str | None:
        """Bring the input where the provider wants it before the batch; return how to name it.

        Costs nothing and may be done again. None where the input travels in the creation call.

        Raises:
            NotCreatedError: the provider refuses the input.
        """
        ...

    def create(
        self, shard: ShardLabel, lines: Path, uploaded: str | None, call: Call, must_end_by: float
    ) -> CreatedBatch:
        """Create the batch by one call, which nothing repeats.

        The call is not begun, right before the first byte leaves, when less than half of
        ``limits.create_seconds`` is left until ``must_end_by`` (of ``read_clock``), and is
        broken off at that moment: a process that was stopped in between, or a machine that was
        suspended, submits nothing late.

        Raises:
            NotCreatedError: there surely is no batch.
            MaybeCreatedError: there may be one.
            SystemicError: there is none, and every other would be refused too.
        """
        ...

    def find(self, shard: ShardLabel) -> Finding:
        """Look whether the provider has a batch of this shard. Asked under the same account."""
        ...

    def poll(self, provider_batch_id: str) -> BatchStatus:
        """Return where the batch stands.

        Raises:
            BatchGoneError: the provider does not know it.
        """
        ...

    def fetch(self, provider_batch_id: str, folder: Path, call: Call) -> Iterator[BatchLine]:
        """Yield the results of a batch that has ended, in any order, holding few in memory.

        ``call`` is what its requests shared: an answer is brought back to the user's schema.
        They are first copied whole into ``folder``, so that a download that breaks is noticed
        before anything is yielded.

        Raises:
            BatchGoneError: the results are deleted, or the batch is.
            ProviderBusyError: the download broke; it can be tried again from the start.
        """
        ...

    def cancel(self, provider_batch_id: str) -> None:
        """Ask for the batch to be cancelled; one that has ended is left as it is.

        Raises:
            BatchGoneError: the provider does not know it.
        """
        ...

    def discard(self, provider_batch_id: str, uploaded: str | None) -> None:
        """Delete the input that ``upload`` brought, once its batch is over. Best effort."""
        ...

    def list_batches(self, since: datetime) -> Iterator[ListedBatch]:
        """Yield the account's batches created since then, newest first."""
        ...

    def close(self) -> None:
        """Close connections."""
        ...


def read_clock() -> float:
    """Return seconds that nobody sets back and that a suspended machine counts, where it can."""
    counts_sleep = getattr(time, "CLOCK_BOOTTIME", None)  # of Linux
    return time.monotonic() if counts_sleep is None else time.clock_gettime(counts_sleep)


def custom_id(request_key: str, shard_id: str) -> str:
    """Return the id of a request in a batch: its key and the first 24 digits of its shard.

    57 characters of ``[0-9a-f-]``, which every provider takes (Anthropic: at most 64 of
    ``[a-zA-Z0-9_-]``; OpenAI does not document its limit).
    """
    return f"{request_key}-{shard_id.replace('-', '')[:24]}"


def request_key_of(text: str) -> str:
    """Return the request key in a custom id of ours, or an empty text for any other id."""
    found = _CUSTOM_ID.fullmatch(text)
    return found[1] if found else ""


def is_of_shard(text: str, shard_id: str) -> bool:
    """Return whether a custom id is one of ours and of this shard."""
    found = _CUSTOM_ID.fullmatch(text)
    return bool(found) and text[33:] == shard_id.replace("-", "")[:24]


def account_of(*parts: str | None) -> str:
    """Return a fingerprint of an endpoint and a key, from which neither can be read."""
    joined = "\n".join(part or "" for part in ("batchsql account", *parts))
    return hashlib.sha256(joined.encode()).hexdigest()[:16]


def iter_lines(file: Path) -> Iterator[bytes]:
    """Yield the lines of a file that are not blank. Only LF ends a line.

    The text of an answer may hold U+2028 and others that ``str.splitlines`` would break at.
    """
    with file.open("rb", BUFFER_BYTES) as lines:  # in binary, LF is the only line end there is
        for line in lines:
            if stripped := line.strip(b"\r\n\t "):
                yield stripped
