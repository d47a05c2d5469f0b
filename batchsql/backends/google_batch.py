"""Gemini's Batch API.

A batch carries a name, by which it is found again. A small one travels whole in the call that
creates it, a larger one as a file brought before. Results are told apart by their key, never by
their place: their order has been seen to change (googleapis/python-genai#1909).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import orjson
from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from batchsql.backends.batch import (
    BatchFault,
    BatchGoneError,
    BatchLimits,
    BatchLine,
    BatchState,
    BatchStatus,
    CreatedBatch,
    Finding,
    ListedBatch,
    MaybeCreatedError,
    NotCreatedError,
    ProviderBusyError,
    ShardLabel,
    account_of,
    iter_lines,
    request_key_of,
)
from batchsql.backends.endpoint import Endpoint, scrub
from batchsql.backends.google import (
    ErrorReplyError,
    GoogleClient,
    classify_error,
    contents_body,
    fixed_body,
    model_path,
    parse_answer,
    plan_google,
    sdk_version,
)
from batchsql.backends.loop import submit
from batchsql.backends.online import Answer, ErrorReply, Failure, lost_connection
from batchsql.errors import BackendError, SystemicError
from batchsql.types import Call, Completion, ModelRef, Outcome, Request

_T = TypeVar("_T")

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

INLINE_BYTES = 6_000_000
"""Above it the input goes as a file. The limit is 20 MB as sent, where the SDK writes a letter of
two bytes as six."""

REPLY_SECONDS = 60.0
"""How long a call waits for its reply, or for more of it."""

TRANSFER_SECONDS = 600.0
"""The same for a file."""

_PAGE = 20  # a page may hold the results of all its batches
_DOWNLOAD_TRIES = 3
_MAX_MESSAGE_CHARS = 500
# How far the warehouse's clock and the provider's may be apart.
_CLOCKS_DIFFER = timedelta(minutes=15)

_STATES = {
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
# None of these has a code of its own.
_TOO_LARGE_TEXT = re.compile(r"payload size|size exceeds", re.IGNORECASE)
_NO_FILE_TEXT = re.compile(r"may not exist", re.IGNORECASE)
_BATCH_QUOTA = re.compile(r"batch|enqueued", re.IGNORECASE)


class _Wire(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel)


class _Stats(_Wire):
    request_count: int | None = None
    successful_request_count: int = 0
    failed_request_count: int = 0


class _Inlined(_Wire):
    inlined_responses: list[Any] = []


class _Output(_Wire):
    responses_file: str | None = None
    inlined_responses: _Inlined | None = None


class _Metadata(_Wire):
    state: str
    create_time: AwareDatetime
    end_time: AwareDatetime | None = None
    display_name: str = ""
    batch_stats: _Stats = _Stats()
    output: _Output | None = None


class _Problem(_Wire):
    code: int = 0
    message: str = ""


class _Operation(_Wire):
    name: str
    metadata: _Metadata
    error: _Problem | None = None
    response: _Output | None = None

    @property
    def output(self) -> _Output | None:
        return self.response or self.metadata.output


class _Page(_Wire):
    operations: list[_Operation] = []
    next_page_token: str = ""


_Model = TypeVar("_Model", bound=BaseModel)


class _TooLateError(Exception):
    """Too little time is left for a creation."""


def open_google_batch(
    model: ModelRef, engine: Mapping[str, Any], project_root: Path
) -> GoogleBatch:
    """Return what brings requests for ``google/<model>`` to the batch API.

    Raises:
        SpecError: an engine option is wrong.
        MissingExtraError: the SDK is not installed.
    """
    return GoogleBatch(model, plan_google(model, engine))


class GoogleBatch:
    """Satisfies ``BatchBackend``, which says what each method promises."""

    def __init__(self, model: ModelRef, endpoint: Endpoint) -> None:
        self._model = model
        self._endpoint = endpoint
        self._client: GoogleClient | None = None  # made and used on the loop only

    @property
    def limits(self) -> BatchLimits:
        return LIMITS

    @property
    def version(self) -> str:
        return sdk_version()

    @property
    def account(self) -> str:
        return account_of(self._endpoint.base_url, self._endpoint.read_api_key())

    def identity(self) -> Mapping[str, Any]:
        """Return the endpoint, unless it is the provider's own: there the name says it all."""
        return {} if self._endpoint.is_own else {"endpoint": self._endpoint.base_url}

    # --- creating -------------------------------------------------------------------------------

    def encoder(self, call: Call) -> Callable[[str, Request], bytes]:
        """Return a function that makes lines of an input file; ``create`` may inline them."""
        fixed = orjson.dumps(fixed_body(call))[:-1]  # without the brace that closes it

        def encode(custom_id: str, request: Request) -> bytes:
            own = orjson.dumps(contents_body(request))
            return b'{"key":"%b","request":%b,%b}' % (custom_id.encode(), fixed, own[1:])

        return encode

    def upload(self, shard: ShardLabel, lines: Path, call: Call) -> str | None:
        if lines.stat().st_size <= INLINE_BYTES:
            return None
        reply = self._run(self._upload(shard, lines))
        if isinstance(reply, ErrorReply) and (
            reply.status == 413 or _TOO_LARGE_TEXT.search(reply.message)
        ):
            raise NotCreatedError(BatchFault.TOO_LARGE, self._say(_told(reply)))
        return self._good(reply, f"the input of shard {shard.shard_id}")

    async def _upload(self, shard: ShardLabel, lines: Path) -> str | ErrorReply | Failure:
        from google.genai import types

        options = types.HttpOptions(
            # Given here as well, so that the SDK sends the rows to no other host.
            base_url=self._endpoint.base_url,
            timeout=int(TRANSFER_SECONDS * 1000),
        )
        config = types.UploadFileConfig(
            # This type is the one that Google's documentation uses for such files.
            mime_type="jsonl",
            display_name=_name(shard),
            http_options=options,
        )

        async def send() -> str:
            sdk = self._connected().sdk
            file = await sdk.aio.files.upload(file=str(lines), config=config)
            return str(file.name)

        try:
            return await _read_reply(send())
        except (KeyError, ValueError) as error:  # the SDK's own, for a reply that it cannot use
            return Failure(Outcome.TRANSIENT, f"the file was not taken: {error}")

    def create(
        self, shard: ShardLabel, lines: Path, uploaded: str | None, call: Call, must_end_by: float
    ) -> CreatedBatch:
        source: dict[str, Any] = {"fileName": uploaded}
        if uploaded is None:
            source = {"requests": {"requests": [_inlined(line) for line in iter_lines(lines)]}}
        sending = _Sending(must_end_by)
        body = {"batch": {"displayName": _name(shard), "inputConfig": source}}
        reply = self._run(self._create(body, sending))
        if isinstance(reply, str):
            with contextlib.suppress(ValidationError):
                return CreatedBatch(_Operation.model_validate_json(reply).name)
            message = f"the reply to the creation of a batch is none: {reply[:100]!r}"
            raise MaybeCreatedError(self._say(message))
        if isinstance(reply, ErrorReply):
            if (error := self._refusal(reply, uploaded)) is not None:
                raise error
            message = _told(reply)
        else:
            message = reply.message
        if sending.is_whole:
            raise MaybeCreatedError(self._say(f"a batch may have been created or not: {message}"))
        # The length was announced, so a server cannot take a part of it for the whole.
        message = self._say(f"the batch was not sent whole: {message}")
        raise NotCreatedError(BatchFault.TRANSIENT, message)

    async def _create(
        self, body: Mapping[str, Any], sending: _Sending
    ) -> str | ErrorReply | Failure:
        """Send the body over a connection of its own, so that no old one is found broken."""
        client = self._open(LIMITS.create_seconds, [sending.watch])
        path = f"{model_path(self._model)}:batchGenerateContent"
        try:
            return await asyncio.wait_for(
                _read_reply(client.call("post", path, body)), sending.must_end_by - time.monotonic()
            )
        except _TooLateError:
            return Failure(Outcome.TRANSIENT, "too little time is left to create it")
        except asyncio.TimeoutError:
            return Failure(Outcome.TRANSIENT, "no reply in the time that was left")
        finally:
            await client.close()

    def _refusal(self, reply: ErrorReply, uploaded: str | None) -> BackendError | None:
        """Return the error of a reply after which there surely is no batch, or None."""
        message = self._say(_told(reply))
        failure = classify_error(reply)
        quota = reply.code or ""
        if reply.status == 429 and _BATCH_QUOTA.search(quota):
            return NotCreatedError(BatchFault.QUEUE_FULL, message, reply.retry_after_seconds)
        if reply.status == 413 or (reply.status == 400 and _TOO_LARGE_TEXT.search(reply.message)):
            return NotCreatedError(BatchFault.TOO_LARGE, message)
        if uploaded is not None and _NO_FILE_TEXT.search(reply.message):
            return NotCreatedError(BatchFault.TRANSIENT, message)
        if failure.outcome is None:
            return self._systemic(failure)
        if reply.status == 429:
            # A limit by the minute says when to come again; the one of waiting batches does not.
            is_busy = reply.retry_after_seconds is not None or quota
            fault = BatchFault.TRANSIENT if is_busy else BatchFault.QUEUE_FULL
            return NotCreatedError(fault, message, reply.retry_after_seconds)
        if failure.outcome is Outcome.TRANSIENT:
            return None
        return NotCreatedError(BatchFault.SYSTEMIC, message)

    def find(self, shard: ShardLabel) -> Finding:
        since = shard.created_after and shard.created_after - _CLOCKS_DIFFER
        for batch in self._batches(since):
            is_named = batch.metadata.display_name == _name(shard)
            if is_named and batch.name not in shard.not_ours:
                return Finding(batch.name)
        return Finding(is_sure=True)

    # --- following ------------------------------------------------------------------------------

    def poll(self, provider_batch_id: str) -> BatchStatus:
        return _status(self._get(provider_batch_id))

    def cancel(self, provider_batch_id: str) -> None:
        reply = self._run(self._send("post", f"{provider_batch_id}:cancel"))
        if isinstance(reply, ErrorReply) and reply.status in (400, 409):
            # What the API says of a batch that has ended is not documented: look.
            is_over = _status(self._get(provider_batch_id)).state.is_final
            reply = "" if is_over else reply
        self._good(reply, provider_batch_id)

    def discard(self, provider_batch_id: str, uploaded: str | None) -> None:
        if uploaded is not None:
            # Otherwise Google deletes it, after 48 hours.
            self._run(self._send("delete", uploaded))

    def list_batches(self, since: datetime) -> Iterator[ListedBatch]:
        found = [
            ListedBatch(
                batch.name,
                _status(batch),
                batch.metadata.create_time,
                _shard_hex(batch.metadata.display_name),
            )
            for batch in self._batches(since)
        ]
        yield from sorted(found, key=lambda batch: batch.created_at, reverse=True)

    def close(self) -> None:
        async def close() -> None:
            if self._client is not None:
                await self._client.close()
                self._client = None

        self._run(close())

    def _batches(self, since: datetime | None) -> Iterator[_Operation]:
        """Yield the account's batches created since then.

        The list has been seen newest first, which is not documented: it is read to its end, unless
        all of it so far is clearly in that order and has gone past that time.
        """
        token = ""
        times: list[datetime] = []
        while True:
            query = f"batches?pageSize={_PAGE}" + (f"&pageToken={quote(token)}" if token else "")
            content = self._good(self._run(self._send("get", query)), "the list of batches")
            page = self._parse(_Page, content)
            for batch in page.operations:
                times.append(batch.metadata.create_time)
                if since is None or times[-1] >= since:
                    yield batch
            is_falling = times == sorted(times, reverse=True) and times[:1] > times[-1:]
            if since is not None and is_falling and times[-1] < since:
                return
            if page.next_page_token in ("", token):
                return
            token = page.next_page_token

    def _get(self, provider_batch_id: str) -> _Operation:
        reply = self._run(self._send("get", provider_batch_id))
        return self._parse(_Operation, self._good(reply, provider_batch_id))

    # --- results --------------------------------------------------------------------------------

    def fetch(self, provider_batch_id: str, folder: Path, call: Call) -> Iterator[BatchLine]:
        batch = self._get(provider_batch_id)
        state = _status(batch).state
        if not state.is_final:
            raise ProviderBusyError(f"batch {batch.name} has no results yet")
        file = folder / f"{re.sub(r'[^A-Za-z0-9_-]', '_', batch.name)[:100]}.jsonl"
        output = batch.output
        if output is not None and output.responses_file is not None:
            self._download(output.responses_file, file)
        elif output is not None and output.inlined_responses is not None:
            with file.open("wb") as copy:
                for entry in output.inlined_responses.inlined_responses:
                    copy.write(json.dumps(entry).encode() + b"\n")
        elif state is BatchState.COMPLETED:
            raise BatchGoneError(f"Google has deleted the results of batch {batch.name}")
        else:
            return iter(())
        return map(_parse_line, iter_lines(file))

    def _download(self, name: str, file: Path) -> None:
        from google.genai import types

        options = types.HttpOptions(timeout=int(TRANSFER_SECONDS * 1000))
        config = types.DownloadFileConfig(http_options=options)

        async def download() -> str:
            sdk = self._connected().sdk
            await sdk.aio.files.download(file=name, destination=str(file), config=config)
            return ""

        for tries in range(1, _DOWNLOAD_TRIES + 1):
            reply = self._run(_read_reply(download()))
            if not isinstance(reply, Failure):
                break
            if tries == _DOWNLOAD_TRIES:
                raise ProviderBusyError(self._say(f"the results break off: {reply.message}"))
        self._good(reply, f"the results {name}")

    # --- sending --------------------------------------------------------------------------------

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return submit(coroutine).result()

    def _open(self, timeout_seconds: float, hooks: list[Any] | None = None) -> GoogleClient:
        key = self._endpoint.read_api_key()
        return GoogleClient(self._endpoint, key, timeout_seconds, hooks or [])

    def _connected(self) -> GoogleClient:
        if self._client is None:
            self._client = self._open(REPLY_SECONDS)
        return self._client

    async def _send(self, method: str, path: str) -> str | ErrorReply | Failure:
        return await _read_reply(self._connected().call(method, path))

    def _good(self, reply: str | ErrorReply | Failure, subject: str) -> str:
        """Return a good reply, or raise what another one says about the call."""
        if isinstance(reply, str):
            return reply
        if isinstance(reply, Failure):
            raise ProviderBusyError(self._say(f"{subject}: {reply.message}"))
        message = self._say(f"{subject}: {_told(reply)}")
        if reply.status == 404 or _NO_FILE_TEXT.search(reply.message):
            raise BatchGoneError(message)
        failure = classify_error(reply)
        if failure.outcome is None:
            raise self._systemic(failure)
        if failure.outcome is Outcome.TRANSIENT:
            raise ProviderBusyError(message, reply.retry_after_seconds)
        raise BackendError(message)

    def _parse(self, kind: type[_Model], content: str) -> _Model:
        try:
            return kind.model_validate_json(content)
        except ValidationError as error:
            problem = error.errors(include_input=False, include_url=False)[0]
            raise ProviderBusyError(
                self._say(f"a reply is not of this API: {problem['loc']}: {problem['msg']}")
            ) from None

    def _systemic(self, failure: Failure) -> SystemicError:
        return SystemicError(self._say(f"model {self._model}: {failure.message}"))

    def _say(self, message: str) -> str:
        with contextlib.suppress(SystemicError):  # there may be no key any more
            message = scrub(message, self._endpoint.read_api_key())
        return message[:_MAX_MESSAGE_CHARS]


