"""Amazon Bedrock's Converse, the same for every model that it serves."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from batchsql.backends.aws import (
    OPTIONS,
    Aws,
    check_aws,
    need_boto3,
    plan_aws,
    read_error,
    sdk_version,
)
from batchsql.backends.endpoint import DEFAULT_CONCURRENCY, Endpoint
from batchsql.backends.loop import in_thread
from batchsql.backends.online import (
    Answer,
    ErrorReply,
    Failure,
    OnlineBackend,
    failure_by_status,
    tokens,
    unreadable_reply,
)
from batchsql.backends.params import Param, check_values
from batchsql.backends.wire_schema import wire_schema
from batchsql.errors import SpecError
from batchsql.types import Call, FinishReason, ModelRef, Outcome, Request, Role, Usage

PARAMS: Mapping[str, Param] = {
    "max_tokens": Param("integer", 1, 1_000_000),
    "temperature": Param("number", 0, 1),
    "top_p": Param("number", 0, 1),
    "stop": Param("texts", maximum=2500),
}

_INFERENCE_NAMES = {"temperature": "temperature", "top_p": "topP"}
_FINISH_REASONS = {
    "end_turn": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "malformed_model_output": FinishReason.STOP,  # whether it is an answer is for the validator
    "max_tokens": FinishReason.LENGTH,
    "model_context_window_exceeded": FinishReason.LENGTH,
    "guardrail_intervened": FinishReason.CONTENT_FILTER,
    "content_filtered": FinishReason.CONTENT_FILTER,
}
# Not in the subset of JSON Schema that Bedrock documents for structured outputs.
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
_TRANSIENT_KINDS = frozenset(
    {
        "ThrottlingException",
        "ModelTimeoutException",
        "ModelNotReadyException",
        "ModelErrorException",
        "ServiceUnavailableException",
        "InternalServerException",
        "InternalError",
        "RequestTimeout",
        "SlowDown",
    }
)
_OVERLOAD_KINDS = frozenset(
    {"ThrottlingException", "ModelNotReadyException", "ServiceUnavailableException", "SlowDown"}
)
_CHECK_CREDENTIALS = "check the AWS credentials of this machine, or engine.profile"
_CHECK_RIGHTS = (
    "check what the credentials may do, and the account's access to the model in this region"
)
_SYSTEMIC_HINTS = {
    "UnrecognizedClientException": _CHECK_CREDENTIALS,
    "ExpiredTokenException": _CHECK_CREDENTIALS,
    "ExpiredToken": _CHECK_CREDENTIALS,
    "InvalidAccessKeyId": _CHECK_CREDENTIALS,
    "InvalidSignatureException": f"{_CHECK_CREDENTIALS}, and this machine's clock",
    "SignatureDoesNotMatch": f"{_CHECK_CREDENTIALS}, and this machine's clock",
    "MissingAuthenticationTokenException": _CHECK_CREDENTIALS,
    "AccessDeniedException": _CHECK_RIGHTS,
    "AccessDenied": "check what the credentials may do in engine.s3_uri",
    "ResourceNotFoundException": "check the model's id and the region",
    "ServiceQuotaExceededException": "see the account's quotas for Bedrock",
    "NoSuchBucket": "check engine.s3_uri",
    "PermanentRedirect": "check the bucket's region and engine.region",
}
# All of these come as ValidationException, and only the text tells them apart.
_TOO_LONG_TEXT = re.compile(
    r"(?:input|prompt) is too long|maximum context length|too many input tokens|"
    r"exceeds? the (?:model's )?(?:maximum )?context",
    re.IGNORECASE,
)
_OWN_TEXT = re.compile(r"\b(?:messages|system)\.\d")  # the path of a part of the request's own
_SHARED_TEXT = re.compile(
    r"model identifier is invalid|on-demand throughput|(?:doesn't|does not|not) support|"
    r"(?:at '|^)(?:inferenceConfig|outputConfig|modelId)|output_?config|"
    r"^(?:temperature|top_p|max_tokens|stop_sequences)\b",
    re.IGNORECASE,
)


def plan_bedrock(model: ModelRef, engine: Mapping[str, Any]) -> Aws:
    """Return how the model is reached.

    Raises:
        SpecError: an engine option is wrong.
        MissingExtraError: boto3 is not installed.
    """
    mistakes = check_values(engine, OPTIONS, "engine")
    if mistakes := mistakes or check_aws(engine):
        raise SpecError(f"model {model}", mistakes)
    need_boto3(model)
    return plan_aws(engine)


def identity_of(aws: Aws) -> Mapping[str, Any]:
    """Return the endpoint, unless it is AWS's own: there the model's id says it all."""
    return {} if aws.is_own else {"endpoint": aws.base_url}


def open_bedrock(model: ModelRef, engine: Mapping[str, Any], project_root: Path) -> OnlineBackend:
    """Return the backend for ``bedrock/<model id or inference profile>``.

    Raises:
        SpecError: an engine option is wrong.
        MissingExtraError: boto3 is not installed.
    """
    aws = plan_bedrock(model, engine)
    place = aws.region or "the configured region"
    shown = f"Bedrock in {place} ({aws.profile or 'default'} credentials)"
    endpoint = Endpoint(aws.base_url or shown, aws.is_own, api_key_env=None)
    connections = engine.get("max_concurrency", DEFAULT_CONCURRENCY)

    def open_api(call: Call, api_key: str | None, timeout_seconds: float) -> ConverseApi:
        return ConverseApi(call, aws, timeout_seconds, connections)

    return OnlineBackend(model, engine, endpoint, open_api, sdk_version())


class ConverseApi:
    """The client of one call: ``POST /model/{id}/converse``, one thread for each request."""

    def __init__(self, call: Call, aws: Aws, timeout_seconds: float, connections: int) -> None:
        self._model_id = call.model.name
        self._fixed = fixed_body(call)
        self._open = partial(
            aws.client, "bedrock-runtime", timeout_seconds, tries=1, connections=connections
        )
        self._lock = threading.Lock()
        self._opened: Any = None

    async def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    async def send(self, request: Request) -> Answer | Failure:
        try:
            reply = await in_thread(partial(self._converse, request))
        except Exception as error:  # noqa: BLE001  what is not boto3's is raised again
            failure = read_error(error)
            return classify_error(failure) if isinstance(failure, ErrorReply) else failure
        return read_answer(reply)

    def _converse(self, request: Request) -> Any:
        with self._lock:  # opening it looks for credentials, which may take seconds
            if self._opened is None:
                self._opened = self._open()
        return self._opened.converse(
            modelId=self._model_id, **self._fixed, **messages_body(request)
        )


def fixed_body(call: Call) -> dict[str, Any]:
    """Return what the bodies of all requests of a call have in common, without the model's id."""
    schema = wire_schema(
        call.schema,
        lambda key, value: key in _MOVED or (key == "minItems" and value > 1),
        all_required=False,
    )
    inference: dict[str, Any] = {"maxTokens": call.max_tokens}
    for name, value in call.params.items():
        if name == "stop":
            inference["stopSequences"] = [value] if isinstance(value, str) else list(value)
        elif name in _INFERENCE_NAMES:
            inference[_INFERENCE_NAMES[name]] = value
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    described = {"jsonSchema": {"name": "answer", "schema": text}}
    return {
        "inferenceConfig": inference,
        "outputConfig": {"textFormat": {"type": "json_schema", "structure": described}},
    }


