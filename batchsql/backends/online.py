"""What all online providers share: one event loop, adaptive concurrency, retries, the bridge.

A provider's module brings an ``Api``, which sends one request and says what became of it as data.
Everything that may be waited for happens on one event loop in a background thread; requests are
taken, and completions yielded, only in the caller's thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import email.utils
import hashlib
import json
import queue
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Protocol

from batchsql.backends.base import Capabilities
from batchsql.backends.endpoint import (
    DEFAULT_CONCURRENCY,
    DEFAULT_TIMEOUT_SECONDS,
    Endpoint,
    scrub,
)
from batchsql.backends.loop import background_loop, submit
from batchsql.errors import SystemicError
from batchsql.types import (
    Call,
    Completion,
    FinishReason,
    ModelRef,
    Outcome,
    Request,
    Usage,
)

MAX_TRIES = 6
"""How often one request is sent before it is given back as transient."""

MAX_PAUSE_SECONDS = 60.0
"""The longest that a ``retry-after`` is believed."""

FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 8.0
START_CONCURRENCY = 4
DRAIN_SECONDS = 10.0
"""How long answers already asked for are waited for once the provider refuses everything."""

_OVERLOAD_STATUSES = frozenset({429, 503, 529})
_TRANSIENT_STATUSES = frozenset({408, 409, 425, 429})
_SYSTEMIC_HINTS = {
    401: "check the key",
    402: "check the account's billing",
    403: "check what the key may do",
    404: "check the model's name and engine.base_url",
    405: "check engine.base_url",
}
_SHARD_REQUESTS = 256
_LOOK_AHEAD = 2
_STOP_POLL_SECONDS = 0.1
_TICK_SECONDS = 1.0
_CLOSE_SECONDS = 0.5
_MAX_MESSAGE_CHARS = 500


@dataclass(slots=True)
class Answer:
    """What a model said, and how it ended."""

    text: str
    finish_reason: FinishReason
    usage: Usage
    model_reported: str | None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no answer.

    ``outcome`` None says that every other request would fail too. ``is_overload`` says that fewer
    should be sent at once. ``may_repeat`` is whether a transient one is sent again at once;
    otherwise it was paid for, and the caller decides. ``is_unreachable`` says that no server
    replied at all.
    """

    outcome: Outcome | None
    message: str
    usage: Usage = field(default_factory=Usage)
    is_overload: bool = False
    retry_after_seconds: float | None = None
    may_repeat: bool = True
    is_unreachable: bool = False


class Api(Protocol):
    """One provider's client for one call, used on the event loop only."""

    async def send(self, request: Request) -> Answer | Failure:
        """Send one request once. Never raises for anything that a server or a network can do."""
        ...

    async def close(self) -> None: ...


OpenApi = Callable[[Call, "str | None", float], Api]
"""Makes the client, from the call, the key and the timeout in seconds."""