class _Sending:
    """Watches one request leave."""

    def __init__(self, must_end_by: float) -> None:
        self.must_end_by = must_end_by
        self.is_whole = False  # nothing of the request is still here

    async def watch(self, request: Any) -> None:
        request.extensions["trace"] = self._trace

    async def _trace(self, event: str, info: Any) -> None:
        # The names are documented: https://www.encode.io/httpcore/extensions/#trace
        if event.endswith(".send_request_headers.started"):
            # The connection stands; the next thing is the first byte.
            if self.must_end_by - time.monotonic() < LIMITS.create_seconds / 2:
                raise _TooLateError
        elif event.endswith(".send_request_body.complete"):
            self.is_whole = True


async def _read_reply(sending: Coroutine[Any, Any, str]) -> str | ErrorReply | Failure:
    """Return a good reply, what an error reply says, or how the connection failed."""
    import httpx2

    try:
        return await sending
    except ErrorReplyError as error:
        return error.reply
    except httpx2.HTTPError as error:
        return lost_connection(error)


def _name(shard: ShardLabel) -> str:
    return f"batchsql-{shard.hex}"


def _shard_hex(name: str) -> str | None:
    found = re.fullmatch(r"batchsql-([0-9a-f]{32})", name)
    return found[1] if found else None


def _told(reply: ErrorReply) -> str:
    return f"status {reply.status}: {reply.message}"


