"""Calls of OpenAI's API that are no chat, from any thread, their failures as errors."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar

import orjson

from batchsql.backends.batch import BatchGoneError, ProviderBusyError, read_clock
from batchsql.backends.endpoint import Endpoint, scrub
from batchsql.backends.loop import submit
from batchsql.backends.online import ErrorReply, Failure, read_retry_after
from batchsql.backends.openai import classify_error, open_client, outcome_of
from batchsql.errors import BackendError, SystemicError
from batchsql.types import ModelRef, Outcome

if TYPE_CHECKING:
    import openai

    Begin = Callable[[openai.AsyncOpenAI], Awaitable[Any]]

_T = TypeVar("_T")

_CALL_SECONDS = 90.0
"""How long a small call may take, its repetitions included."""

_RETRIES = 2
_MAX_PAUSE_SECONDS = 10.0
"""The longest ``retry-after`` that is sat out here; with a longer one the caller comes back."""

_CHUNK_BYTES = 1 << 18
_CLOSE_SECONDS = 0.5
_MAX_MESSAGE_CHARS = 700


class OpenAICalls:
    """The client of one model's endpoint. Every method may be called from any thread.

    No message of an error that it raises holds the key.
    """

    def __init__(self, model: ModelRef, endpoint: Endpoint, timeout_seconds: float) -> None:
        self._model = model
        self._endpoint = endpoint
        self._timeout_seconds = timeout_seconds
        self._api_key: str | None = None
        self._client: openai.AsyncOpenAI | None = None  # made and used on the loop only

    def ask(self, what: str, begin: Begin, *, is_about_batch: bool = False) -> dict[str, Any]:
        """Return the JSON object that a small call, which costs nothing, is answered with.

        ``begin`` comes from ``sending``, ``what`` says in messages what was tried.
        ``is_about_batch`` is whether 404 means that the batch, or what it left, is gone.

        Raises:
            BatchGoneError, ProviderBusyError, SystemicError: see ``BatchBackend``.
        """
        return self.read(what, self.reply_to(begin), is_about_batch=is_about_batch)

    def reply_to(self, begin: Begin, seconds: float = _CALL_SECONDS) -> Any:
        """Return what a call of the SDK returns, or what became of it, within so many seconds."""

        async def run() -> Any:
            try:
                return await asyncio.wait_for(outcome_of(begin(self._open())), seconds)
            except asyncio.TimeoutError:
                return Failure(Outcome.TRANSIENT, f"no whole reply within {seconds:g} s")

        return self._wait(run())

    def reply_to_once(self, begin: Begin, start: Start, must_end_by: float) -> Any:
        """Return as ``reply_to`` does for a call that may cost money; ``begin`` must not repeat it.

        It is begun if ``start`` allows it, and broken off at ``must_end_by`` of
        ``read_clock``. Once it is begun, whatever goes wrong is returned as a ``Failure``.
        """

        async def run() -> Any:
            _starting.set(start)
            left = must_end_by - read_clock()
            try:
                start.check()
                return await asyncio.wait_for(outcome_of(begin(self._open())), left)
            except _TooLateError:
                return Failure(Outcome.TRANSIENT, "too little time was left to send it")
            except asyncio.TimeoutError:
                return Failure(Outcome.TRANSIENT, "no reply came in time")
            except Exception as error:
                if not start.is_begun:
                    raise
                return Failure(Outcome.TRANSIENT, f"{type(error).__name__}: {error}")

        return self._wait(run())

    def read(self, what: str, reply: Any, *, is_about_batch: bool = False) -> dict[str, Any]:
        """Return the object in a good reply, or raise what any other one means; see ``ask``."""
        if isinstance(reply, (ErrorReply, Failure)):
            raise self.trouble(what, reply, is_about_batch=is_about_batch)
        try:
            parsed = orjson.loads(reply.content)
        except orjson.JSONDecodeError:
            parsed = None
        if not isinstance(parsed, dict):
            shown = reply.content[:100].decode(errors="replace")
            raise ProviderBusyError(self.say(f"{what}: the reply is none of this API: {shown!r}"))
        return parsed

    def trouble(
        self, what: str, reply: ErrorReply | Failure, *, is_about_batch: bool = False
    ) -> BackendError:
        """Return the error for a call that has changed nothing."""
        if isinstance(reply, ErrorReply):
            # A page of some proxy in between has neither, and says nothing of the batch.
            is_api = reply.kind is not None or reply.code is not None
            if is_about_batch and reply.status == 404 and is_api:
                return BatchGoneError(self.say(f"{what}: {reply.message}"))
            reply = classify_error(reply)
        said = self.say(f"{what}: {reply.message}")
        if reply.outcome is Outcome.TRANSIENT:
            return ProviderBusyError(said, reply.retry_after_seconds)
        return SystemicError(said)

    def say(self, text: str) -> str:
        """Return a message for an error."""
        return self.clean(f"model {self._model}: {text}")

    def clean(self, text: str) -> str:
        """Return a text of the provider's without the key, and not too long."""
        return scrub(text, self._api_key)[:_MAX_MESSAGE_CHARS]

    def close(self) -> None:
        """Close the connections, within a moment."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(concurrent.futures.TimeoutError):
                submit(client.close()).result(timeout=_CLOSE_SECONDS)

    def _open(self) -> openai.AsyncOpenAI:
        if self._client is None:
            self._api_key = self._endpoint.read_api_key()
            self._client = open_client(
                self._endpoint,
                self._api_key,
                self._timeout_seconds,
                max_retries=_RETRIES,
                on_request=[_watch_start],
                on_response=[_bound_pause],
            )
        return self._client

    def _wait(self, calling: Coroutine[Any, Any, _T]) -> _T:
        future = submit(calling)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # interrupted: nobody waits for it any more
            raise


def sending(
    method: Literal["GET", "POST", "DELETE"],
    path: str,
    *,
    params: Mapping[str, Any] | None = None,
    body: Mapping[str, Any] | None = None,
    file: tuple[str, BinaryIO, str] | None = None,
    max_retries: int = _RETRIES,
) -> Begin:
    """Return a function that sends this by a client of the SDK and gives the bare reply.

    The methods that the SDK has for each call would give parsed models, or else need a header,
    which ``only_headers`` drops. With ``file`` the body is a form.
    """

    def begin(client: openai.AsyncOpenAI) -> Awaitable[Any]:
        import httpx2

        options: Any = {"params": dict(params or {}), "max_retries": max_retries}
        if method == "GET":
            return client.get(path, cast_to=httpx2.Response, options=options)
        if method == "DELETE":
            return client.delete(path, cast_to=httpx2.Response, options=options)
        if file is None:
            return client.post(path, cast_to=httpx2.Response, body=body, options=options)
        options["headers"] = {"Content-Type": "multipart/form-data"}
        files = [("file", file)]
        return client.post(path, cast_to=httpx2.Response, body=body, files=files, options=options)

    return begin


def downloading(path: str, target: Path) -> Begin:
    """Return a function that copies what lies at a path into a file."""

    async def begin(client: openai.AsyncOpenAI) -> None:
        import httpx2

        options: Any = {"headers": {"Accept": "application/binary"}}
        response: Any = await client.get(
            path, cast_to=httpx2.Response, stream=True, options=options
        )
        try:
            with target.open("wb") as file:
                # The HTTP client notices a body that is shorter than was promised.
                async for chunk in response.aiter_bytes(_CHUNK_BYTES):
                    file.write(chunk)
        finally:
            await response.aclose()

    return begin


class _TooLateError(Exception):
    """A request was about to begin after its time."""


@dataclass
class Start:
    """Keeps a request from being begun after ``latest`` of ``read_clock``."""

    latest: float
    is_begun: bool = False

    def check(self) -> None:
        if read_clock() > self.latest:
            raise _TooLateError

    async def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Be told of the HTTP client's steps, of which this one comes before the first byte."""
        if event.endswith("send_request_headers.started"):
            self.check()
            self.is_begun = True


_starting: ContextVar[Start | None] = ContextVar("_starting", default=None)


async def _watch_start(request: Any) -> None:
    start = _starting.get()
    if start is not None:
        # A hook alone comes too early: a connection may still have to be made.
        request.extensions["trace"] = start.trace


async def _bound_pause(response: Any) -> None:
    if (read_retry_after(response.headers) or 0.0) > _MAX_PAUSE_SECONDS:
        response.headers["x-should-retry"] = "false"  # which the SDK obeys
