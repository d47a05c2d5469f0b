"""What Gemini says of batches and their lines, in our words."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import orjson
from pydantic import AwareDatetime, BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from batchsql.backends.batch import (
    BatchFault,
    BatchLimits,
    BatchLine,
    BatchState,
    BatchStatus,
    request_key_of,
)
from batchsql.backends.google import classify_error, parse_answer
from batchsql.backends.online import Answer, ErrorReply, Failure
from batchsql.errors import BackendError
from batchsql.types import Completion, Outcome

RESULTS_KEPT = timedelta(hours=48)
"""How long results can be fetched once a batch has ended.

Google does not say it of batches. It says it of files, and results that do not stand in the reply
are in one: https://ai.google.dev/gemini-api/docs/files
"""

LIMITS = BatchLimits(
    # One that expires gives nothing, however much of it was done; a small one is done sooner.
    max_requests=2_000,
    max_bytes=1_900_000_000,  # of 2 GB
    window_seconds=48 * 3600,
    retention_seconds=48 * 3600 + RESULTS_KEPT.total_seconds(),
    create_seconds=120.0,  # a small batch travels in it
    settle_seconds=120.0,
    keeps_partial=False,
    settles_late=True,
)
"""https://ai.google.dev/gemini-api/docs/batch-api"""

MAX_MESSAGE_CHARS = 500
TOO_LARGE_TEXT = re.compile(r"payload size|size exceeds", re.IGNORECASE)
"""What an error says that has no code of its own."""

_STATES = {
    "UNSPECIFIED": BatchState.RUNNING,
    "PENDING": BatchState.RUNNING,
    "QUEUED": BatchState.RUNNING,
    "RUNNING": BatchState.RUNNING,
    "CANCELLING": BatchState.CANCELLING,
    "SUCCEEDED": BatchState.COMPLETED,
    "PARTIALLY_SUCCEEDED": BatchState.COMPLETED,
    "EXPIRED": BatchState.EXPIRED,
    "CANCELLED": BatchState.CANCELLED,
    "FAILED": BatchState.FAILED,
}
_WAITING = {"PENDING", "QUEUED"}
# google.rpc.Code: https://github.com/googleapis/googleapis/blob/master/google/rpc/code.proto
_STATUS_OF_CODE = {
    1: 499,
    2: 500,
    3: 400,
    4: 504,
    5: 404,
    7: 403,
    8: 429,
    9: 400,
    10: 409,
    11: 400,
    13: 500,
    14: 503,
    16: 401,
}


class _Wire(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel)


class Stats(_Wire):
    request_count: int | None = None
    successful_request_count: int = 0
    failed_request_count: int = 0


class Inlined(_Wire):
    inlined_responses: list[Any] = []


class Output(_Wire):
    responses_file: str | None = None
    inlined_responses: Inlined | None = None


class Metadata(_Wire):
    state: str = "BATCH_STATE_UNSPECIFIED"  # which Google's JSON leaves out
    create_time: AwareDatetime
    end_time: AwareDatetime | None = None
    display_name: str = ""
    batch_stats: Stats = Stats()
    output: Output | None = None


class Problem(_Wire):
    code: int = 0
    message: str = ""


class Operation(_Wire):
    """A batch as the API describes it: https://ai.google.dev/api/batch-api#Operation."""

    name: str
    metadata: Metadata
    error: Problem | None = None
    response: Output | None = None

    @property
    def output(self) -> Output | None:
        return self.response or self.metadata.output


class Created(_Wire):
    """What matters of the reply to a creation."""

    name: str


class Page(_Wire):
    """One page of the account's batches."""

    operations: list[Operation] = []
    next_page_token: str = ""


def read_status(batch: Operation) -> BatchStatus:
    """Return where a batch stands.

    Raises:
        BackendError: it is in a state that is not known.
    """
    told = batch.metadata
    name = re.sub(r"^(BATCH|JOB)_STATE_", "", told.state)
    if name not in _STATES:
        raise BackendError(f"batch {batch.name} is in a state that is not known: {told.state}")
    state = _STATES[name]
    stats = told.batch_stats
    is_counted = stats.request_count is not None  # a count of zero is left out
    fault, error = None, None
    if batch.error is not None:
        error = f"code {batch.error.code}: {batch.error.message}"[:MAX_MESSAGE_CHARS]
    if state is BatchState.FAILED:
        fault = _fault(batch.error)
        error = error or "Google gives no reason"
    has_results = state is BatchState.COMPLETED and told.end_time is not None
    return BatchStatus(
        state,
        told.state,
        stats.request_count,
        stats.successful_request_count if is_counted else None,
        stats.failed_request_count if is_counted else None,
        fault,
        error,
        told.end_time + RESULTS_KEPT if has_results and told.end_time else None,
        has_begun=name not in _WAITING,
    )


def _fault(error: Problem | None) -> BatchFault:
    status = _STATUS_OF_CODE.get(error.code, 500) if error else 500
    if error and TOO_LARGE_TEXT.search(error.message):
        return BatchFault.TOO_LARGE
    if status == 429:
        return BatchFault.QUEUE_FULL
    return BatchFault.SYSTEMIC if status in (400, 401, 403, 404) else BatchFault.TRANSIENT


def parse_line(line: bytes) -> BatchLine:
    """Return one line of results, as a file has them or the reply; never raises."""
    try:
        entry = _read_json(line)
        custom_id = entry["key"] if "key" in entry else entry.get("metadata", {}).get("key")
        if not isinstance(custom_id, str):
            custom_id = ""
        if "response" in entry:
            said = parse_answer(entry["response"])
        else:
            said = _line_failure(entry["error"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        custom_id = ""
        said = Failure(Outcome.TRANSIENT, f"the line is no result: {line[:100]!r}")
    key = request_key_of(custom_id)
    if isinstance(said, Answer):
        return BatchLine(
            custom_id,
            Completion(
                key, said.text, said.finish_reason, said.usage, model_reported=said.model_reported
            ),
        )
    failure = said.outcome or Outcome.TRANSIENT  # the next batch meets what ails the account
    error = said.message[:MAX_MESSAGE_CHARS]
    return BatchLine(
        custom_id, Completion(key, None, None, said.usage, failure=failure, error=error)
    )


def _read_json(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except ValueError:
        return json.loads(line)  # takes half of a surrogate pair


def _line_failure(error: Mapping[str, Any]) -> Failure:
    """Return what the error of a line says; its code is one of google.rpc or of HTTP."""
    code = error.get("code", 2)
    status = _STATUS_OF_CODE.get(code, code)
    return classify_error(ErrorReply(status, str(error.get("message") or "no reason given")))