def _inlined(line: bytes) -> dict[str, Any]:
    entry = orjson.loads(line)
    return {"request": entry["request"], "metadata": {"key": entry["key"]}}


def _status(batch: _Operation) -> BatchStatus:
    told = batch.metadata
    name = re.sub(r"^(BATCH|JOB)_STATE_", "", told.state)
    if name not in _STATES:
        raise BackendError(f"batch {batch.name} is in a state that is not known: {told.state}")
    state = _STATES[name]
    stats = told.batch_stats
    is_counted = stats.request_count is not None  # a count of zero is left out
    fault, error = None, None
    if batch.error is not None:
        error = f"code {batch.error.code}: {batch.error.message}"[:_MAX_MESSAGE_CHARS]
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
    )


def _fault(error: _Problem | None) -> BatchFault:
    status = _STATUS_OF_CODE.get(error.code, 500) if error else 500
    if error and _TOO_LARGE_TEXT.search(error.message):
        return BatchFault.TOO_LARGE
    if status == 429:
        return BatchFault.QUEUE_FULL
    return BatchFault.SYSTEMIC if status in (400, 401, 403, 404) else BatchFault.TRANSIENT


def _parse_line(line: bytes) -> BatchLine:
    try:
        entry = _read_json(line)
        custom_id = entry["key"] if "key" in entry else entry.get("metadata", {}).get("key")
        if not isinstance(custom_id, str):
            custom_id = ""
        if "response" in entry:
            said = parse_answer(entry["response"])
        else:
            said = _line_failure(entry["error"])
    except (ValueError, LookupError, TypeError, AttributeError):
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
    error = said.message[:_MAX_MESSAGE_CHARS]
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
