"""Anthropic's messages."""

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
from batchsql.backends.wire_schema import wire_schema
from batchsql.errors import MissingExtraError, Mistake, SpecError
from batchsql.types import Call, FinishReason, ModelRef, Outcome, Request, Role, Usage

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


def check_anthropic(engine: Mapping[str, Any]) -> list[Mistake]:
    """Return the mistakes in the options of ``anthropic/`` that go beyond single values."""
    return check_endpoint(engine, OWN_BASE_URL)


def open_anthropic(model: ModelRef, engine: Mapping[str, Any], project_root: Path) -> OnlineBackend:
    """Return the backend for ``anthropic/<model>``.

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
    endpoint = plan_endpoint(engine, OWN_BASE_URL, _KEY_ENV)

    def open_api(call: Call, api_key: str | None, timeout_seconds: float) -> MessagesApi:
        return MessagesApi(
            call, endpoint.base_url, api_key, timeout_seconds, is_own=endpoint.is_own
        )

    version = f"anthropic {importlib.metadata.version('anthropic')}"
    return OnlineBackend(model, engine, endpoint, open_api, version)


class MessagesApi:
    """The client of one call: ``POST /v1/messages``."""

    def __init__(
        self,
        call: Call,
        base_url: str,
        api_key: str | None,
        timeout_seconds: float,
        *,
        is_own: bool,
    ) -> None:
        import anthropic
        import httpx2

        hooks = {} if is_own else {"request": [only_headers(_HEADERS, api_key)]}
        timeout = httpx2.Timeout(timeout_seconds, connect=min(10.0, timeout_seconds))
        self._client = anthropic.AsyncAnthropic(
            base_url=base_url,
            api_key=api_key
            or "none",  # or the SDK takes it from the environment; the hook drops it
            max_retries=0,
            timeout=timeout,
            http_client=anthropic.DefaultAsyncHttpxClient(
                follow_redirects=False, event_hooks=hooks, timeout=timeout
            ),
        )
        self._fixed = fixed_body(call)

    async def close(self) -> None:
        await self._client.close()

    async def send(self, request: Request) -> Answer | Failure:
        import anthropic
        import httpx2

        try:
            response = await self._client.post(
                "/v1/messages",
                body={**self._fixed, **messages_body(request)},
                cast_to=httpx2.Response,
            )
        except anthropic.APIStatusError as error:
            reply = error.response
            return self._failure(read_error_reply(reply.status_code, reply.headers, reply.content))
        except anthropic.APIConnectionError as error:
            return lost_connection(error)
        except httpx2.HTTPError as error:  # while the reply's body was read
            return lost_connection(error)
        return _answer(response.content)

    def _failure(self, reply: ErrorReply) -> Failure:
        if reply.kind in _SYSTEMIC_TYPES or _NO_CREDIT_TEXT.search(reply.message):
            return failure_by_status(reply) if reply.status != 400 else failure_of_all(reply)
        if reply.status == 400:
            if _TOO_LONG_TEXT.search(reply.message):
                return Failure(Outcome.TOO_LONG, f"status 400: {reply.message}")
            # A message about one field starts with its path.
            if re.split(r"[.:]", reply.message)[0] in self._fixed:
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


def messages_body(request: Request) -> dict[str, Any]:
    """Return a request's messages in Anthropic's form, where the system text stands apart."""
    system = [m.content for m in request.messages if m.role is Role.SYSTEM]
    body: dict[str, Any] = {
        "messages": [
            {"role": m.role.value, "content": m.content}
            for m in request.messages
            if m.role is not Role.SYSTEM
        ]
    }
    if system:
        body["system"] = "\n\n".join(system)
    return body


def _answer(content: bytes) -> Answer | Failure:
    try:
        reply = json.loads(content)
        parts = [part["text"] for part in reply["content"] if part["type"] == "text"]
        text = "".join(parts)
        reason = reply["stop_reason"]
    except (ValueError, LookupError, TypeError):
        return unreadable_reply(content)
    counts = reply.get("usage")
    cached = tokens(counts, "cache_read_input_tokens")
    written = tokens(counts, "cache_creation_input_tokens")
    usage = Usage(
        # Anthropic counts what it reads from or writes to its cache apart.
        input_tokens=tokens(counts, "input_tokens") + cached + written,
        output_tokens=tokens(counts, "output_tokens"),
        cached_tokens=cached,
    )
    model = reply.get("model")
    if reason not in _FINISH_REASONS:
        return Failure(
            Outcome.REJECTED, f"the model stopped for an unknown reason: {reason!r}", usage
        )
    return Answer(text, _FINISH_REASONS[reason], usage, model if isinstance(model, str) else None)
