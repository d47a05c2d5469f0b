"""What Anthropic's batch API takes and gives, beside the messages themselves."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import AfterValidator, AwareDatetime, BaseModel

from batchsql.backends.anthropic import classify_error, parse_message
from batchsql.backends.batch import (
    BatchLimits,
    BatchLine,
    BatchState,
    BatchStatus,
    read_clock,
    request_key_of,
)
from batchsql.backends.online import Answer, ErrorReply, Failure
from batchsql.errors import BackendError
from batchsql.types import Completion, Outcome

LIMITS = BatchLimits(
    max_requests=100_000,
    max_bytes=250_000_000,  # of 256 MB
    window_seconds=24 * 3600,
    retention_seconds=29 * 24 * 3600,
    create_seconds=600.0,  # the whole input travels in it
    settle_seconds=120.0,
)
"""https://platform.claude.com/docs/en/build-with-claude/batch-processing"""

_BODY_START, _BODY_END = b'{"requests":[', b"]}"
_CHUNK_BYTES = 1 << 18
_NOT_BILLED = "the batch {} before this request was answered; it is not billed"
_STATUS_OF_KIND = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
"""https://platform.claude.com/docs/en/api/errors"""


_Moment = Annotated[AwareDatetime, AfterValidator(lambda moment: moment.astimezone(timezone.utc))]


class _Counts(BaseModel):
    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0

    @property
    def total(self) -> int:
        return self.processing + self.succeeded + self.errored + self.canceled + self.expired


class Batch(BaseModel):
    """What the API says of a batch, as far as it is used; more may be there."""

    id: str
    processing_status: str
    request_counts: _Counts
    created_at: _Moment
    cancel_initiated_at: _Moment | None = None
    archived_at: _Moment | None = None
    results_url: str | None = None

    @property
    def results_until(self) -> datetime:
        return self.archived_at or self.created_at + timedelta(seconds=LIMITS.retention_seconds)

    @property
    def state(self) -> BatchState:
        """Where the batch stands. Raises BackendError for an unknown status."""
        if self.processing_status == "in_progress":
            return BatchState.RUNNING
        if self.processing_status == "canceling":
            return BatchState.CANCELLING
        if self.processing_status != "ended":
            raise BackendError(
                f"Anthropic says that batch {self.id} is {self.processing_status!r}; known are "
                "in_progress, canceling and ended. A newer batchsql may know more"
            )
        if self.request_counts.expired:
            return BatchState.EXPIRED
        is_cancelled = self.request_counts.canceled or self.cancel_initiated_at
        return BatchState.CANCELLED if is_cancelled else BatchState.COMPLETED

    @property
    def status(self) -> BatchStatus:
        """What is told of the batch; nothing is counted before its end."""
        state, counts = self.state, self.request_counts
        return BatchStatus(
            state,
            self.processing_status,
            total=counts.total,
            ok=counts.succeeded if state.is_final else None,
            failed=counts.errored if state.is_final else None,
            results_until=self.results_until,
        )


class Page(BaseModel):
    """A part of the list of batches, newest first."""

    data: list[Batch]
    has_more: bool = False
    last_id: str | None = None


class Body:
    """The body of the call that creates a batch, read from the file of lines while it is sent."""

    def __init__(self, lines: Path, must_end_by: float) -> None:
        self._lines = lines
        self._must_end_by = must_end_by
        with lines.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            self._size = size - (file.read() == b"\n")
        self.length = len(_BODY_START) + self._size + len(_BODY_END)
        self.is_whole = False
        """Whether the last bytes may have left."""

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the body. Nothing more leaves a process that was stopped until it was too late."""
        yield _BODY_START
        left = self._size
        with self._lines.open("rb") as file:
            while left:
                chunk = file.read(min(_CHUNK_BYTES, left))
                left -= len(chunk)
                self._check(is_read=bool(chunk))
                yield chunk.replace(b"\n", b",")  # within a JSON text there is no line end
        self._check(is_read=True)
        self.is_whole = True
        yield _BODY_END

    def _check(self, *, is_read: bool) -> None:
        if not is_read:
            raise EOFError(f"{self._lines} became shorter while it was sent")
        if read_clock() >= self._must_end_by:
            raise TimeoutError("the time that was left for it is over")


def parse_line(line: bytes, clean: Callable[[str], str]) -> BatchLine:
    """Return what a line of the results says of its request.

    ``clean`` makes a message fit to be stored. One line that cannot be read does no harm to others.
    """
    custom_id = ""
    try:
        entry = read_json(line)
        custom_id = str(entry["custom_id"])
        result = _parse_result(entry["result"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        shown = line[:100].decode(errors="replace")
        result = Failure(Outcome.TRANSIENT, f"not a line of results: {shown!r}")
    key = request_key_of(custom_id)
    if isinstance(result, Answer):
        completion = Completion(
            key,
            result.text,
            result.finish_reason,
            result.usage,
            model_reported=result.model_reported,
        )
    else:
        completion = Completion(
            key,
            None,
            None,
            result.usage,
            # A fault that all requests share is not raised: other lines may hold paid answers.
            failure=result.outcome or Outcome.REJECTED,
            error=clean(result.message),
        )
    return BatchLine(custom_id, completion)


def _parse_result(result: Mapping[str, Any]) -> Answer | Failure:
    kind = result["type"]
    if kind == "succeeded":
        return parse_message(result["message"])
    if kind == "canceled":
        return Failure(Outcome.TRANSIENT, _NOT_BILLED.format("was cancelled"))
    if kind == "expired":
        return Failure(Outcome.TRANSIENT, _NOT_BILLED.format("expired"))
    if kind != "errored":
        return Failure(Outcome.REJECTED, f"the result is of an unknown type: {kind!r}")
    error = result["error"].get("error", result["error"])
    message = str(error.get("message") or "no reason given")
    status = _STATUS_OF_KIND.get(error["type"])
    if status is None:
        return Failure(Outcome.TRANSIENT, f"an unknown error, {error['type']!r}: {message}")
    return classify_error(ErrorReply(status, message, error["type"]))


def read_json(line: bytes) -> Any:
    """Return the JSON value of a line, or raise ValueError."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(line)  # which takes half of a surrogate pair, as a model may write one
    except RecursionError:
        raise ValueError("nested too deeply") from None
