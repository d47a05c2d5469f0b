"""OpenAI's chat completions, at OpenAI and at every server that speaks the same."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import ssl
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

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
from batchsql.backends.params import Param, Params, check_values
from batchsql.backends.wire_schema import wire_schema, without_filled_nulls
from batchsql.errors import MissingExtraError, Mistake, SpecError
from batchsql.types import Call, FinishReason, ModelRef, Outcome, Request, Usage

if TYPE_CHECKING:
    import openai

_T = TypeVar("_T")
OWN_BASE_URL = "https://api.openai.com/v1"
_KEY_ENV = "OPENAI_API_KEY"

PARAMS: Mapping[str, Param] = {
    "temperature": Param("number", 0, 2),
    "max_tokens": Param("integer", 1, 1_000_000),
    "seed": Param("integer", 0, 2**63 - 1),
    "top_p": Param("number", 0, 1),
    "stop": Param("texts", maximum=4),
    "frequency_penalty": Param("number", -2, 2),
    "presence_penalty": Param("number", -2, 2),
    "reasoning_effort": Param("text"),
    "verbosity": Param("text"),
    "service_tier": Param("text"),
}
COMPATIBLE_PARAMS: Mapping[str, Param] = {
    "temperature": Param("number", 0, 2),
    "max_tokens": Param("integer", 1, 1_000_000),
    "seed": Param("integer", 0, 2**63 - 1),
    "top_p": Param("number", 0, 1),
    "top_k": Param("integer", -1, 1_000_000),
    "min_p": Param("number", 0, 1),
    "repetition_penalty": Param("number", 0.01, 10),
    "frequency_penalty": Param("number", -2, 2),
    "presence_penalty": Param("number", -2, 2),
    "stop": Param("texts", maximum=16),
    "reasoning_effort": Param("text"),
}
COMPATIBLE_OPTIONS: Params = {
    **ONLINE_OPTIONS,
    # Whether the server takes files and batches as OpenAI does; few that one runs oneself do.
    "batches": Param("boolean"),
    "internal": Param("boolean"),
}

_FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "content_filter": FinishReason.CONTENT_FILTER,
}
_TOO_LONG_CODES = frozenset({"context_length_exceeded", "exceed_context_size_error"})
# vLLM and others have no code for it.
_TOO_LONG_TEXT = re.compile(
    r"maximum context length|maximum model length|exceeds the available context", re.IGNORECASE
)
# What vLLM says of a schema that its grammar backends cannot hold a model to; it names no field.
_REFUSED_SCHEMA_TEXT = re.compile(
    r"Grammar error|into a grammar|schema contains features not supported|grammar specification"
)
_SYSTEMIC_CODES = frozenset(
    {
        "insufficient_quota",
        "billing_not_active",
        "billing_hard_limit_reached",
        "model_not_found",
        "account_deactivated",
    }
)
# What ``fixed_body`` may hold.
_FIXED_FIELDS = PARAMS.keys() | COMPATIBLE_PARAMS.keys() | {
    "model", "max_completion_tokens", "response_format",
}  # fmt: skip
# Whether strict mode takes the lengths of strings depends on the model.
_MOVED = frozenset({"minLength", "maxLength"})
# Fine-tuned models take no bounds at all.
_MOVED_IF_TUNED = _MOVED | {
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "minItems",
    "maxItems",
    "format",
}
_TUNED_PREFIX = "ft:"
# These models think before they answer, and their limit counts both.
_THINKS = re.compile(r"(ft:)?(o\d|gpt-([5-9]|[1-9]\d))")
_THINKING_TOKENS = 8192


def check_openai(engine: Mapping[str, Any]) -> list[Mistake]:
    """Return the mistakes in the options of ``openai/`` that go beyond single values."""
    return check_endpoint(engine, OWN_BASE_URL)


def check_compatible(engine: Mapping[str, Any]) -> list[Mistake]:
    """Return the mistakes in the options of ``openai_compatible/`` beyond single values."""
    return check_endpoint(engine, None)


def open_openai(model: ModelRef, engine: Mapping[str, Any], project_root: Path) -> OnlineBackend:
    """Return the backend for ``openai/<model>``.

    Raises:
        SpecError: an engine option is wrong.
        MissingExtraError: the SDK is not installed.
    """
    return _open(model, engine, openai_endpoint(model, engine), is_compatible=False)


def open_compatible(
    model: ModelRef, engine: Mapping[str, Any], project_root: Path
) -> OnlineBackend:
    """Return the backend for ``openai_compatible/<model>``, such as one that vLLM serves.

    Raises:
        SpecError: an engine option is wrong, or ``base_url`` is missing.
        MissingExtraError: the SDK is not installed.
    """
    return _open(model, engine, compatible_endpoint(model, engine), is_compatible=True)


def openai_endpoint(model: ModelRef, engine: Mapping[str, Any]) -> Endpoint:
    """Return where ``openai/<model>`` is reached. Raises as ``open_openai`` does."""
    return _checked_endpoint(model, engine, ONLINE_OPTIONS, OWN_BASE_URL)


def compatible_endpoint(model: ModelRef, engine: Mapping[str, Any]) -> Endpoint:
    """Return where ``openai_compatible/<model>`` is reached. Raises as ``open_compatible`` does."""
    return _checked_endpoint(model, engine, COMPATIBLE_OPTIONS, None)


def _checked_endpoint(
    model: ModelRef, engine: Mapping[str, Any], options: Params, own_base_url: str | None
) -> Endpoint:
    mistakes = check_values(engine, options, "engine")
    if mistakes := mistakes or check_endpoint(engine, own_base_url):
        raise SpecError(f"model {model}", mistakes)
    if importlib.util.find_spec("openai") is None:
        raise MissingExtraError(
            f"model {model} needs the package openai, which is not installed; "
            "run: pip install 'batchsql[openai]'"
        )
    return plan_endpoint(engine, own_base_url, _KEY_ENV)


def _open(
    model: ModelRef, engine: Mapping[str, Any], endpoint: Endpoint, *, is_compatible: bool
) -> OnlineBackend:
    def open_api(call: Call, api_key: str | None, timeout_seconds: float) -> ChatApi:
        client = open_client(endpoint, api_key, timeout_seconds)
        return ChatApi(client, call, is_compatible=is_compatible)

    return OnlineBackend(model, engine, endpoint, open_api, sdk_version())


def sdk_version() -> str:
    """Return the name and version of the SDK, for the ledger."""
    return f"openai {importlib.metadata.version('openai')}"


def open_client(
    endpoint: Endpoint,
    api_key: str | None,
    timeout_seconds: float,
    *,
    max_retries: int = 0,
    on_request: Sequence[Any] = (),
    on_response: Sequence[Any] = (),
) -> openai.AsyncOpenAI:
    """Return a client that follows no redirect and sends an endpoint what is meant for it.

    ``on_request`` and ``on_response`` are hooks of the HTTP client.
    """
    import httpx2
    import openai

    cleaned = [] if endpoint.is_own else [only_headers(BASIC_HEADERS, api_key)]
    timeout = httpx2.Timeout(timeout_seconds, connect=min(10.0, timeout_seconds))
    return openai.AsyncOpenAI(
        base_url=endpoint.base_url,
        # Without one the SDK takes it from the environment; the hook drops it.
        api_key=api_key or "none",
        max_retries=max_retries,
        timeout=timeout,
        http_client=openai.DefaultAsyncHttpxClient(
            follow_redirects=False,
            event_hooks={"request": [*cleaned, *on_request], "response": list(on_response)},
            timeout=timeout,
        ),
    )


class ChatApi:
    """The client of one call: ``POST /chat/completions``."""

    def __init__(self, client: openai.AsyncOpenAI, call: Call, *, is_compatible: bool) -> None:
        self._client = client
        self._schema = call.schema
        self._fixed = fixed_body(call, is_compatible=is_compatible)

    async def close(self) -> None:
        await self._client.close()

    async def send(self, request: Request) -> Answer | Failure:
        import httpx2

        messages = [{"role": m.role.value, "content": m.content} for m in request.messages]
        body = {**self._fixed, "messages": messages}
        reply = await outcome_of(
            self._client.post("/chat/completions", body=body, cast_to=httpx2.Response)
        )
        if isinstance(reply, ErrorReply):
            return classify_error(reply)
        return reply if isinstance(reply, Failure) else _answer(reply.content, self._schema)


async def outcome_of(calling: Awaitable[_T]) -> _T | ErrorReply | Failure:
    """Return what a call of the SDK returns, what an error reply says, or how it was cut off."""
    import httpx2
    import openai

    try:
        return await calling
    except openai.APIStatusError as error:
        reply = error.response
        return read_error_reply(reply.status_code, reply.headers, reply.content)
    except openai.APIConnectionError as error:
        return lost_connection(error)
    except (httpx2.HTTPError, ssl.SSLError) as error:  # while the reply's body was read
        return lost_connection(error)


def _answer(content: bytes, schema: Mapping[str, Any]) -> Answer | Failure:
    try:
        reply = json.loads(content)
    except ValueError:
        return unreadable_reply(content)
    return parse_answer(reply, schema)


def parse_answer(reply: Any, schema: Mapping[str, Any]) -> Answer | Failure:
    """Return the answer in the decoded body of a good reply, fitted to the user's schema."""
    try:
        choice = reply["choices"][0]
        message = choice["message"]
        reason = choice.get("finish_reason")
        text = message.get("content") or ""
        refusal = message.get("refusal")
    except (LookupError, TypeError, AttributeError):
        return unreadable_reply(json.dumps(reply).encode())
    usage = _parse_usage(reply.get("usage"))
    model = reply.get("model")
    model_reported = model if isinstance(model, str) else None
    if refusal:
        return Answer(str(refusal), FinishReason.REFUSAL, usage, model_reported)
    if reason == "abort":  # vLLM broke it off
        return Failure(
            Outcome.TRANSIENT, "the server broke the answer off", usage, may_repeat=False
        )
    if not isinstance(reason, str) or not isinstance(text, str) or reason not in _FINISH_REASONS:
        return Failure(
            Outcome.REJECTED, f"the model stopped for an unknown reason: {reason!r}", usage
        )
    if reason == "stop":
        text = without_filled_nulls(text, schema)
    return Answer(text, _FINISH_REASONS[reason], usage, model_reported)


