"""Google's Gemini, through the Gemini Developer API."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from batchsql.backends.endpoint import ONLINE_OPTIONS, Endpoint, check_endpoint, plan_endpoint
from batchsql.backends.google_client import GoogleClient, read_reply, sdk_version
from batchsql.backends.online import (
    Answer,
    ErrorReply,
    Failure,
    OnlineBackend,
    failure_by_status,
    failure_of_all,
    tokens,
    unreadable_reply,
)
from batchsql.backends.params import Param, check_values
from batchsql.backends.wire_schema import wire_schema
from batchsql.errors import MissingExtraError, Mistake, SpecError
from batchsql.types import Call, FinishReason, ModelRef, Outcome, Request, Role, Usage

OWN_BASE_URL = "https://generativelanguage.googleapis.com"
_KEY_ENV = "GEMINI_API_KEY"

PARAMS: Mapping[str, Param] = {
    "temperature": Param("number", 0, 2),
    "top_p": Param("number", 0, 1),
    "top_k": Param("integer", 1, 1_000_000),
    "max_tokens": Param("integer", 1, 1_000_000),
    "seed": Param("integer", 0, 2**31 - 1),
    "stop": Param("texts", maximum=5),
    "presence_penalty": Param("number", -2, 2),
    "frequency_penalty": Param("number", -2, 2),
    "thinking_budget": Param("integer", -1, 32_768),
    "thinking_level": Param("text"),
}
_WIRE_NAMES = {
    "temperature": "temperature",
    "top_p": "topP",
    "top_k": "topK",
    "seed": "seed",
    "presence_penalty": "presencePenalty",
    "frequency_penalty": "frequencyPenalty",
}

_FILTERED = frozenset(
    {
        "SAFETY",
        "RECITATION",
        "LANGUAGE",
        "BLOCKLIST",
        "PROHIBITED_CONTENT",
        "SPII",
        "MODEL_ARMOR",
        "ESCALATION",
    }
)
_FINISH_REASONS = {
    "STOP": FinishReason.STOP,
    "MAX_TOKENS": FinishReason.LENGTH,
    "CONTINUATION": FinishReason.LENGTH,
    **dict.fromkeys(_FILTERED, FinishReason.CONTENT_FILTER),
}
# The model went wrong, and may do better next time.
_USELESS = frozenset(
    {
        "OTHER",
        "MALFORMED_RESPONSE",
        "MALFORMED_FUNCTION_CALL",
        "UNEXPECTED_TOOL_CALL",
        "TOO_MANY_TOOL_CALLS",
    }
)
_ACCOUNT_DISABLED = "PUP_LIMITED_DISABLED"
# All that ``responseJsonSchema`` looks at; it ignores the rest without a word.
# https://ai.google.dev/api/generate-content#FIELDS.response_json_schema
_KEYWORDS = frozenset(
    {
        "$anchor",
        "$defs",
        "$id",
        "$ref",
        "additionalProperties",
        "anyOf",
        "description",
        "enum",
        "format",
        "items",
        "maxItems",
        "maximum",
        "minItems",
        "minimum",
        "prefixItems",
        "properties",
        "required",
        "title",
        "type",
    }
)
# These models think before they answer, and their limit counts both.
_THINKS = re.compile(r"(models/)?gemini-(2\.5|[3-9]|[1-9]\d)")
_THINKING_TOKENS = 8192
_LEEWAY_SECONDS = 5.0
# The API has no code for these.
_TOO_LONG_TEXT = re.compile(r"exceeds the maximum number of tokens", re.IGNORECASE)
_BAD_KEY_TEXT = re.compile(r"\bAPI key\b", re.IGNORECASE)
_NO_CREDIT_TEXT = re.compile(r"credits are depleted", re.IGNORECASE)
# What all requests of a call have in common: the parameters and the schema.
_SHARED_TEXT = re.compile(
    r"generation_?config|response_?(json_?)?schema|specified schema|thinking|max_?output_?tokens",
    re.IGNORECASE,
)


def check_google(engine: Mapping[str, Any]) -> list[Mistake]:
    """Return the mistakes in the options of ``google/`` that go beyond single values."""
    return check_endpoint(engine, OWN_BASE_URL)


def open_google(model: ModelRef, engine: Mapping[str, Any], project_root: Path) -> OnlineBackend:
    """Return the backend for ``google/<model>``.

    Raises:
        SpecError: an engine option is wrong.
        MissingExtraError: the SDK is not installed.
    """
    endpoint = plan_google(model, engine)

    def open_api(call: Call, api_key: str | None, timeout_seconds: float) -> GenerateApi:
        return GenerateApi(call, endpoint, api_key, timeout_seconds)

    return OnlineBackend(model, engine, endpoint, open_api, sdk_version())


def plan_google(model: ModelRef, engine: Mapping[str, Any]) -> Endpoint:
    """Return where the model is reached.

    Raises:
        SpecError: an engine option is wrong.
        MissingExtraError: the SDK is not installed.
    """
    mistakes = check_values(engine, ONLINE_OPTIONS, "engine")
    if mistakes := mistakes or check_endpoint(engine, OWN_BASE_URL):
        raise SpecError(f"model {model}", mistakes)
    try:
        is_installed = importlib.util.find_spec("google.genai") is not None
    except ModuleNotFoundError:  # there is no package google at all
        is_installed = False
    if not is_installed:
        raise MissingExtraError(
            f"model {model} needs the package google-genai, which is not installed; "
            "run: pip install 'batchsql[google]'"
        )
    return plan_endpoint(engine, OWN_BASE_URL, _KEY_ENV)


class GenerateApi:
    """The client of one call: ``POST /models/…:generateContent``."""

    def __init__(
        self, call: Call, endpoint: Endpoint, api_key: str | None, timeout_seconds: float
    ) -> None:
        # The caller's own limit is to come first: it knows a late reply from a missing server.
        self._client = GoogleClient(endpoint, api_key, timeout_seconds + _LEEWAY_SECONDS)
        self._path = f"{model_path(call.model)}:generateContent"
        self._fixed = fixed_body(call)

    async def close(self) -> None:
        await self._client.close()

    async def send(self, request: Request) -> Answer | Failure:
        body = {**self._fixed, **contents_body(request)}
        content = await read_reply(self._client.call("post", self._path, body))
        if isinstance(content, ErrorReply):
            return classify_error(content)
        if isinstance(content, Failure):
            return content
        try:
            reply = json.loads(content)
        except ValueError:
            return unreadable_reply(content.encode())
        return parse_answer(reply)


def model_path(model: ModelRef) -> str:
    """Return the path of a model; a name with a folder, such as ``tunedModels/…``, keeps it."""
    name = model.name if "/" in model.name else f"models/{model.name}"
    return quote(name, safe="/")


def fixed_body(call: Call) -> dict[str, Any]:
    """Return what the bodies of all requests of a call have in common."""
    params = call.params
    config: dict[str, Any] = {
        wire: params[name] for name, wire in _WIRE_NAMES.items() if name in params
    }
    thinking = {
        wire: params[name]
        for name, wire in (
            ("thinking_budget", "thinkingBudget"),
            ("thinking_level", "thinkingLevel"),
        )
        if name in params
    }
    max_tokens = call.max_tokens
    if "max_tokens" not in params and _THINKS.match(call.model.name):
        budget = params.get("thinking_budget", -1)
        max_tokens += _THINKING_TOKENS if budget < 0 else budget
    if "stop" in params:
        stop = params["stop"]
        config["stopSequences"] = [stop] if isinstance(stop, str) else list(stop)
    if thinking:
        config["thinkingConfig"] = thinking
    schema = wire_schema(call.schema, _is_moved, all_required=False)
    return {
        "generationConfig": {
            **config,
            "maxOutputTokens": max_tokens,
            "responseMimeType": "application/json",
            "responseJsonSchema": schema,
        }
    }


def _is_moved(key: str, value: Any) -> bool:
    if key == "enum":  # of texts and numbers only
        return any(
            isinstance(each, bool) or not isinstance(each, (str, int, float)) for each in value
        )
    return key not in _KEYWORDS


def contents_body(request: Request) -> dict[str, Any]:
    """Return a request's messages in Gemini's form, where the system text stands apart."""
    system = [m.content for m in request.messages if m.role is Role.SYSTEM]
    body: dict[str, Any] = {
        "contents": [
            {
                "role": "model" if m.role is Role.ASSISTANT else "user",
                "parts": [{"text": m.content}],
            }
            for m in request.messages
            if m.role is not Role.SYSTEM
        ]
    }
    if system:
        body["systemInstruction"] = {"parts": [{"text": "\n\n".join(system)}]}
    return body


def parse_answer(reply: Any) -> Answer | Failure:
    """Return the answer in the decoded body of a good reply."""
    try:
        counts = reply.get("usageMetadata")
        usage = _parse_usage(counts)
        model = reply.get("modelVersion")
        model_reported = model if isinstance(model, str) else None
        if not reply.get("candidates"):
            # The prompt itself was blocked.
            if not reply.get("promptFeedback", {}).get("blockReason"):
                return _unreadable(reply, usage)
            return Answer("", FinishReason.CONTENT_FILTER, usage, model_reported)
        candidate = reply["candidates"][0]
        parts = candidate.get("content", {}).get("parts", [])
        text = "".join(part.get("text", "") for part in parts if not part.get("thought"))
        reason = candidate.get("finishReason")
    except (LookupError, TypeError, AttributeError):
        return _unreadable(reply, Usage())
    if reason == _ACCOUNT_DISABLED:
        return Failure(None, "Google has limited or disabled the account", usage)
    if reason in _USELESS:
        return Failure(Outcome.INVALID, f"the model gave no answer: {reason}", usage)
    if not isinstance(reason, str) or reason not in _FINISH_REASONS:
        return Failure(
            Outcome.REJECTED, f"the model stopped for an unknown reason: {reason!r}", usage
        )
    return Answer(text, _FINISH_REASONS[reason], usage, model_reported)


def _unreadable(reply: Any, usage: Usage) -> Failure:
    failure = unreadable_reply(json.dumps(reply).encode())
    return Failure(failure.outcome, failure.message, usage, may_repeat=failure.may_repeat)


def _parse_usage(counts: object) -> Usage:
    thoughts = tokens(counts, "thoughtsTokenCount")
    return Usage(
        input_tokens=tokens(counts, "promptTokenCount"),
        # Gemini counts the thoughts apart, and bills them as output.
        output_tokens=tokens(counts, "candidatesTokenCount") + thoughts,
        cached_tokens=tokens(counts, "cachedContentTokenCount"),
        reasoning_tokens=thoughts,
    )


def classify_error(reply: ErrorReply) -> Failure:
    """Return what an error of the API says about the request that got it."""
    said = f"status {reply.status}: {reply.message}"
    if reply.status == 400:
        if _TOO_LONG_TEXT.search(reply.message):
            return Failure(Outcome.TOO_LONG, said)
        is_account = reply.kind == "FAILED_PRECONDITION" or _BAD_KEY_TEXT.search(reply.message)
        if is_account or _SHARED_TEXT.search(f"{reply.param} {reply.message}"):
            return failure_of_all(reply)
    if reply.status == 429 and (
        _NO_CREDIT_TEXT.search(reply.message) or "PerDay" in (reply.code or "")
    ):
        return failure_of_all(reply)  # no pause of minutes would help
    if reply.status == 499:  # cancelled on the way
        return Failure(Outcome.TRANSIENT, said)
    return failure_by_status(reply)