class OnlineBackend:
    """One model behind an HTTP endpoint that answers one request at a time."""

    def __init__(
        self,
        model: ModelRef,
        engine: Mapping[str, Any],
        endpoint: Endpoint,
        open_api: OpenApi,
        version: str,
    ) -> None:
        self._model = model
        self._endpoint = endpoint
        self._open_api = open_api
        self._version = version
        self._is_internal = engine.get("internal") is True
        self._cap: int = engine.get("max_concurrency", DEFAULT_CONCURRENCY)
        per_minute = engine.get("requests_per_minute")
        self._gap_seconds = 60.0 / per_minute if per_minute else 0.0
        self._timeout_seconds = float(engine.get("timeout_seconds", DEFAULT_TIMEOUT_SECONDS))

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(self._cap, _SHARD_REQUESTS, stays_inside=self._is_internal)

    @property
    def version(self) -> str:
        return self._version

    def identity(self) -> Mapping[str, Any]:
        """Return the endpoint, unless it is the provider's own: there the name says it all."""
        return {} if self._endpoint.is_own else {"endpoint": self._endpoint.base_url}

    def complete(
        self, requests: Iterator[Request], call: Call, stop: threading.Event
    ) -> Iterator[Completion | None]:
        """Yield one completion for each request taken; see ``StreamBackend.complete``.

        Once the provider refuses everything nothing more is taken, but answers that are on their
        way, and paid for, are still yielded before the error is raised.
        """
        session = self._open_session(call)
        in_flight = 0
        is_exhausted = False
        refused: SystemicError | None = None
        drained_by = 0.0
        finished: Completion | None = None
        yielded_at = time.monotonic()
        try:
            while True:
                while not (is_exhausted or refused or stop.is_set()):
                    if in_flight >= session.window():
                        break
                    request = next(requests, None)
                    if request is None:
                        is_exhausted = True
                        break
                    session.start(request)
                    in_flight += 1
                if finished is not None:
                    # Only now that its place is filled: the caller may take long to come back.
                    yield finished
                    finished = None
                    yielded_at = time.monotonic()
                if in_flight == 0 and (is_exhausted or refused or stop.is_set()):
                    break
                try:
                    wait_seconds = 0.0 if stop.is_set() else _STOP_POLL_SECONDS
                    result = session.done.get(timeout=wait_seconds)
                except queue.Empty:
                    now = time.monotonic()
                    if stop.is_set() or (refused and now >= drained_by):
                        break
                    if now - yielded_at >= _TICK_SECONDS:
                        yield None
                        yielded_at = time.monotonic()
                    continue
                in_flight -= 1
                if isinstance(result, Completion):
                    finished = result
                elif not isinstance(result, SystemicError):
                    raise result
                elif refused is None:
                    refused = result
                    drained_by = time.monotonic() + DRAIN_SECONDS
        finally:
            session.close()
        if refused is not None:
            raise refused

    def _open_session(self, call: Call) -> _Session:
        api_key = self._endpoint.read_api_key()
        loop = background_loop()

        async def open_session() -> _Session:
            # The client and the gate belong to the loop's thread.
            return _Session(
                loop=loop,
                gate=_gate(loop, self._endpoint.base_url, api_key),
                api=self._open_api(call, api_key, self._timeout_seconds),
                api_key=api_key,
                model=self._model,
                base_url=self._endpoint.base_url,
                cap=self._cap,
                gap_seconds=self._gap_seconds,
                timeout_seconds=self._timeout_seconds,
            )

        return submit(open_session()).result()


