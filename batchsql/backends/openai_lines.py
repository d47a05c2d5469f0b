"""OpenAI's batches: the lines that go in and come out, and what is said of a batch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any, Literal

import orjson

from batchsql.backends.batch import (
    BatchFault,
    BatchLine,
    BatchState,
    BatchStatus,
    request_key_of,
)
from batchsql.backends.online import Answer, Failure, read_error_reply
from batchsql.backends.openai import classify_error, fixed_body, parse_answer
from batchsql.errors import BackendError
from batchsql.types import Call, Completion, Outcome, Request

BATCH_ENDPOINT: Literal["/v1/chat/completions"] = "/v1/chat/completions"

# In lower case. The last lines are of Novita and Together, which speak the same otherwise.
_STATES = {
    "validating": BatchState.RUNNING,
    "in_progress": BatchState.RUNNING,
    "finalizing": BatchState.RUNNING,
    "completed": BatchState.COMPLETED,
    "expired": BatchState.EXPIRED,
    "cancelling": BatchState.CANCELLING,
    "cancelled": BatchState.CANCELLED,
    "failed": BatchState.FAILED,
    "progress": BatchState.RUNNING,
    "queued": BatchState.RUNNING,
    "canceling": BatchState.CANCELLING,
    "canceled": BatchState.CANCELLED,
}
_QUEUE_CODES = frozenset({"token_limit_exceeded"})
_QUEUE_TEXT = re.compile(r"\benqueued\b|\bbatch queue\b", re.IGNORECASE)
_SIZE_CODES = frozenset({"too_many_tasks", "file_too_large"})
_SIZE_TEXT = re.compile(r"\bfile\b.*\btoo large\b|\bmaximum file size\b", re.IGNORECASE)
_FAULT_CODES = frozenset({"server_error", "internal_error", "internal_server_error"})
_NOT_RUN = {
    "batch_expired": "expired in the batch, not billed",
    "batch_cancelled": "cancelled in the batch, not billed",
}
_SHOWN_ERRORS = 3
_REFUSED = "every request is refused"


def batch_encoder(call: Call, *, is_compatible: bool) -> Callable[[str, Request], bytes]:
    """Return a function from custom id and request to its line, without a line end.

    What all lines share is encoded once; orjson writes the messages themselves, whose fields are
    named as on the wire.
    """
    shared = orjson.dumps(fixed_body(call, is_compatible=is_compatible))[1:]
    middle = b',"method":"POST","url":"%b","body":{"messages":' % BATCH_ENDPOINT.encode()
    end = b"," + shared + b"}"

    def encode(custom_id: str, request: Request) -> bytes:
        custom, messages = orjson.dumps(custom_id), orjson.dumps(request.messages)
        return b"".join((b'{"custom_id":', custom, middle, messages, end))

    return encode


def parse_line(text: bytes, schema: Mapping[str, Any]) -> BatchLine:
    """Return what a line of an output or error file says; ``schema`` is the user's.

    A line may stand in either file: what counts is its status. One that is no JSON, or has no id,
    comes back under an empty id. A fault that all requests share (a bad key, an unknown model) is
    REJECTED with a text that says so; whether every line says it is for the caller to see. Under
    status 429 it is TRANSIENT: an account without credit is not the row's fault.
    """
    line = parse_json(text)
    custom_id = line.get("custom_id") if isinstance(line, dict) else None
    if not isinstance(line, dict) or not isinstance(custom_id, str):
        shown = text[:100].decode(errors="replace")
        failure = Failure(Outcome.TRANSIENT, f"a line of the results is unreadable: {shown!r}")
        return BatchLine("", _completion("", failure))
    try:
        result = _parse_result(line, schema)
    except RecursionError:  # orjson reads deeper than json writes
        result = Failure(Outcome.TRANSIENT, "a line of the results is nested too deeply")
    return BatchLine(custom_id, _completion(request_key_of(custom_id), result))


def parse_json(text: bytes) -> Any:
    """Return the value in a line, None where it holds none."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:  # takes lone surrogates, which orjson does not
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _parse_result(line: Mapping[str, Any], schema: Mapping[str, Any]) -> Answer | Failure:
    response = line.get("response")
    if not isinstance(response, dict):
        error = line.get("error")
        error = error if isinstance(error, dict) else {"message": error}
        code, message = error.get("code"), error.get("message") or "no reason given"
        said = _NOT_RUN.get(str(code), f"not run in the batch: {code}")
        return Failure(Outcome.TRANSIENT, f"{said} ({message})")
    status, body = response.get("status_code"), response.get("body")
    if status == 200:
        return parse_answer(body, schema)
    if not isinstance(status, int):
        return Failure(Outcome.TRANSIENT, f"the line has no status: {status!r}")
    failure = classify_error(
        read_error_reply(status, {}, json.dumps(body).encode() if body else b"")
    )
    if failure.outcome is not None:
        return failure
    said = failure.message
    if not said.startswith(_REFUSED):
        said = f"{_REFUSED}: {said}"
    return Failure(Outcome.TRANSIENT if status == 429 else Outcome.REJECTED, said)


