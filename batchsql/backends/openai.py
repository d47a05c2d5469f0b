"""OpenAI's chat completions, at OpenAI and at every server that speaks the same."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchsql.backends.endpoint import ONLINE_OPTIONS, check_endpoint, plan_endpoint
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
from batchsql.backends.wire_schema import wire_schema, without_filled_nulls
from batchsql.errors import MissingExtraError, Mistake, SpecError
from batchsql.types import Call, FinishReason, ModelRef, Outcome, Request, Usage

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
_SYSTEMIC_CODES = frozenset(
    {"insufficient_quota", "billing_not_active", "model_not_found", "account_deactivated"}
)
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
    return _open(model, engine, OWN_BASE_URL)


def open_compatible(
    model: ModelRef, engine: Mapping[str, Any], project_root: Path
) -> OnlineBackend:
    """Return the backend for ``openai_compatible/<model>``, such as one that vLLM serves.

    Raises:
        SpecError: an engine option is wrong, or ``base_url`` is missing.
        MissingExtraError: the SDK is not installed.
    """
    return _open(model, engine, None)


def _open(model: ModelRef, engine: Mapping[str, Any], own_base_url: str | None) -> OnlineBackend:
    mistakes = check_values(engine, ONLINE_OPTIONS, "engine")
    if mistakes := mistakes or check_endpoint(engine, own_base_url):
        raise SpecError(f"model {model}", mistakes)
    if importlib.util.find_spec("openai") is None:
        raise MissingExtraError(
            f"model {model} needs the package openai, which is not installed; "
            "run: pip install 'batchsql[openai]'"
        )
    endpoint = plan_endpoint(engine, own_base_url, _KEY_ENV)

    def open_api(call: Call, api_key: str | None, timeout_seconds: float) -> ChatApi:
        return ChatApi(
            call,
            endpoint.base_url,
            api_key,
            timeout_seconds,
            is_own=endpoint.is_own,
            is_compatible=own_base_url is None,
        )

    version = f"openai {importlib.metadata.version('openai')}"
    return OnlineBackend(model, engine, endpoint, open_api, version)


class ChatApi:
    """The client of one call: ``POST /chat/completions``."""

    def __init__(
        self,
        call: Call,
        base_url: str,
        api_key: str | None,
        timeout_seconds: float,
        *,
        is_own: bool,
        is_compatible: bool,
    ) -> None:
        import httpx2
        import openai

        hooks = {} if is_own else {"request": [only_headers(BASIC_HEADERS, api_key)]}
        timeout = httpx2.Timeout(timeout_seconds, connect=min(10.0, timeout_seconds))
        self._client = openai.AsyncOpenAI(
            base_url=base_url,
            api_key=api_key
            or "none",  # or the SDK takes it from the environment; the hook drops it
            max_retries=0,
            timeout=timeout,
            http_client=openai.DefaultAsyncHttpxClient(
                follow_redirects=False, event_hooks=hooks, timeout=timeout
            ),
        )
        self._schema = call.schema
        self._fixed = fixed_body(call, is_compatible=is_compatible)

    async def close(self) -> None:
        await self._client.close()

    async def send(self, request: Request) -> Answer | Failure:
        import httpx2
        import openai

        messages = [{"role": m.role.value, "content": m.content} for m in request.messages]
        try:
            response = await self._client.post(
                "/chat/completions",
                body={**self._fixed, "messages": messages},
                cast_to=httpx2.Response,
            )
        except openai.APIStatusError as error:
            reply = error.response
            return self._failure(read_error_reply(reply.status_code, reply.headers, reply.content))
        except openai.APIConnectionError as error:
            return lost_connection(error)
        except httpx2.HTTPError as error:  # while the reply's body was read
            return lost_connection(error)
        return self._answer(response.content)

    def _answer(self, content: bytes) -> Answer | Failure:
        try:
            reply = json.loads(content)
            choice = reply["choices"][0]
            message = choice["message"]
            reason = choice.get("finish_reason")
            text = message.get("content") or ""
            refusal = message.get("refusal")
        except (ValueError, LookupError, TypeError, AttributeError):
            return unreadable_reply(content)
        counts = reply.get("usage")
        details = counts.get("prompt_tokens_details") if isinstance(counts, Mapping) else None
        usage = Usage(
            input_tokens=tokens(counts, "prompt_tokens"),
            output_tokens=tokens(counts, "completion_tokens"),
            cached_tokens=tokens(details, "cached_tokens"),
        )
        model = reply.get("model")
        model_reported = model if isinstance(model, str) else None
        if refusal:
            return Answer(str(refusal), FinishReason.REFUSAL, usage, model_reported)
        if reason == "abort":  # vLLM broke it off
            return Failure(
                Outcome.TRANSIENT, "the server broke the answer off", usage, may_repeat=False
            )
        if reason not in _FINISH_REASONS or not isinstance(text, str):
            return Failure(
                Outcome.REJECTED, f"the model stopped for an unknown reason: {reason!r}", usage
            )
        if reason == "stop":
            text = without_filled_nulls(text, self._schema)
        return Answer(text, _FINISH_REASONS[reason], usage, model_reported)

    def _failure(self, reply: ErrorReply) -> Failure:
        names = {reply.code, reply.kind}
        if names & _SYSTEMIC_CODES:
            return failure_of_all(reply)
        if reply.status in (400, 413, 422):
            said = f"status {reply.status}: {reply.message}"
            if names & _TOO_LONG_CODES or _TOO_LONG_TEXT.search(reply.message):
                return Failure(Outcome.TOO_LONG, said)
            if "content_filter" in names:
                return Failure(Outcome.FILTERED, said)
            if reply.param and re.split(r"[.\[]", reply.param)[0] in self._fixed:
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