class Gate:
    """Lets requests of one account through, as many at once as the provider bears.

    Starts at a few. While it is used to the full, every good reply adds one place until the first
    overload, and one for each full round after it. An overload halves the places, once for all
    the requests that were on their way by then. Everyone in the process who talks to the account
    shares its gate, and passes in the order of arrival. Used on the event loop only; ``places``
    may be read from anywhere.
    """

    def __init__(self) -> None:
        self.places = float(START_CONCURRENCY)
        self.in_flight = 0
        self._is_first_climb = True
        self._halved_at = 0.0
        self._paused_until = 0.0
        self._next_at: dict[float, float] = {}
        self._waiting: deque[tuple[asyncio.Future[None], int, float]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self, cap: int, gap_seconds: float) -> None:
        """Wait for a place: fewer than ``cap`` inside, and ``gap_seconds`` after the one before.

        Those who ask for the same gap share it; it holds up nobody else.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, cap, gap_seconds))
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            else:
                self._let_in()
            raise

    def leave(self) -> None:
        """Give the place back."""
        self.in_flight -= 1
        self._let_in()

    def praise(self, cap: int) -> None:
        """Count a good reply, before its place is given back."""
        if self.in_flight >= int(self.places) and self.places < cap:
            step = 1.0 if self._is_first_climb else 1.0 / self.places
            self.places = min(float(cap), self.places + step)

    def slow_down(self, began_at: float) -> None:
        """Halve the places for an overload, before the request's own is given back.

        Not again for a request that began before the last halving.
        """
        self._is_first_climb = False
        if began_at > self._halved_at:
            self._halved_at = asyncio.get_running_loop().time()
            # What was really under way, where the places had not been used up.
            self.places = max(1.0, min(self.places, float(self.in_flight)) / 2)

    def pause(self, seconds: float) -> None:
        """Let nobody in for this long, at most a minute."""
        until = asyncio.get_running_loop().time() + min(seconds, MAX_PAUSE_SECONDS)
        self._paused_until = max(self._paused_until, until)

    def _let_in(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        early: list[tuple[asyncio.Future[None], int, float]] = []
        wake_at = self._paused_until
        while self._waiting and now >= self._paused_until:
            turn, cap, gap_seconds = self._waiting[0]
            if turn.done():  # cancelled
                self._waiting.popleft()
                continue
            if self.in_flight >= min(int(self.places), cap):
                break
            self._waiting.popleft()
            ready_at = self._next_at.get(gap_seconds, 0.0)
            if gap_seconds and ready_at > now:
                early.append((turn, cap, gap_seconds))
                wake_at = min(wake_at, ready_at) if wake_at > now else ready_at
                continue
            self._next_at[gap_seconds] = now + gap_seconds
            self.in_flight += 1
            turn.set_result(None)
        self._waiting.extendleft(reversed(early))
        if self._waiting and wake_at > now:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_at(wake_at, self._let_in)


@dataclass
class _Session:
    """One ``complete`` call: its client, its tasks on the loop, and what they have finished."""

    loop: asyncio.AbstractEventLoop
    gate: Gate
    api: Api
    api_key: str | None
    model: ModelRef
    base_url: str
    cap: int
    gap_seconds: float
    timeout_seconds: float
    has_heard: bool = False
    done: queue.SimpleQueue[Completion | BaseException] = field(default_factory=queue.SimpleQueue)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def window(self) -> int:
        """Return how many requests should be taken by now: what fits through, and a few more.

        One alone until the server has said something: a wrong key or model would fail them all.
        """
        if not self.has_heard:
            return 1
        places = min(int(self.gate.places), self.cap)
        return places + _LOOK_AHEAD + places // 8

    def start(self, request: Request) -> None:
        self.loop.call_soon_threadsafe(self._start, request)

    def close(self) -> None:
        """Break off what is in flight and close the connections, within a moment."""
        closing = submit(self._close())
        with contextlib.suppress(concurrent.futures.TimeoutError):
            closing.result(timeout=_CLOSE_SECONDS)

    def _start(self, request: Request) -> None:
        task = self.loop.create_task(self._finish(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, request: Request) -> None:
        try:
            self.done.put(await self._ask(request))
        except Exception as error:  # noqa: BLE001  raised again in the caller's thread
            self.done.put(error)

    async def _close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.api.close()

    async def _ask(self, request: Request) -> Completion | SystemicError:
        started_at: datetime | None = None
        tries = 0
        while True:
            await self.gate.enter(self.cap, self.gap_seconds)
            try:
                started_at = started_at or datetime.now(timezone.utc)
                began_at = self.loop.time()
                tries += 1
                result = await self._send(request)
                if isinstance(result, Answer) or not result.is_unreachable:
                    self.has_heard = True
                if isinstance(result, Answer):
                    self.gate.praise(self.cap)
                else:
                    if result.is_overload:
                        self.gate.slow_down(began_at)
                    if result.retry_after_seconds:
                        self.gate.pause(result.retry_after_seconds)
            finally:
                self.gate.leave()
            if isinstance(result, Answer):
                return Completion(
                    request.request_key,
                    result.text,
                    result.finish_reason,
                    result.usage,
                    model_reported=result.model_reported,
                    started_at=started_at,
                    finished_at=datetime.now(timezone.utc),
                )
            message = scrub(result.message, self.api_key)[:_MAX_MESSAGE_CHARS]
            if result.outcome is None:
                return SystemicError(f"model {self.model}: {message}")
            is_repeated = result.outcome is Outcome.TRANSIENT and result.may_repeat
            if not is_repeated or tries >= MAX_TRIES:
                if result.is_unreachable and not self.has_heard:
                    return SystemicError(
                        f"model {self.model}: no server answers at {self.base_url} ({message}); "
                        "check that it runs, and engine.base_url"
                    )
                return Completion(
                    request.request_key,
                    None,
                    None,
                    result.usage,
                    failure=result.outcome,
                    error=f"{message} (sent {tries} times)" if tries > 1 else message,
                    started_at=started_at,
                    finished_at=datetime.now(timezone.utc),
                )
            longest = min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2 ** (tries - 1))
            await asyncio.sleep(longest * random.uniform(0.5, 1.0))  # noqa: S311

    async def _send(self, request: Request) -> Answer | Failure:
        try:
            # The client's own timeout starts anew with every byte that arrives.
            return await asyncio.wait_for(self.api.send(request), self.timeout_seconds)
        except asyncio.TimeoutError:
            message = f"no whole reply within {self.timeout_seconds:g} s"
            return Failure(Outcome.TRANSIENT, message)


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The error that a server's reply describes; every part but the message may be missing."""

    status: int
    message: str
    kind: str | None = None
    code: str | None = None
    param: str | None = None
    retry_after_seconds: float | None = None


