"""Anthropic's messages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchsql.backends.endpoint import ONLINE_OPTIONS, Endpoint, check_endpoint, plan_endpoint
from batchsql.backends.online import (
    BASIC_HEADERS,
    Answer,
    ErrorReply,
    Failure,
    OnlineBackend,
    failure_by_status,
    failure_of_all,
    lost_connection,
    only_headers,
    read_error_reply,
    tokens,
    unreadable_reply,
)
from batchsql.backends.params import Param, check_values
from batchsql.backends.wire_schema import wire_schema
from batchsql.errors import MissingExtraError, Mistake, SpecError
from batchsql.types import Call, FinishReason, Message, ModelRef, Outcome, Request, Role, Usage

if TYPE_CHECKING:
    import anthropic
    import httpx2

OWN_BASE_URL = "https://api.anthropic.com"
_KEY_ENV = "ANTHROPIC_API_KEY"

PARAMS: Mapping[str, Param] = {
    "max_tokens": Param("integer", 1, 1_000_000),
    "temperature": Param("number", 0, 1),
    "top_p": Param("number", 0, 1),
    "top_k": Param("integer", 0, 1_000_000),
    "stop": Param("texts", maximum=16),
    "effort": Param("text"),
}

_FINISH_REASONS = {
    "end_turn": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "max_tokens": FinishReason.LENGTH,
    "model_context_window_exceeded": FinishReason.LENGTH,
    "refusal": FinishReason.REFUSAL,
}
_HEADERS = BASIC_HEADERS | {"anthropic-version"}
_MOVED = frozenset(
    {
        "minLength",
        "maxLength",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "maxItems",
    }
)
# The API has no code for these; both come as invalid_request_error.
_TOO_LONG_TEXT = re.compile(r"prompt is too long|exceed context limit", re.IGNORECASE)
_NO_CREDIT_TEXT = re.compile(r"credit balance is too low", re.IGNORECASE)
_SYSTEMIC_TYPES = frozenset(
    {"authentication_error", "billing_error", "permission_error", "not_found_error"}
)
# What ``fixed_body`` may hold.
_FIXED_FIELDS = frozenset(
    {
        "model",
        "max_tokens",
        "output_config",
        "temperature",
        "top_p",
        "top_k",
        "stop_sequences",
    }
)
ONLINE_CACHE: Mapping[str, str] = {"type": "ephemeral"}
# A prompt must have 1,024 tokens to be cached, for some models up to 4,096; a mark on a shorter one
# is ignored. A token is about four bytes.
_CACHED_FROM_BYTES = 4 * 1024
Hook = Callable[[Any], Coroutine[Any, Any, None]]


def check_anthropic(engine: Mapping[str, Any]) -> list[Mistake]:
    """Return the mistakes in the options of ``anthropic/`` that go beyond single values."""
    return check_endpoint(engine, OWN_BASE_URL)


def open_anthropic(model: ModelRef, engine: Mapping[str, Any], project_root: Path) -> OnlineBackend:
    """Return the backend for ``anthropic/<model>``.

    Raises:
        SpecError: an engine option is wrong.
        MissingExtraError: the SDK is not installed.
    """
    endpoint = plan_anthropic(model, engine)

    def open_api(call: Call, api_key: str | None, timeout_seconds: float) -> MessagesApi:
        return MessagesApi(call, endpoint, api_key, timeout_seconds)

    return OnlineBackend(model, engine, endpoint, open_api, sdk_version())


def plan_anthropic(model: ModelRef, engine: Mapping[str, Any]) -> Endpoint:
    """Return where the model is reached.

    Raises:
        SpecError: an engine option is wrong.
        MissingExtraError: the SDK is not installed.
    """
    mistakes = check_values(engine, ONLINE_OPTIONS, "engine")
    if mistakes := mistakes or check_endpoint(engine, OWN_BASE_URL):
        raise SpecError(f"model {model}", mistakes)
    if importlib.util.find_spec("anthropic") is None:
        raise MissingExtraError(
            f"model {model} needs the package anthropic, which is not installed; "
            "run: pip install 'batchsql[anthropic]'"
        )
    return plan_endpoint(engine, OWN_BASE_URL, _KEY_ENV)


def sdk_version() -> str:
    """Return the name and version of the SDK, for the ledger."""
    return f"anthropic {importlib.metadata.version('anthropic')}"


def open_client(
    endpoint: Endpoint, api_key: str | None, timeout_seconds: float, *hooks: Hook
) -> anthropic.AsyncAnthropic:
    """Return the SDK's client, which follows no redirects and repeats nothing.

    Before each request ``hooks`` are called, the last thing before it is sent.
    """
    import anthropic
    import httpx2

    clean = [] if endpoint.is_own else [only_headers(_HEADERS, api_key)]
    timeout = httpx2.Timeout(timeout_seconds, connect=min(10.0, timeout_seconds))
    return anthropic.AsyncAnthropic(
        base_url=endpoint.base_url,
        api_key=api_key or "none",  # or the SDK takes it from the environment; the hook drops it
        max_retries=0,
        timeout=timeout,
        http_client=anthropic.DefaultAsyncHttpxClient(
            follow_redirects=False, event_hooks={"request": [*clean, *hooks]}, timeout=timeout
        ),
    )


class MessagesApi:
    """The client of one call: ``POST /v1/messages``."""

    def __init__(
        self, call: Call, endpoint: Endpoint, api_key: str | None, timeout_seconds: float
    ) -> None:
        self._client = open_client(endpoint, api_key, timeout_seconds)
        self._fixed = fixed_body(call)
        self._prefix_messages = call.prefix_messages

    async def close(self) -> None:
        await self._client.close()

    async def send(self, request: Request) -> Answer | Failure:
        import httpx2

        body = {**self._fixed, **messages_body(request, self._prefix_messages, ONLINE_CACHE)}
        reply = await read_reply(
            self._client.post("/v1/messages", body=body, cast_to=httpx2.Response)
        )
        if isinstance(reply, ErrorReply):
            return classify_error(reply)
        return reply if isinstance(reply, Failure) else _answer(reply.content)


async def read_reply(
    sending: Awaitable[httpx2.Response],
) -> httpx2.Response | ErrorReply | Failure:
    """Return a good reply, what an error reply says, or how the connection failed."""
    import anthropic
    import httpx2

    try:
        return await sending
    except anthropic.APIStatusError as error:
        reply = error.response
        return read_error_reply(reply.status_code, reply.headers, reply.content)
    except anthropic.APIConnectionError as error:
        return lost_connection(error)
    except httpx2.HTTPError as error:  # while the reply's body was read
        return lost_connection(error)


def classify_error(reply: ErrorReply) -> Failure:
    """Return what an error of the API says about the request that got it."""
    if reply.kind in _SYSTEMIC_TYPES or _NO_CREDIT_TEXT.search(reply.message):
        return failure_by_status(reply) if reply.status != 400 else failure_of_all(reply)
    if reply.status == 400:
        if _TOO_LONG_TEXT.search(reply.message):
            return Failure(Outcome.TOO_LONG, f"status 400: {reply.message}")
        # A message about one field starts with its path.
        if re.split(r"[.:]", reply.message)[0] in _FIXED_FIELDS:
            return failure_of_all(reply)
    return failure_by_status(reply)


def fixed_body(call: Call) -> dict[str, Any]:
    """Return what the bodies of all requests of a call have in common."""
    schema = wire_schema(
        call.schema,
        lambda key, value: key in _MOVED or (key == "minItems" and value > 1),
        all_required=False,
    )
    params = dict(call.params)
    output: dict[str, Any] = {"format": {"type": "json_schema", "schema": schema}}
    if "effort" in params:
        output["effort"] = params.pop("effort")
    if "stop" in params:
        stop = params.pop("stop")
        params["stop_sequences"] = [stop] if isinstance(stop, str) else list(stop)
    return {
        **params,
        "model": call.model.name,
        "max_tokens": call.max_tokens,
        "output_config": output,
    }


def messages_body(
    request: Request, prefix_messages: int, cache_control: Mapping[str, str]
) -> dict[str, Any]:
    """Return a request's messages in Anthropic's form, where the system text stands apart.

    The first ``prefix_messages`` are the same in every request. The last block of what all bodies
    share gets ``cache_control``, if it is long enough to be cached.
    """
    messages = request.messages
    marked = _prefix_end(messages, prefix_messages)

    def block(text: str) -> dict[str, Any]:
        return {"type": "text", "text": text, "cache_control": cache_control}

    body: dict[str, Any] = {
        "messages": [
            {"role": m.role.value, "content": [block(m.content)] if i == marked else m.content}
            for i, m in enumerate(messages)
            if m.role is not Role.SYSTEM
        ]
    }
    system = [i for i, m in enumerate(messages) if m.role is Role.SYSTEM]
    if marked in system:
        shared = "\n\n".join(messages[i].content for i in system if i <= marked)
        rest = "".join(f"\n\n{messages[i].content}" for i in system if i > marked)
        body["system"] = [block(shared)]
        if rest:
            body["system"].append({"type": "text", "text": rest})
    elif system:
        body["system"] = "\n\n".join(messages[i].content for i in system)
    return body


def _prefix_end(messages: Sequence[Message], prefix_messages: int) -> int:
    """Return which message ends the prefix that is worth caching, or -1 where none is."""
    if not prefix_messages:
        return -1
    end, size = -1, 0
    # On the wire the system text comes first, so one that varies ends the prefix there.
    for index in sorted(range(len(messages)), key=lambda i: messages[i].role is not Role.SYSTEM):
        if index >= prefix_messages:
            break
        end, size = index, size + len(messages[index].content.encode())
    return end if size >= _CACHED_FROM_BYTES else -1


def _answer(content: bytes) -> Answer | Failure:
    try:
        reply = json.loads(content)
    except ValueError:
        return unreadable_reply(content)
    return parse_message(reply)


def parse_message(message: Any) -> Answer | Failure:
    """Return the answer in a message of the API, from its decoded JSON."""
    try:
        parts = [part["text"] for part in message["content"] if part["type"] == "text"]
        text = "".join(parts)
        reason = message["stop_reason"]
    except (LookupError, TypeError):
        return unreadable_reply(json.dumps(message).encode())
    counts = message.get("usage")
    cached = tokens(counts, "cache_read_input_tokens")
    written = tokens(counts, "cache_creation_input_tokens")
    by_age = counts.get("cache_creation") if isinstance(counts, Mapping) else None
    usage = Usage(
        # Anthropic counts what it reads from or writes to its cache apart.
        input_tokens=tokens(counts, "input_tokens") + cached + written,
        output_tokens=tokens(counts, "output_tokens"),
        cached_tokens=cached,
        cache_write_tokens=written,
        cache_write_1h_tokens=tokens(by_age, "ephemeral_1h_input_tokens"),
    )
    model = message.get("model")
    if not isinstance(reason, str) or reason not in _FINISH_REASONS:
        return Failure(
            Outcome.REJECTED, f"the model stopped for an unknown reason: {reason!r}", usage
        )
    return Answer(text, _FINISH_REASONS[reason], usage, model if isinstance(model, str) else None)
