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
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import orjson
from pydantic import BaseModel, ValidationError

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
    read_clock,
)
from batchsql.backends.endpoint import Endpoint, scrub
from batchsql.backends.google import (
    classify_error,
    contents_body,
    fixed_body,
    model_path,
    plan_google,
)
from batchsql.backends.google_client import GoogleClient, read_reply, sdk_version
from batchsql.backends.google_wire import (
    LIMITS,
    MAX_MESSAGE_CHARS,
    TOO_LARGE_TEXT,
    Created,
    Operation,
    Page,
    parse_line,
    read_status,
)
from batchsql.backends.loop import submit
from batchsql.backends.online import ErrorReply, Failure
from batchsql.errors import BackendError, SystemicError
from batchsql.types import Call, ModelRef, Outcome, Request

_T = TypeVar("_T")

INLINE_BYTES = 6_000_000
"""Above it the input goes as a file. The limit is 20 MB as sent, where the SDK writes a letter of
two bytes as six."""

REPLY_SECONDS = 60.0
"""How long a call waits for its reply, or for more of it."""

TRANSFER_SECONDS = 600.0
"""The same for a file."""

_PAGE = 20  # a page may hold the results of all its batches
_DOWNLOAD_TRIES = 3
# How far the warehouse's clock and the provider's may be apart.
_CLOCKS_DIFFER = timedelta(minutes=15)

# Neither has a code of its own.
_NO_FILE_TEXT = re.compile(r"may not exist", re.IGNORECASE)
_BATCH_QUOTA = re.compile(r"batch|enqueued", re.IGNORECASE)


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
            reply.status == 413 or TOO_LARGE_TEXT.search(reply.message)
        ):
            raise NotCreatedError(BatchFault.TOO_LARGE, self._say(_told(reply)))
        return self._good(reply, f"the input of shard {shard.shard_id}", may_be_gone=False)

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
            return await read_reply(send())
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
                return CreatedBatch(Created.model_validate_json(reply).name)
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
                read_reply(client.call("post", path, body)), sending.must_end_by - read_clock()
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
        if reply.status == 413 or (reply.status == 400 and TOO_LARGE_TEXT.search(reply.message)):
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
        return self._systemic(failure)  # the next batch is made like this one

    def find(self, shard: ShardLabel) -> Finding:
        since = shard.created_after and shard.created_after - _CLOCKS_DIFFER
        for batch in self._batches(since):
            is_named = batch.metadata.display_name == _name(shard)
            if is_named and batch.name not in shard.not_ours:
                return Finding(batch.name)
        return Finding(is_sure=True)

    # --- following ------------------------------------------------------------------------------

    def poll(self, provider_batch_id: str) -> BatchStatus:
        status = read_status(self._get(provider_batch_id))
        return replace(status, error=status.error and self._say(status.error))

    def cancel(self, provider_batch_id: str) -> None:
        reply = self._run(self._send("post", f"{provider_batch_id}:cancel"))
        if isinstance(reply, ErrorReply) and reply.status in (400, 409):
            # What the API says of a batch that has ended is not documented: look.
            is_over = read_status(self._get(provider_batch_id)).state.is_final
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
                read_status(batch),
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

    def _batches(self, since: datetime | None) -> Iterator[Operation]:
        """Yield the account's batches created since then.

        The list has been seen newest first, which is not documented: it is read to its end, unless
        all of it so far is clearly in that order and has gone past that time.
        """
        token = ""
        times: list[datetime] = []
        while True:
            query = f"batches?pageSize={_PAGE}" + (f"&pageToken={quote(token)}" if token else "")
            reply = self._run(self._send("get", query))
            content = self._good(reply, "the list of batches", may_be_gone=False)
            page = self._parse(Page, content)
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

    def _get(self, provider_batch_id: str) -> Operation:
        reply = self._run(self._send("get", provider_batch_id))
        return self._parse(Operation, self._good(reply, provider_batch_id))

    # --- results --------------------------------------------------------------------------------

    def fetch(self, provider_batch_id: str, folder: Path, call: Call) -> Iterator[BatchLine]:
        batch = self._get(provider_batch_id)
        status = read_status(batch)
        if not status.state.is_final:
            raise ProviderBusyError(f"batch {batch.name} has no results yet")
        file = folder / f"{re.sub(r'[^A-Za-z0-9_-]', '_', batch.name)[:100]}.jsonl"
        output = batch.output
        if output is not None and output.responses_file is not None:
            self._download(output.responses_file, file)
        elif output is not None and output.inlined_responses is not None:
            with file.open("wb") as copy:
                for entry in output.inlined_responses.inlined_responses:
                    copy.write(json.dumps(entry).encode() + b"\n")
        elif status.state is BatchState.COMPLETED:
            until = status.results_until
            if until is not None and datetime.now(timezone.utc) < until:
                raise ProviderBusyError(f"batch {batch.name} has ended but shows no results yet")
            raise BatchGoneError(f"Google has deleted the results of batch {batch.name}")
        else:
            return iter(())
        return map(self._line, iter_lines(file))

    def _line(self, text: bytes) -> BatchLine:
        line = parse_line(text)
        if line.completion.error is None:
            return line
        return replace(
            line, completion=replace(line.completion, error=self._say(line.completion.error))
        )

    def _download(self, name: str, file: Path) -> None:
        from google.genai import types

        options = types.HttpOptions(timeout=int(TRANSFER_SECONDS * 1000))
        config = types.DownloadFileConfig(http_options=options)

        async def download() -> str:
            sdk = self._connected().sdk
            await sdk.aio.files.download(file=name, destination=str(file), config=config)
            return ""

        for tries in range(1, _DOWNLOAD_TRIES + 1):
            reply = self._run(read_reply(download()))
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
        return await read_reply(self._connected().call(method, path))

    def _good(
        self, reply: str | ErrorReply | Failure, subject: str, *, may_be_gone: bool = True
    ) -> str:
        """Return a good reply, or raise what another one says about the call."""
        if isinstance(reply, str):
            return reply
        if isinstance(reply, Failure):
            raise ProviderBusyError(self._say(f"{subject}: {reply.message}"))
        message = self._say(f"{subject}: {_told(reply)}")
        if may_be_gone and (reply.status == 404 or _NO_FILE_TEXT.search(reply.message)):
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
        return message[:MAX_MESSAGE_CHARS]


class _Sending:
    """Watches one request leave."""

    def __init__(self, must_end_by: float) -> None:
        self.must_end_by = must_end_by
        self.is_whole = False  # all of it was handed to the connection

    async def watch(self, request: Any) -> None:
        request.extensions["trace"] = self._trace

    async def _trace(self, event: str, info: Any) -> None:
        # The names are documented: https://www.encode.io/httpcore/extensions/#trace
        if event.endswith(".send_request_headers.started"):
            # The connection stands; the next thing is the first byte.
            if self.must_end_by - read_clock() < LIMITS.create_seconds / 2:
                raise _TooLateError
        elif event.endswith(".send_request_body.complete"):
            self.is_whole = True


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