def messages_body(request: Request) -> dict[str, Any]:
    """Return a request's messages in Converse's form.

    The system text stands apart, and messages of one role in a row become one, since Converse
    wants the roles to alternate.
    """
    messages: list[dict[str, Any]] = []
    system = []
    for message in request.messages:
        block = {"text": message.content}
        if message.role is Role.SYSTEM:
            system.append(block)
        elif messages and messages[-1]["role"] == message.role.value:
            messages[-1]["content"].append(block)
        else:
            messages.append({"role": message.role.value, "content": [block]})
    return {"messages": messages, **({"system": system} if system else {})}


def read_answer(reply: Any) -> Answer | Failure:
    """Return the answer in a reply of Converse, which is also a line of a batch's output."""
    try:
        content = reply["output"]["message"]["content"]
        text = "".join(block["text"] for block in content if "text" in block)
        reason = reply["stopReason"]
    except (LookupError, TypeError):
        shown = {k: v for k, v in reply.items() if k != "ResponseMetadata"} if reply else reply
        return unreadable_reply(str(shown).encode())
    counts = reply.get("usage")
    cached = tokens(counts, "cacheReadInputTokens")
    written = tokens(counts, "cacheWriteInputTokens")
    details = counts.get("cacheDetails") if isinstance(counts, Mapping) else None
    usage = Usage(
        # Bedrock counts what it reads from or writes to its cache apart.
        input_tokens=tokens(counts, "inputTokens") + cached + written,
        output_tokens=tokens(counts, "outputTokens"),
        cached_tokens=cached,
        cache_write_tokens=written,
        cache_write_1h_tokens=sum(
            tokens(each, "inputTokens")
            for each in (details if isinstance(details, list) else ())
            if isinstance(each, Mapping) and each.get("ttl") == "1h"
        ),
    )
    if reason not in _FINISH_REASONS:
        return Failure(
            Outcome.REJECTED, f"the model stopped for an unknown reason: {reason!r}", usage
        )
    return Answer(text, _FINISH_REASONS[reason], usage, None)


def classify_error(reply: ErrorReply) -> Failure:
    """Return what an error of AWS says about a request."""
    kind = "" if reply.kind is None or reply.kind.isdigit() else f" {reply.kind}"
    said = f"status {reply.status}{kind}: {reply.message.rstrip('.')}"
    if reply.kind in _TRANSIENT_KINDS:
        return Failure(
            Outcome.TRANSIENT,
            said,
            is_overload=reply.kind in _OVERLOAD_KINDS,
            retry_after_seconds=reply.retry_after_seconds,
        )
    if reply.kind in _SYSTEMIC_HINTS:
        return Failure(None, f"every request is refused with {said}; {_SYSTEMIC_HINTS[reply.kind]}")
    if reply.status == 400:
        if _TOO_LONG_TEXT.search(reply.message):
            return Failure(Outcome.TOO_LONG, said)
        if not _OWN_TEXT.search(reply.message) and _SHARED_TEXT.search(reply.message):
            # A parameter, the schema or the model, which all requests have in common.
            return Failure(None, f"every request is refused with {said}")
    return failure_by_status(reply)