def _completion(request_key: str, result: Answer | Failure) -> Completion:
    if isinstance(result, Answer):
        return Completion(
            request_key, result.text, result.finish_reason, result.usage, None, None,
            result.model_reported,
        )  # fmt: skip
    return Completion(
        request_key, None, None, result.usage, failure=result.outcome, error=result.message
    )


def parse_status(batch: Mapping[str, Any], retention: timedelta) -> BatchStatus:
    """Return where a batch stands.

    One that failed but has files of results was run, at least in part, so it counts as expired:
    what it has is taken.

    Raises:
        BackendError: the status is not known.
    """
    word = str(batch.get("status"))
    state = _STATES.get(word.lower())
    if state is None:
        known = ", ".join(sorted(_STATES))
        raise BackendError(
            f"batch {batch.get('id')} has the status {word!r}, which is not known; known: {known}"
        )
    if state is BatchState.FAILED and (batch.get("output_file_id") or batch.get("error_file_id")):
        state = BatchState.EXPIRED
    counts = batch.get("request_counts")
    counts = counts if isinstance(counts, dict) else {}
    fault, error = (
        _parse_errors(batch.get("errors")) if state is BatchState.FAILED else (None, None)
    )
    created_at = parse_moment(batch.get("created_at"))
    return BatchStatus(
        state,
        word,
        total=counts.get("total"),
        ok=counts.get("completed"),
        failed=counts.get("failed"),
        fault=fault,
        error=error,
        results_until=created_at and created_at + retention,
        is_checked=word.lower() != "validating",
    )


def _parse_errors(errors: Any) -> tuple[BatchFault, str]:
    data = errors.get("data") if isinstance(errors, dict) else errors
    found = [each for each in data or () if isinstance(each, dict)]
    if not found:
        return BatchFault.TRANSIENT, "no reason given"
    faults = {fault_of(each.get("code"), str(each.get("message"))) for each in found}
    # The first that applies: smaller batches help no one whose lines are malformed.
    order = (BatchFault.SYSTEMIC, BatchFault.TOO_LARGE, BatchFault.QUEUE_FULL, BatchFault.TRANSIENT)
    fault = next(each for each in order if each in faults)
    parts = [
        f"{each.get('code')}"
        + (f", line {each['line']}" if each.get("line") else "")
        + f": {each.get('message')}"
        for each in found[:_SHOWN_ERRORS]
    ]
    if len(found) > _SHOWN_ERRORS:
        parts.append(f"and {len(found) - _SHOWN_ERRORS} more")
    return fault, "; ".join(parts)


def fault_of(code: str | None, message: str) -> BatchFault:
    """Return why a batch or its input was refused, from the code and the text of the error."""
    if code in _QUEUE_CODES or _QUEUE_TEXT.search(message):
        return BatchFault.QUEUE_FULL
    if code in _SIZE_CODES or _SIZE_TEXT.search(message):
        return BatchFault.TOO_LARGE
    return BatchFault.TRANSIENT if code in _FAULT_CODES else BatchFault.SYSTEMIC


def parse_moment(value: Any) -> datetime | None:
    """Return a moment that is given in seconds since the epoch, or as an ISO text."""
    try:
        if isinstance(value, str):
            moment = datetime.fromisoformat(value.replace("Z", "+00:00"))
            return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
        return datetime.fromtimestamp(value, timezone.utc)
    except (ValueError, TypeError, OverflowError, OSError):
        return None
