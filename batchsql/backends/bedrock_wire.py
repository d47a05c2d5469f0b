"""What Bedrock says of its batch inference jobs and in their output, in our words."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

import orjson

from batchsql.backends.batch import (
    BatchFault,
    BatchLimits,
    BatchLine,
    BatchState,
    BatchStatus,
    request_key_of,
)
from batchsql.backends.bedrock import classify_error, read_answer
from batchsql.backends.online import Answer, ErrorReply, Failure
from batchsql.errors import BackendError
from batchsql.types import Completion, Outcome

LIMITS = BatchLimits(
    max_requests=50_000,
    max_bytes=500_000_000,  # half of what a file may have, to keep the spool on this machine small
    min_requests=100,
    window_seconds=24 * 3600,
    retention_seconds=365 * 24 * 3600,  # the results are the user's own files
    # AWS takes a signature for five minutes, so what was signed in time cannot arrive any later.
    settle_seconds=300.0,
    keeps_partial=True,
    settles_late=True,
)

MAX_MESSAGE_CHARS = 500
_STATES = {
    "Submitted": BatchState.RUNNING,
    "Validating": BatchState.RUNNING,
    "Scheduled": BatchState.RUNNING,
    "InProgress": BatchState.RUNNING,
    "Stopping": BatchState.CANCELLING,
    "Stopped": BatchState.CANCELLED,
    "Completed": BatchState.COMPLETED,
    "PartiallyCompleted": BatchState.EXPIRED,  # its time was over before all records were done
    "Expired": BatchState.EXPIRED,
    "Failed": BatchState.FAILED,
}
_HTTP_STATUSES = frozenset(str(status) for status in range(100, 600))
_UNCHECKED = frozenset({"Submitted", "Validating"})
# A job that failed has a message and no code, and AWS does not list the messages.
_FAULTS = (
    (
        re.compile(
            r"more records|(?:records|size)\b.*(?:maximum|exceed|limit|quota)", re.IGNORECASE
        ),
        BatchFault.TOO_LARGE,
    ),
    (re.compile(r"quota|too many (?:jobs|requests)|throttl", re.IGNORECASE), BatchFault.QUEUE_FULL),
    (
        re.compile(r"internal (?:server )?error|try again|unavailable", re.IGNORECASE),
        BatchFault.TRANSIENT,
    ),
)


def status_of(job: Mapping[str, Any]) -> BatchStatus:
    """Return where a job stands, from its description or a summary of it.

    Raises:
        BackendError: it has a status that is not known.
    """
    said = job["status"]
    if said not in _STATES:
        raise BackendError(f"Bedrock gives job {job['jobArn']} an unknown status: {said!r}")
    state, fault, message = _STATES[said], None, job.get("message")
    if state is BatchState.FAILED:
        if job.get("processedRecordCount"):
            state = BatchState.EXPIRED  # it failed on its way, and what was done is billed
        else:
            fault = fault_of(message or "")
    return BatchStatus(
        state,
        said,
        total=job.get("totalRecordCount") or None,  # zero until the input has been counted
        ok=job.get("successRecordCount"),
        failed=job.get("errorRecordCount"),
        fault=fault,
        error=message[:MAX_MESSAGE_CHARS] if message else None,
        is_checked=said not in _UNCHECKED,
    )


def fault_of(message: str) -> BatchFault:
    """Return why a job was refused, as far as its message tells."""
    found = (fault for pattern, fault in _FAULTS if pattern.search(message))
    return next(found, BatchFault.SYSTEMIC)


def parse_line(line: bytes) -> BatchLine:
    """Return one line of a job's output."""
    record = _read_json(line)
    custom_id = record.get("recordId") if isinstance(record, dict) else None
    if not isinstance(custom_id, str):
        custom_id, record = "", {}
    output, refusal = record.get("modelOutput"), record.get("error")
    result: Answer | Failure = Failure(
        Outcome.TRANSIENT, f"the line holds neither an answer nor an error: {line[:100]!r}"
    )
    with contextlib.suppress(RecursionError):  # orjson reads deeper than Python shows
        if isinstance(output, dict):
            result = read_answer(output)
        elif isinstance(refusal, dict):
            code = str(refusal.get("errorCode"))
            message = str(refusal.get("errorMessage") or "no reason given")
            result = classify_error(
                ErrorReply(int(code) if code in _HTTP_STATUSES else 400, message, code)
            )
    key = request_key_of(custom_id)
    if isinstance(result, Answer):
        return BatchLine(
            custom_id, Completion(key, result.text, result.finish_reason, result.usage)
        )
    # Where all requests share a fault, each still has a line of its own here.
    outcome = result.outcome or Outcome.REJECTED
    error = result.message[:MAX_MESSAGE_CHARS]
    completion = Completion(key, None, None, result.usage, failure=outcome, error=error)
    return BatchLine(custom_id, completion)


def _read_json(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except ValueError:
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(line)  # which takes lone surrogates
    return None
