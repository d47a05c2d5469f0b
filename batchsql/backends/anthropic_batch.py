"""Anthropic's Message Batches.

A batch is created by one call that carries all requests. It has no name and no metadata, so after a
creation whose reply was lost only its time and its size tell it from others, until its results can
be read: their custom ids name the shard.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import quote, urlsplit

import orjson
from pydantic import BaseModel, ValidationError

from batchsql.backends.anthropic import (
    classify_error,
    fixed_body,
    messages_body,
    open_client,
    plan_anthropic,
    read_reply,
    sdk_version,
)
from batchsql.backends.anthropic_wire import LIMITS, Batch, Body, Page, parse_line, read_json
from batchsql.backends.batch import (
    BatchFault,
    BatchGoneError,
    BatchLimits,
    BatchLine,
    BatchStatus,
    CreatedBatch,
    Finding,
    ListedBatch,
    MaybeCreatedError,
    NotCreatedError,
    ProviderBusyError,
    ShardLabel,
    account_of,
    is_of_shard,
    iter_lines,
    read_clock,
)
from batchsql.backends.endpoint import Endpoint, is_same_origin, scrub
from batchsql.backends.loop import submit
from batchsql.backends.online import ErrorReply, Failure, read_error_reply
from batchsql.errors import BackendError, SystemicError
from batchsql.types import Call, ModelRef, Outcome, Request

if TYPE_CHECKING:
    import anthropic
    import httpx2

_T = TypeVar("_T")
_Model = TypeVar("_Model", bound=BaseModel)
_Reply: TypeAlias = "httpx2.Response | ErrorReply | Failure"

REPLY_SECONDS = 60.0
"""How long a call without a large body waits for its reply, or for more of it."""

_PATH = "/v1/messages/batches"
_PAGE = 100
_DOWNLOAD_TRIES = 3
_LONGEST_LINE_BYTES = 1 << 20  # as far as its custom id is looked for
_MAX_MESSAGE_CHARS = 500
# How far the warehouse's clock and the provider's may be apart.
_CLOCKS_DIFFER = timedelta(minutes=15)
# Only an hour's cache lasts from one request of a batch to the next.
_BATCH_CACHE: Mapping[str, str] = {"type": "ephemeral", "ttl": "1h"}
# Neither has a code of its own.
_QUEUE_FULL_TEXT = re.compile(r"processing queue|batch requests", re.IGNORECASE)
_TOO_LARGE_TEXT = re.compile(r"should have at most \d+ items|request_too_large", re.IGNORECASE)
_FIRST_ID = re.compile(rb'"custom_id"\s*:\s*"([^"\\]*)"')


class _BrokenDownloadError(Exception):
    """A copy of the results is not whole."""


def open_anthropic_batch(
    model: ModelRef, engine: Mapping[str, Any], project_root: Path
) -> AnthropicBatch:
    """Return what brings requests for ``anthropic/<model>`` to the batch API.

    Raises:
        SpecError: an engine option is wrong.
        MissingExtraError: the SDK is not installed.
    """
    return AnthropicBatch(model, plan_anthropic(model, engine))


class AnthropicBatch:
    """Satisfies ``BatchBackend``, which says what each method promises."""

    def __init__(self, model: ModelRef, endpoint: Endpoint) -> None:
        self._model = model
        self._endpoint = endpoint
        self._opened: anthropic.AsyncAnthropic | None = None  # made and used on the loop only

    @property
    def limits(self) -> BatchLimits:
        return LIMITS

    @property
    def version(self) -> str:
        return sdk_version()

    @property
    def account(self) -> str:
        return account_of(self._endpoint.base_url, self._api_key)

    def identity(self) -> Mapping[str, Any]:
        """Return the endpoint, unless it is the provider's own: there the name says it all."""
        return {} if self._endpoint.is_own else {"endpoint": self._endpoint.base_url}

    # --- creating -------------------------------------------------------------------------------

    def encoder(self, call: Call) -> Callable[[str, Request], bytes]:
        fixed = orjson.dumps(fixed_body(call))[:-1]  # without the brace that closes it

        def encode(custom_id: str, request: Request) -> bytes:
            own = orjson.dumps(messages_body(request, call.prefix_messages, _BATCH_CACHE))
            return b'{"custom_id":"%b","params":%b,%b}' % (custom_id.encode(), fixed, own[1:])

        return encode

    def upload(self, shard: ShardLabel, lines: Path, call: Call) -> str | None:
        """Return None: the input travels in the call that creates the batch."""
        return None

    def create(
        self, shard: ShardLabel, lines: Path, uploaded: str | None, call: Call, must_end_by: float
    ) -> CreatedBatch:
        body = Body(lines, must_end_by)
        reply = self._run(self._create(body, must_end_by))
        if isinstance(reply, ErrorReply):
            if (refusal := self._refusal(reply)) is not None:
                raise refusal
            message = f"status {reply.status}: {reply.message}"
        elif isinstance(reply, Failure):
            message = reply.message
        else:
            with contextlib.suppress(ValidationError):
                batch = Batch.model_validate_json(reply.content)
                return CreatedBatch(batch.id, batch.results_until)
            message = f"the reply describes no batch: {reply.text[:100]!r}"
        if body.is_whole:
            raise MaybeCreatedError(self._say(f"it is open whether there is a batch: {message}"))
        # Its length was announced, so a server cannot take a part of it for the whole.
        message = self._say(f"the batch was not sent to its end: {message}")
        raise NotCreatedError(BatchFault.TRANSIENT, message)

    async def _create(self, body: Body, must_end_by: float) -> _Reply:
        import httpx2

        async def check_time(request: Any) -> None:
            if must_end_by - read_clock() < LIMITS.create_seconds / 2:
                raise TimeoutError("it was not begun, since too little time is left for it")

        async def send() -> _Reply:
            # A connection of its own: a kept one may turn out broken when the body is on its way.
            async with self._open(LIMITS.create_seconds, check_time) as client:
                return await read_reply(
                    client.post(
                        _PATH,
                        content=body.stream(),
                        cast_to=httpx2.Response,
                        options={"headers": {"Content-Length": str(body.length)}},
                    )
                )

        try:
            return await asyncio.wait_for(send(), must_end_by - read_clock())
        except asyncio.TimeoutError:
            return Failure(Outcome.TRANSIENT, "no reply in the time that was left for it")

    def _refusal(self, reply: ErrorReply) -> BackendError | None:
        """Return the error for a reply after which there surely is no batch, None after others."""
        failure = classify_error(reply)
        message = self._say(failure.message)
        if failure.outcome is None:
            return SystemicError(f"model {self._model}: {message}")
        if reply.status == 413 or (reply.status == 400 and _TOO_LARGE_TEXT.search(reply.message)):
            return NotCreatedError(BatchFault.TOO_LARGE, message)
        if reply.status == 429 or (reply.status == 529 and reply.kind == "overloaded_error"):
            is_full = reply.status == 429 and _QUEUE_FULL_TEXT.search(reply.message)
            fault = BatchFault.QUEUE_FULL if is_full else BatchFault.TRANSIENT
            return NotCreatedError(fault, message, reply.retry_after_seconds)
        if failure.outcome is Outcome.TRANSIENT:
            return None
        return SystemicError(f"model {self._model}: every batch is refused with {message}")

    def find(self, shard: ShardLabel) -> Finding:
        margin = _CLOCKS_DIFFER
        earliest = shard.created_after and shard.created_after - margin
        margin += timedelta(seconds=LIMITS.settle_seconds)
        latest = shard.created_before and shard.created_before + margin
        undecided = []
        for batch in self._batches(earliest):
            if latest is not None and batch.created_at > latest:
                continue
            if batch.id in shard.not_ours or batch.request_counts.total != shard.requests:
                continue
            if not batch.state.is_final:
                undecided.append(batch)
            elif batch.archived_at is not None:
                continue  # its results are deleted, so it is of no use, whosever it was
            elif is_of_shard(self._first_custom_id(batch), shard.shard_id):
                return Finding(batch.id)
        if not undecided:
            return Finding(is_sure=True)
        ids = ", ".join(batch.id for batch in undecided)
        until = max(b.created_at for b in undecided) + timedelta(seconds=LIMITS.window_seconds)
        return Finding(
            reason=f"Anthropic has {ids}, of the same size and time, and shows whose requests are "
            f"in a batch only when it has ended, which is by {until:%Y-%m-%d %H:%M %Z}"
        )

    # --- following ------------------------------------------------------------------------------

    def poll(self, provider_batch_id: str) -> BatchStatus:
        return self._retrieve(provider_batch_id).status

    def cancel(self, provider_batch_id: str) -> None:
        reply = self._run(self._send("POST", f"{_path(provider_batch_id)}/cancel"))
        # What the API says of a batch that has ended is not documented.
        is_refused = isinstance(reply, ErrorReply) and reply.status in (400, 409)
        if is_refused and self._retrieve(provider_batch_id).state.is_final:
            return
        self._parse(Batch, self._good(reply, provider_batch_id))

    def discard(self, provider_batch_id: str, uploaded: str | None) -> None:
        """Do nothing: there is no input apart from the batch, whose results are to stay."""

    def list_batches(self, since: datetime) -> Iterator[ListedBatch]:
        for batch in self._batches(since):
            yield ListedBatch(batch.id, batch.status, batch.created_at)

    def _batches(self, earliest: datetime | None) -> Iterator[Batch]:
        """Yield the account's batches, newest first, back to those created at ``earliest``."""
        query: dict[str, object] = {"limit": _PAGE}
        while True:
            reply = self._run(self._send("GET", _PATH, query))
            page = self._parse(Page, self._good(reply))
            for batch in page.data:
                if earliest is not None and batch.created_at < earliest:
                    return
                yield batch
            if not page.has_more or page.last_id in (None, query.get("after_id")):
                return
            query["after_id"] = page.last_id

    def _retrieve(self, provider_batch_id: str) -> Batch:
        reply = self._run(self._send("GET", _path(provider_batch_id)))
        return self._parse(Batch, self._good(reply, provider_batch_id))

    # --- results --------------------------------------------------------------------------------

    def fetch(self, provider_batch_id: str, folder: Path, call: Call) -> Iterator[BatchLine]:
        batch = self._retrieve(provider_batch_id)
        file = folder / f"{re.sub(r'[^A-Za-z0-9_-]', '_', provider_batch_id)[:100]}.jsonl"
        for tries in range(1, _DOWNLOAD_TRIES + 1):
            try:
                self._run(self._download(batch, file))
                _check_whole(file)
                break
            except _BrokenDownloadError as error:
                if tries == _DOWNLOAD_TRIES:
                    message = f"the results of batch {batch.id} arrive broken: {error}"
                    raise ProviderBusyError(self._say(message)) from None
        return (parse_line(line, self._say) for line in iter_lines(file))

    async def _download(self, batch: Batch, file: Path) -> None:
        async with self._results(batch) as chunks:
            with file.open("wb") as copy:
                async for chunk in chunks:
                    copy.write(chunk)

    def _first_custom_id(self, batch: Batch) -> str:
        async def read() -> str:
            start = b""
            async with self._results(batch) as chunks:
                async for chunk in chunks:
                    start += chunk
                    if found := _FIRST_ID.search(start):
                        return found[1].decode(errors="replace")
                    if len(start) > _LONGEST_LINE_BYTES:
                        break
            raise _BrokenDownloadError("there is no custom id at their beginning")

        try:
            return self._run(read())
        except _BrokenDownloadError as error:
            message = f"the results of batch {batch.id} cannot be read: {error}"
            raise ProviderBusyError(self._say(message)) from None

    @contextlib.asynccontextmanager
    async def _results(self, batch: Batch) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open the results, to be read as they arrive."""
        import httpx2

        if batch.archived_at is not None:
            raise BatchGoneError(f"Anthropic has deleted the results of batch {batch.id}")
        if batch.results_url is None:
            raise ProviderBusyError(f"batch {batch.id} has no results yet")
        async with contextlib.AsyncExitStack() as stack:
            response = await self._open_results(batch.id, batch.results_url, stack)
            stack.push_async_callback(response.aclose)
            try:
                yield response.aiter_bytes()
            except httpx2.HTTPError as error:
                raise _BrokenDownloadError(str(error) or type(error).__name__) from None

    async def _open_results(
        self, provider_batch_id: str, url: str, stack: contextlib.AsyncExitStack
    ) -> httpx2.Response:
        import httpx2

        own_path = f"{_path(provider_batch_id)}/results"
        try:
            if not urlsplit(url).netloc:
                url = own_path
                is_ours = True
            else:
                is_ours = is_same_origin(url, self._endpoint.base_url)
        except ValueError:
            raise BackendError(f"the results of batch {provider_batch_id} have no URL") from None
        if is_ours:
            return self._good(await self._get_stream(url), provider_batch_id)
        # Another origin gets no credentials.
        client = httpx2.AsyncClient(follow_redirects=False, timeout=REPLY_SECONDS)
        await stack.enter_async_context(client)
        reply = await read_reply(client.send(client.build_request("GET", url), stream=True))
        if isinstance(reply, httpx2.Response) and not reply.is_success:
            await reply.aread()
            reply = read_error_reply(reply.status_code, reply.headers, reply.content)
        if isinstance(reply, (ErrorReply, Failure)):
            # A gateway may pass on the URL of the provider behind it, which wants a key.
            own = await self._get_stream(own_path)
            if isinstance(own, httpx2.Response):
                return own
            # Whatever it says concerns this URL; the next look at the batch gives another.
            raise ProviderBusyError(self._say(f"{urlsplit(url).netloc}: {reply.message}"))
        return reply

    async def _get_stream(self, url: str) -> _Reply:
        import httpx2

        return await read_reply(self._client().get(url, cast_to=httpx2.Response, stream=True))

    # --- the wire -------------------------------------------------------------------------------

    @cached_property
    def _api_key(self) -> str | None:
        return self._endpoint.read_api_key()

    def _say(self, text: str) -> str:
        return scrub(text, self._api_key)[:_MAX_MESSAGE_CHARS]

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Return what a coroutine gives on the loop; break it off if the wait is broken off."""
        future = submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _open(self, timeout_seconds: float, *hooks: Any) -> anthropic.AsyncAnthropic:
        return open_client(self._endpoint, self._api_key, timeout_seconds, *hooks)

    def _client(self) -> anthropic.AsyncAnthropic:
        if self._opened is None:
            self._opened = self._open(REPLY_SECONDS)
        return self._opened

    async def _send(
        self, method: str, path: str, query: Mapping[str, object] | None = None
    ) -> _Reply:
        import httpx2

        async def send() -> _Reply:
            ask = self._client().get if method == "GET" else self._client().post
            options: Any = {"params": query or {}}
            return await read_reply(ask(path, cast_to=httpx2.Response, options=options))

        try:
            return await asyncio.wait_for(send(), REPLY_SECONDS)
        except asyncio.TimeoutError:
            return Failure(Outcome.TRANSIENT, f"no whole reply within {REPLY_SECONDS:g} s")

    def _good(self, reply: _Reply, provider_batch_id: str | None = None) -> httpx2.Response:
        """Return a good reply, or raise the error that another one stands for."""
        if isinstance(reply, ErrorReply):
            # Another 404 than the API's own says that there is no such API.
            if provider_batch_id and reply.status == 404 and reply.kind == "not_found_error":
                message = f"Anthropic does not know batch {provider_batch_id}: {reply.message}"
                raise BatchGoneError(self._say(message))
            failure = classify_error(reply)
        elif isinstance(reply, Failure):
            failure = reply
        else:
            return reply
        message = self._say(failure.message)
        if failure.outcome is None:
            raise SystemicError(f"model {self._model}: {message}")
        if failure.outcome is Outcome.TRANSIENT:
            raise ProviderBusyError(message, failure.retry_after_seconds)
        raise BackendError(f"Anthropic refuses a call with {message}")

    def _parse(self, model: type[_Model], response: httpx2.Response) -> _Model:
        with contextlib.suppress(ValidationError):
            return model.model_validate_json(response.content)
        message = f"the reply is not one of this API: {response.text[:100]!r}"
        raise ProviderBusyError(self._say(message))

    def close(self) -> None:
        async def close() -> None:
            if self._opened is not None:
                await self._opened.close()
                self._opened = None

        self._run(close())


def _path(provider_batch_id: str) -> str:
    return f"{_PATH}/{quote(provider_batch_id, safe='')}"


def _check_whole(file: Path) -> None:
    """Raise _BrokenDownloadError where the end of the results is missing.

    A connection that ends early without a length having been announced looks like any other end.
    """
    last = deque(iter_lines(file), maxlen=1)
    try:
        read_json(last[0])
    except (ValueError, IndexError):
        raise _BrokenDownloadError("their last line is cut off") from None