def read_error_reply(status: int, headers: Mapping[str, str], content: bytes) -> ErrorReply:
    """Return what an error reply says, in any of the forms that the servers use."""
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError):
        parsed = None
    body = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
    if isinstance(body, str):
        body = {"message": body}
    if not isinstance(body, dict):
        body = {}
    message = body.get("message") or content.decode(errors="replace").strip() or "no reason given"

    def text(name: str) -> str | None:
        value = body.get(name)
        return None if value is None else str(value)

    return ErrorReply(
        status,
        str(message)[:_MAX_MESSAGE_CHARS],
        text("type"),
        text("code"),
        text("param"),
        read_retry_after(headers),
    )


def read_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a reply asks to wait for, or None where it does not say."""
    millis, value = headers.get("retry-after-ms"), headers.get("retry-after")
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if millis is not None:
            return max(0.0, float(millis) / 1000)
    if value is None:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    with contextlib.suppress(TypeError, ValueError, IndexError):
        moment = email.utils.parsedate_to_datetime(value)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=timezone.utc)
        return max(0.0, (moment - datetime.now(timezone.utc)).total_seconds())
    return None


def failure_by_status(reply: ErrorReply) -> Failure:
    """Return what a status says about a request, where the provider's module knows no better."""
    status = reply.status
    said = f"status {status}: {reply.message.rstrip('.')}"
    if status in _TRANSIENT_STATUSES or status >= 500:
        return Failure(
            Outcome.TRANSIENT,
            said,
            is_overload=status in _OVERLOAD_STATUSES,
            retry_after_seconds=reply.retry_after_seconds,
        )
    if 300 <= status < 400:
        return Failure(
            None,
            f"the server redirects (status {status}), which is not followed, since the key would "
            "go along; set engine.base_url to the address that answers",
        )
    if status in _SYSTEMIC_HINTS:
        hint = _SYSTEMIC_HINTS[status]
        return Failure(None, f"every request is refused with {said}; {hint}")
    if status == 413:
        return Failure(Outcome.TOO_LONG, said)
    return Failure(Outcome.REJECTED, said)


def failure_of_all(reply: ErrorReply) -> Failure:
    """Return the failure for a fault that every request shares, whatever its status."""
    return Failure(None, f"every request is refused with status {reply.status}: {reply.message}")


def unreadable_reply(content: bytes) -> Failure:
    """Return the failure for a good status with something else than an answer in it."""
    shown = content[:100].decode(errors="replace")
    # It may have been paid for, so it is not repeated unasked.
    return Failure(
        Outcome.TRANSIENT, f"the reply is no answer of this API: {shown!r}", may_repeat=False
    )


def lost_connection(error: Exception) -> Failure:
    """Return the failure for a request whose connection failed."""
    reason = error.__cause__ or error
    detail = str(reason) or type(reason).__name__
    return Failure(Outcome.TRANSIENT, f"the connection failed: {detail}", is_unreachable=True)


_MOST_TOKENS = 1 << 63  # what a column of the ledger cannot hold


def tokens(counts: object, name: str) -> int:
    """Return a count of a reply's usage, 0 where the server gives none."""
    if not isinstance(counts, dict):
        return 0
    value = counts.get(name)
    return value if isinstance(value, int) and 0 < value < _MOST_TOKENS else 0


def only_headers(
    names: frozenset[str], api_key: str | None
) -> Callable[[Any], Coroutine[Any, Any, None]]:
    """Return a hook for an HTTP client that lets only these headers leave, and only this key.

    The SDKs add headers from the environment, which are meant for the provider's own servers.
    """

    async def clean(request: Any) -> None:
        for name in list(request.headers):
            if name.lower() not in names:
                del request.headers[name]
        request.headers.pop("authorization", None)
        if api_key is not None:
            request.headers["authorization"] = f"Bearer {api_key}"

    return clean


BASIC_HEADERS = frozenset(
    {
        "accept",
        "accept-encoding",
        "connection",
        "content-length",
        "content-type",
        "host",
        "user-agent",
    }
)

# By loop, so that a forked process starts with gates of its own.
_gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, str], Gate]] = (
    weakref.WeakKeyDictionary()
)


def _gate(loop: asyncio.AbstractEventLoop, base_url: str, api_key: str | None) -> Gate:
    """Return the gate of an endpoint and account, shared by everyone in this process."""
    account = hashlib.sha256((api_key or "").encode()).hexdigest()
    return _gates.setdefault(loop, {}).setdefault((base_url, account), Gate())