def _parse_usage(counts: Any) -> Usage:
    if not isinstance(counts, dict):
        return Usage()
    read, written = counts.get("prompt_tokens_details"), counts.get("completion_tokens_details")
    return Usage(
        input_tokens=tokens(counts, "prompt_tokens"),
        output_tokens=tokens(counts, "completion_tokens"),
        cached_tokens=tokens(read, "cached_tokens"),
        cache_write_tokens=tokens(read, "cache_write_tokens"),
        reasoning_tokens=tokens(written, "reasoning_tokens"),
    )


def classify_error(reply: ErrorReply) -> Failure:
    """Return what an error of the API says about the request that got it."""
    names = {reply.code, reply.kind}
    if names & _SYSTEMIC_CODES:
        return failure_of_all(reply)
    if reply.status in (400, 413, 422):
        said = f"status {reply.status}: {reply.message}"
        if names & _TOO_LONG_CODES or _TOO_LONG_TEXT.search(reply.message):
            return Failure(Outcome.TOO_LONG, said)
        if "content_filter" in names:
            return Failure(Outcome.FILTERED, said)
        # vLLM names a field that has a wrong type or length as a part of the body.
        field = re.split(r"[.\[]", (reply.param or "").removeprefix("body."))[0]
        if field in _FIXED_FIELDS or _REFUSED_SCHEMA_TEXT.search(reply.message):
            # A parameter or the schema, which all requests have in common.
            return failure_of_all(reply)
    return failure_by_status(reply)


def fixed_body(call: Call, *, is_compatible: bool) -> dict[str, Any]:
    """Return what the bodies of all requests of a call have in common."""
    limit_name = "max_tokens" if is_compatible else "max_completion_tokens"
    schema: Mapping[str, Any] = call.schema
    max_tokens = call.max_tokens
    if not is_compatible:
        if "max_tokens" not in call.params and _THINKS.match(call.model.name):
            max_tokens += _THINKING_TOKENS
        is_tuned = call.model.name.startswith(_TUNED_PREFIX)
        moved = _MOVED_IF_TUNED if is_tuned else _MOVED
        schema = wire_schema(schema, lambda key, _: key in moved, all_required=True)
    return {
        **{name: value for name, value in call.params.items() if name != "max_tokens"},
        "model": call.model.name,
        limit_name: max_tokens,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "strict": True, "schema": schema},
        },
    }
