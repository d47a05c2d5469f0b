"""The plain values that pass between batchsql's modules.

Nobody changes them. Those that are made once for each row, here and elsewhere, are not frozen all
the same: to make a frozen one takes four times as long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any


class Role(str, Enum):
    """Who speaks a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


@dataclass(slots=True)
class Message:
    """One chat message, its text already rendered and normalised."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model as the user names it: ``provider/name``."""

    provider: str
    name: str

    def __str__(self) -> str:
        return f"{self.provider}/{self.name}"


@dataclass(slots=True)
class Request:
    """One question for a model: its content key (32 hex digits) and the messages to send."""

    request_key: str
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """What all requests of a spec share: the model, its parameters and the shape of its answer.

    ``schema`` is the JSON Schema of the whole answer, an object whose properties stand in the
    order in which they are asked for. ``max_tokens`` is always set: the user's own, or what the
    schema can need. ``prefix_messages`` is how many messages at the beginning are the same in every
    request, so that a provider may be asked to cache them.
    """

    model: ModelRef
    params: Mapping[str, Any]
    schema: Mapping[str, Any]
    max_tokens: int
    prefix_messages: int = 0


class FinishReason(str, Enum):
    """Why a model stopped."""

    STOP = "stop"
    LENGTH = "length"
    REFUSAL = "refusal"
    CONTENT_FILTER = "content_filter"


class Outcome(str, Enum):
    """What became of one try of a request, as stored in ``attempts.outcome``."""

    OK = "ok"
    INVALID = "invalid"  # does not parse, or does not match the schema
    TRUNCATED = "truncated"  # the model ran into its token limit
    REFUSED = "refused"
    FILTERED = "filtered"  # a content filter stopped it
    TOO_LONG = "too_long"  # the prompt does not fit the model's window
    REJECTED = "rejected"  # the backend calls the request malformed
    TRANSIENT = "transient"  # nothing wrong with the request: try again
    BORROWED = "borrowed"  # copied from another ledger, nothing sent
    COPIED = "copied"  # a marker: asked online too, since its batch does not end
    REPLAYED = "replayed"  # a marker: from here the request has a new budget

    @property
    def is_retryable(self) -> bool:
        """Whether another try of the same request may end better."""
        return self in _RETRYABLE

    @property
    def is_item_failure(self) -> bool:
        """Whether this try counts against the request's own budget."""
        return self in _ITEM_FAILURES


_RETRYABLE = frozenset({Outcome.INVALID, Outcome.TRUNCATED, Outcome.REFUSED, Outcome.TRANSIENT})
_PERMANENT = frozenset({Outcome.FILTERED, Outcome.TOO_LONG, Outcome.REJECTED})
_ITEM_FAILURES = _PERMANENT | (_RETRYABLE - {Outcome.TRANSIENT})


class Route(str, Enum):
    """How a request travels."""

    BATCH = "batch"
    ONLINE = "online"
    ENGINE = "engine"


@dataclass(slots=True)
class Usage:
    """Tokens of one try, by kind.

    ``input_tokens`` includes what was read from a cache (``cached_tokens``) and what was written to
    one (``cache_write_tokens``, of which ``cache_write_1h_tokens`` to be kept for an hour).
    ``output_tokens`` includes ``reasoning_tokens``.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    cache_write_1h_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(slots=True)
class Completion:
    """What a backend returns for one request: raw text and how it ended, not yet validated.

    Exactly one of ``text`` and ``failure`` says what happened: ``failure`` is set when there is no
    answer to look at (too long, rejected, transient), with its reason in ``error``.
    """

    request_key: str
    text: str | None
    finish_reason: FinishReason | None
    usage: Usage = field(default_factory=Usage)
    failure: Outcome | None = None
    error: str | None = None
    model_reported: str | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None


class RouteChoice(str, Enum):
    """The value of ``route`` in a declaration: one way for all requests, or a choice by rule."""

    AUTO = "auto"
    BATCH = "batch"
    ONLINE = "online"
    ENGINE = "engine"


class Runner(str, Enum):
    """The value of ``runner`` in a declaration: who asks what a run finds to be new."""

    INLINE = "inline"  # the run itself
    DETACHED = "detached"  # workers, while the run builds with what is known


class OnPending(str, Enum):
    """The value of ``on_pending`` in a declaration: what a run does while rows are pending."""

    BUILD = "build"
    HOLD = "hold"
    FAIL = "fail"


class RowStatus(str, Enum):
    """The value of ``llm_status`` in the enriched table."""

    OK = "ok"
    PENDING = "pending"
    FAILED = "failed"
