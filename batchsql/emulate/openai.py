"""OpenAI's wire format: chat completions, files and batches."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from batchsql.emulate.answers import count_tokens
from batchsql.emulate.openai_rules import ChatChecker, invalid
from batchsql.emulate.provider import (
    ApiError,
    Operation,
    Question,
    World,
    answer,
    charge,
    find_snapshot,
    find_strings,
    json_reply,
    new_id,
    parse_limit,
    read_json,
    too_long,
)
from batchsql.emulate.script import Behaviour, Moment, Rule
from batchsql.emulate.timeline import WINDOW_SECONDS, Phase, Timeline

CHAT_URL = "/v1/chat/completions"
BATCH_ENDPOINTS = (
    "/v1/responses", CHAT_URL, "/v1/embeddings", "/v1/completions", "/v1/moderations",
    "/v1/images/generations", "/v1/images/edits", "/v1/videos",
)  # fmt: skip
DAY = 24 * 3600
MODELS: Mapping[str, str] = {
    "gpt-6-astra": "gpt-6-astra-2026-08-13",
    "gpt-6-luna": "gpt-6-luna-2026-06-11",
    "gpt-5.4-mini": "gpt-5.4-mini-2026-03-17",
    "gpt-5.4-nano": "gpt-5.4-nano-2026-03-17",
    "gpt-5.5": "gpt-5.5-2026-04-23",
    "gpt-5.2": "gpt-5.2-2025-12-11",
    "gpt-5": "gpt-5-2025-08-07",
    "gpt-5-mini": "gpt-5-mini-2025-08-07",
    "gpt-5-nano": "gpt-5-nano-2025-08-07",
    "gpt-4.1": "gpt-4.1-2025-04-14",
    "gpt-4.1-mini": "gpt-4.1-mini-2025-04-14",
    "gpt-4.1-nano": "gpt-4.1-nano-2025-04-14",
    "gpt-4o": "gpt-4o-2024-08-06",
    "gpt-4o-mini": "gpt-4o-mini-2024-07-18",
}
_CACHED_FROM_TOKENS, _CACHE_STEP_TOKENS, _CACHE_SECONDS = 1024, 128, 600
_MESSAGE_TOKENS = 4  # what the format adds to each message


@dataclass(frozen=True, slots=True)
class OpenAILimits:
    """The provider's limits. Lower them to meet them in a rehearsal."""

    batch_requests: int = 50_000
    batch_bytes: int = 200 * 1024 * 1024
    enqueued_tokens: int = 200_000_000
    context_tokens: int = 400_000
    concurrent_requests: int | None = None
    batch_errors: int = 100


@dataclass(slots=True)
class _File:
    id: str
    content: bytes
    filename: str
    purpose: str
    created_at: float
    expires_at: float | None

    def document(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": len(self.content),
            "created_at": int(self.created_at),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "expires_at": None if self.expires_at is None else int(self.expires_at),
            "status_details": None,
        }


@dataclass(slots=True)
class _Batch:
    id: str
    input_file_id: str
    endpoint: str
    metadata: Mapping[str, str] | None
    output_seconds: float | None
    rule: Rule | None
    timeline: Timeline
    content: bytes
    is_validated: bool = False
    lines: list[bytes] = field(default_factory=list)
    total: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)
    failed_at: float | None = None
    model: str | None = None
    done: int = 0
    outputs: list[bytes] = field(default_factory=list)
    failures: list[bytes] = field(default_factory=list)
    completed: int = 0
    usage: list[int] = field(default_factory=lambda: [0, 0, 0])
    tokens: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    is_closed: bool = False

    @property
    def is_final(self) -> bool:
        return self.failed_at is not None or self.is_closed

    def is_met_by(self, behaviour: Behaviour) -> bool:
        return self.rule is not None and self.rule.behaviour is behaviour

    @property
    def status(self) -> str:
        if self.failed_at is not None:
            return "failed"
        names = {Phase.PROCESSING: "in_progress", Phase.DONE: "completed"}
        phase = self.timeline.phase
        return names.get(phase, phase.value)


class OpenAI:
    """Chat completions, Files and Batches, below ``/v1``."""

    name = "openai"

    def __init__(
        self, world: World, limits: OpenAILimits | None = None, models: Sequence[str] = ()
    ) -> None:
        self._world = world
        self._limits = limits or OpenAILimits()
        self._models = {**MODELS, **{name: name for name in models}}
        self._files: dict[str, _File] = {}
        self._batches: dict[str, _Batch] = {}
        self._check = ChatChecker()
        self._busy = 0

    @property
    def operations(self) -> Sequence[Operation]:
        """The calls that are served."""
        return [
            Operation(method, f"/v1{path}", f"openai.{name}", handler)
            for method, path, name, handler in (
                ("GET", "/models", "models.list", self._list_models),
                ("POST", "/chat/completions", "chat", self._chat),
                ("POST", "/files", "files.create", self._create_file),
                ("GET", "/files", "files.list", self._list_files),
                ("GET", "/files/{id}", "files.retrieve", self._retrieve_file),
                ("DELETE", "/files/{id}", "files.delete", self._delete_file),
                ("GET", "/files/{id}/content", "files.content", self._file_content),
                ("POST", "/batches", "batches.create", self._create_batch),
                ("GET", "/batches", "batches.list", self._list_batches),
                ("GET", "/batches/{id}", "batches.retrieve", self._retrieve_batch),
                ("POST", "/batches/{id}/cancel", "batches.cancel", self._cancel_batch),
            )
        ]

    def authenticate(self, request: web.Request) -> None:
        """Accept any key in a Bearer header."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(
                401,
                "invalid_request_error",
                "You didn't provide an API key. You need to provide your API key in an "
                "Authorization header using Bearer auth (i.e. Authorization: Bearer YOUR_KEY).",
            )

    def error_for(self, rule: Rule) -> ApiError:
        """Return OpenAI's error for a misbehaviour."""
        headers = {} if rule.retry_after is None else {"retry-after": f"{rule.retry_after:g}"}
        behaviour = rule.behaviour
        if behaviour is Behaviour.RATE_LIMIT:
            return ApiError(
                429, "requests", "Rate limit reached for requests. Please try again later.",
                code="rate_limit_exceeded", headers=headers,
            )  # fmt: skip
        if behaviour is Behaviour.NO_CREDIT:
            return ApiError(
                429, "insufficient_quota",
                "You exceeded your current quota, please check your plan and billing details.",
                code="insufficient_quota",
            )  # fmt: skip
        if behaviour is Behaviour.BAD_KEY:
            return ApiError(
                401, "invalid_request_error", "Incorrect API key provided.", code="invalid_api_key"
            )
        if behaviour is Behaviour.SERVER_ERROR:
            return ApiError(
                500, "server_error", "The server had an error while processing your request."
            )
        status = 529 if behaviour is Behaviour.OVERLOADED else 503
        return ApiError(
            status, "server_error", "The engine is currently overloaded, please try again later.",
            headers=headers,
        )  # fmt: skip

    def error_reply(self, error: ApiError) -> web.Response:
        """Return an error as OpenAI words it."""
        return json_reply(_error_body(error), error.status, **error.headers)

    def prompt_of(self, body: Any) -> str:
        """Return the text of all messages."""
        messages = body.get("messages") if isinstance(body, dict) else None
        return "\n".join(find_strings(messages if isinstance(messages, list) else body))

    def batches(self) -> Sequence[_Batch]:
        """Return all batches, oldest first."""
        return list(self._batches.values())

    # --- chat completions -----------------------------------------------------------------------

    async def _list_models(self, request: web.Request) -> web.Response:
        data = [
            {"id": name, "object": "model", "created": 1_700_000_000, "owned_by": "emulator"}
            for name in self._models
        ]
        return json_reply({"object": "list", "data": data})

    async def _chat(self, request: web.Request) -> web.Response:
        body = _read_body(await request.read())
        if body.get("stream"):
            raise invalid("The emulator does not stream.", "stream", "unsupported_value")
        return json_reply(self._complete(body, "openai.chat"))

    def _complete(
        self, body: Any, endpoint: str, custom_id: str | None = None, batch_id: str | None = None
    ) -> dict[str, Any]:
        """Return a billed chat completion, or raise ApiError and bill nothing."""
        checked = self._check.check(body)
        snapshot = find_snapshot(self._models, checked.model)
        if snapshot is None:
            raise _no_model(checked.model)
        texts = checked.texts
        prompt = "\n".join(texts)
        tokens = sum(map(count_tokens, texts)) + _MESSAGE_TOKENS * len(texts)
        if tokens > self._limits.context_tokens:
            raise too_long(self.name, self._limits.context_tokens, tokens)
        question = Question(
            endpoint=endpoint, model=checked.model, body=body, prompt=prompt, system="",
            max_tokens=checked.max_tokens, schema=checked.schema, wants_json=checked.wants_json,
            custom_id=custom_id, batch_id=batch_id,
        )  # fmt: skip
        world = self._world
        given = answer(world, question, self.name)
        cached = world.cache.longest_repeat(
            f"openai/{snapshot}", prompt, world.clock.now(),
            least=_CACHED_FROM_TOKENS, step=_CACHE_STEP_TOKENS, seconds=_CACHE_SECONDS,
        )  # fmt: skip
        charge(world, self.name, question, given, input_tokens=tokens, cached_tokens=cached)
        is_refusal = given.finish == "refusal"
        return {
            "id": new_id("chatcmpl-"),
            "object": "chat.completion",
            "created": int(world.clock.now()),
            "model": snapshot,
            "choices": [
                {
                    "index": 0,
                    "message": {
                        "role": "assistant",
                        "content": None if is_refusal else given.text,
                        "refusal": given.text if is_refusal else None,
                        "annotations": [],
                    },
                    "logprobs": None,
                    "finish_reason": "stop" if is_refusal else given.finish,
                }
            ],
            "usage": {
                "prompt_tokens": tokens,
                "completion_tokens": given.output_tokens,
                "total_tokens": tokens + given.output_tokens,
                "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
                "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
            },
            "service_tier": "default",
            "system_fingerprint": None,
        }

    # --- files ----------------------------------------------------------------------------------

    async def _create_file(self, request: web.Request) -> web.Response:
        if not request.content_type.startswith("multipart/"):
            raise invalid("Expected a multipart form with 'file' and 'purpose'.", None)
        form = await request.post()
        purpose, upload = form.get("purpose"), form.get("file")
        if not isinstance(purpose, str):
            raise invalid("Missing required parameter: 'purpose'.", "purpose")
        if not isinstance(upload, web.FileField):
            raise invalid("Missing required parameter: 'file'.", "file")
        content = upload.file.read()
        if purpose == "batch":
            if not upload.filename.endswith(".jsonl"):
                raise invalid("Invalid file format for Batch API. Must be .jsonl", None, None)
            if len(content) > self._limits.batch_bytes:
                raise ApiError(
                    413, "invalid_request_error",
                    f"File is too large. The maximum is {self._limits.batch_bytes} bytes.",
                )  # fmt: skip
        seconds = _expiry(form.get("expires_after[anchor]"), form.get("expires_after[seconds]"))
        if seconds is None and purpose == "batch":
            seconds = 30 * DAY
        made = self._add_file(content, upload.filename, purpose, seconds)
        return json_reply(made.document())

    def _add_file(
        self, content: bytes, filename: str, purpose: str, seconds: float | None
    ) -> _File:
        now = self._world.clock.now()
        made = _File(
            new_id("file-"), content, filename, purpose, now,
            None if seconds is None else now + seconds,
        )  # fmt: skip
        self._files[made.id] = made
        return made

    def _find_file(self, file_id: str) -> _File:
        found = self._files.get(file_id)
        if found is not None and (found.expires_at or math.inf) <= self._world.clock.now():
            del self._files[file_id]
            found = None
        if found is None:
            raise ApiError(
                404, "invalid_request_error", f"No such File object: {file_id}", param="id"
            )
        return found

    async def _list_files(self, request: web.Request) -> web.Response:
        purpose = request.query.get("purpose")
        limit = parse_limit(request, default=10_000, most=10_000)
        known = [each for each in self._files.values() if purpose in (None, each.purpose)]
        return json_reply(_page([each.document() for each in reversed(known)], request, limit))

    async def _retrieve_file(self, request: web.Request) -> web.Response:
        return json_reply(self._find_file(request.match_info["id"]).document())

    async def _delete_file(self, request: web.Request) -> web.Response:
        found = self._find_file(request.match_info["id"])
        del self._files[found.id]
        return json_reply({"id": found.id, "object": "file", "deleted": True})

    async def _file_content(self, request: web.Request) -> web.Response:
        found = self._find_file(request.match_info["id"])
        return web.Response(body=found.content, content_type="application/octet-stream")

    # --- batches --------------------------------------------------------------------------------

    async def _create_batch(self, request: web.Request) -> web.Response:
        body = _read_body(await request.read())
        unknown = set(body) - {
            "input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after",
        }  # fmt: skip
        if unknown:
            name = sorted(unknown)[0]
            raise invalid(f"Unknown parameter: '{name}'.", name, "unknown_parameter")
        for name in ("input_file_id", "endpoint", "completion_window"):
            if not isinstance(body.get(name), str):
                raise invalid(f"Missing required parameter: '{name}'.", name)
        if body["completion_window"] != "24h":
            raise invalid(
                f"Invalid value: '{body['completion_window']}'. Value must be '24h'.",
                "completion_window", "invalid_value",
            )  # fmt: skip
        if body["endpoint"] not in BATCH_ENDPOINTS:
            raise invalid(
                f"Invalid value: '{body['endpoint']}'. Supported values are: "
                + ", ".join(f"'{each}'" for each in BATCH_ENDPOINTS),
                "endpoint", "invalid_value",
            )  # fmt: skip
        if body["endpoint"] != CHAT_URL:
            raise invalid(f"The emulator runs batches for {CHAT_URL} only.", "endpoint")
        after = body.get("output_expires_after") or {}
        seconds = _expiry(after.get("anchor"), after.get("seconds"))
        metadata = _check_metadata(body.get("metadata"))
        source = self._find_file(body["input_file_id"])
        if source.purpose != "batch":
            raise invalid(
                f"Invalid file purpose: '{source.purpose}'. Expected 'batch'.", "input_file_id"
            )
        texts: list[str] = []
        if self._world.script.has_rules(Moment.BATCH):
            texts = [source.content.decode("utf-8", "replace"), *(metadata or {}).values()]
        rule = self._world.script.meet(Moment.BATCH, "openai.batches.create", texts)
        batch = _Batch(
            id=new_id("batch_"), input_file_id=source.id, endpoint=body["endpoint"],
            metadata=metadata, output_seconds=seconds, rule=rule,
            timeline=self._world.timeline(rule), content=source.content,
        )  # fmt: skip
        self._batches[batch.id] = batch
        # However fast batches are, nothing has happened to this one when the provider replies.
        late = ("finalizing_at", "completed_at")
        reply = {**self._document(batch), "status": "validating", **dict.fromkeys(late)}
        return json_reply(reply)

    async def _list_batches(self, request: web.Request) -> web.Response:
        limit = parse_limit(request, default=20, most=100)
        self.settle()
        known = [self._document(each) for each in reversed(list(self._batches.values()))]
        return json_reply(_page(known, request, limit))

    def _find_batch(self, request: web.Request) -> _Batch:
        batch = self._batches.get(request.match_info["id"])
        if batch is None:
            raise ApiError(
                404, "invalid_request_error",
                f"No batch found with id '{request.match_info['id']}'.",
            )  # fmt: skip
        self.settle()
        return batch

    async def _retrieve_batch(self, request: web.Request) -> web.Response:
        return json_reply(self._document(self._find_batch(request)))

    async def _cancel_batch(self, request: web.Request) -> web.Response:
        batch = self._find_batch(request)
        if batch.is_final:
            raise ApiError(
                409, "invalid_request_error", f"Cannot cancel a batch with status '{batch.status}'."
            )
        batch.timeline.cancel()
        self._settle(batch)
        return json_reply(self._document(batch))

    def _document(self, batch: _Batch) -> dict[str, Any]:
        line = batch.timeline
        phase = line.phase
        is_failed = batch.failed_at is not None

        def reached(*phases: Phase, at: Phase) -> int | None:
            return int(line.at(at)) if phase in phases and not is_failed else None

        stamps: dict[str, int | None] = {
            "in_progress_at": None,
            "finalizing_at": reached(Phase.FINALIZING, Phase.DONE, at=Phase.FINALIZING),
            "completed_at": reached(Phase.DONE, at=Phase.DONE),
            "failed_at": int(batch.failed_at) if batch.failed_at is not None else None,
            "expired_at": reached(Phase.EXPIRED, at=Phase.EXPIRED),
            "cancelling_at": reached(Phase.CANCELLING, Phase.CANCELLED, at=Phase.CANCELLING),
            "cancelled_at": reached(Phase.CANCELLED, at=Phase.CANCELLED),
        }
        if phase is not Phase.VALIDATING and batch.is_validated and not is_failed:
            stamps["in_progress_at"] = int(line.at(Phase.PROCESSING))
        read, cached, written = batch.usage
        return {
            "id": batch.id,
            "object": "batch",
            "endpoint": batch.endpoint,
            "model": batch.model,
            "errors": {"object": "list", "data": batch.errors} if is_failed else None,
            "input_file_id": batch.input_file_id,
            "completion_window": "24h",
            "status": batch.status,
            "output_file_id": batch.output_file_id,
            "error_file_id": batch.error_file_id,
            "created_at": int(line.created_at),
            "expires_at": int(line.created_at) + WINDOW_SECONDS,
            **stamps,
            "request_counts": {
                "total": batch.total,
                "completed": batch.completed,
                "failed": batch.done - batch.completed,
            },
            "usage": {
                "input_tokens": read,
                "input_tokens_details": {"cached_tokens": cached},
                "output_tokens": written,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": read + written,
            },
            "metadata": batch.metadata,
        }

    # --- the life of a batch --------------------------------------------------------------------

    def settle(self) -> None:
        """Bring every batch to the present."""
        for batch in self._batches.values():
            self._settle(batch)

    def _settle(self, batch: _Batch) -> None:
        """Do what a batch should have done by now: validate, answer lines, write the files."""
        if batch.is_final:
            return
        phase = batch.timeline.phase
        if phase is Phase.VALIDATING:
            return
        if not batch.is_validated and not (
            batch.timeline.is_cancelled and not batch.timeline.share
        ):
            self._validate(batch)
            if batch.failed_at is not None:
                return
        target = int(batch.total * batch.timeline.share)
        for number in range(batch.done, target):
            self._run_line(batch, number)
        batch.done = max(batch.done, target)
        if phase.is_final:
            self._close(batch, phase)

    def _validate(self, batch: _Batch) -> None:
        batch.is_validated = True
        errors: list[dict[str, Any]] = []
        lines = batch.content.split(b"\n")
        if lines and not lines[-1].strip():
            lines.pop()
        if not lines:
            errors.append(_line_error("empty_file", "The input file is empty.", None))
        if len(lines) > self._limits.batch_requests:
            errors.append(
                _line_error(
                    "too_many_tasks",
                    f"The batch input file contains more than the maximum of "
                    f"{self._limits.batch_requests} requests.",
                    None,
                )
            )
            lines = []
        seen: set[str] = set()
        model: str | None = None
        for number, line in enumerate(lines, start=1):
            try:
                model = self._check_line(line, batch.endpoint, seen, model)
            except ApiError as error:
                errors.append(_line_error(error.code, error.message, number, error.param))
                if len(errors) >= self._limits.batch_errors:
                    break
        batch.tokens = len(batch.content) // 4
        if not errors:
            errors = self._systemic_errors(batch, model)
        if errors:
            batch.errors = errors
            batch.failed_at = batch.timeline.at(Phase.PROCESSING)
        else:
            batch.lines, batch.total = lines, len(lines)
            batch.model = find_snapshot(self._models, model or "")
        batch.content = b""

    def _check_line(self, line: bytes, endpoint: str, seen: set[str], model: str | None) -> str:
        """Return the model that a line asks, or raise what the batch's errors will say."""
        try:
            entry = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise invalid(
                "This line is not parseable as valid JSON.", None, "invalid_json_line"
            ) from error
        if not isinstance(entry, dict):
            raise invalid("This line is not a JSON object.", None, "invalid_json_line")
        for name in ("custom_id", "method", "url", "body"):
            if name not in entry:
                raise invalid(
                    f"Missing required parameter: '{name}'.", name, "missing_required_parameter"
                )
        custom_id, body = entry["custom_id"], entry["body"]
        if not isinstance(custom_id, str) or not custom_id:
            raise invalid("'custom_id' must be a non-empty string.", "custom_id", "invalid_type")
        if custom_id in seen:
            raise invalid(
                f"The custom_id for this request ('{custom_id}') is a duplicate of another "
                "request. The custom_id parameter must be unique for each request in a batch.",
                "custom_id", "duplicate_custom_id",
            )  # fmt: skip
        seen.add(custom_id)
        if entry["method"] != "POST":
            raise invalid("The method must be 'POST'.", "method", "invalid_method")
        if entry["url"] != endpoint:
            raise invalid(
                "The URL provided for this request does not match the batch endpoint.",
                "url", "url_mismatch",
            )  # fmt: skip
        if not isinstance(body, dict) or not isinstance(body.get("model"), str):
            raise invalid(
                "Missing required parameter: 'body.model'.", "body.model",
                "missing_required_parameter",
            )  # fmt: skip
        asked: str = body["model"]
        if model is not None and asked != model:
            raise invalid(
                f"The model '{asked}' does not match the model of the batch ('{model}'). Each "
                "input file can only contain requests to a single model.",
                "body.model", "mismatched_model",
            )  # fmt: skip
        return asked

    def _systemic_errors(self, batch: _Batch, model: str | None) -> list[dict[str, Any]]:
        """Return what fails a batch whose lines are good."""
        name = model or ""
        if find_snapshot(self._models, name) is None:
            message = f"The provided model '{name}' is not supported by the Batch API."
            return [_line_error("model_not_found", message, 1, "body.model")]
        if batch.rule is not None and batch.is_met_by(Behaviour.FAIL_VALIDATION):
            code = batch.rule.code or "invalid_json_line"
            return [_line_error(code, "This line failed, as the rehearsal asked for.", 1)]
        queued = sum(
            each.tokens
            for each in self._batches.values()
            if each.is_validated and not each.is_final and each.model == self._models.get(name)
        )
        if (
            batch.is_met_by(Behaviour.QUEUE_FULL)
            or queued + batch.tokens > self._limits.enqueued_tokens
        ):
            message = (
                f"Enqueued token limit reached for {name} in organization org-emulator. Limit: "
                f"{self._limits.enqueued_tokens:,} enqueued tokens. Please try again once some "
                "in_progress batches have been completed."
            )
            return [_line_error("token_limit_exceeded", message, None)]
        return []

    def _run_line(self, batch: _Batch, number: int) -> None:
        entry = orjson.loads(batch.lines[number])
        custom_id = entry["custom_id"]
        rule = None
        if self._world.script.has_rules(Moment.RESULT):
            rule = self._world.script.meet(
                Moment.RESULT, "openai.batches.line", (self.prompt_of(entry["body"]),), custom_id
            )
        error: ApiError | None = None
        body: dict[str, Any]
        try:
            if batch.is_met_by(Behaviour.ERRORS_ONLY):
                raise invalid("This request failed, as the rehearsal asked for.", None)
            if rule is not None and rule.behaviour is Behaviour.ERROR_IN_OUTPUT:
                raise ApiError(
                    rule.status, "invalid_request_error",
                    "This request failed, as the rehearsal asked for.",
                )  # fmt: skip
            body = self._complete(entry["body"], "openai.batches.line", custom_id, batch.id)
            usage = body["usage"]
            batch.usage[0] += usage["prompt_tokens"]
            batch.usage[1] += usage["prompt_tokens_details"]["cached_tokens"]
            batch.usage[2] += usage["completion_tokens"]
        except ApiError as raised:
            error, body = raised, _error_body(raised)
        result = _result_line(custom_id, error.status if error else 200, body)
        is_output = error is None or (
            rule is not None and rule.behaviour is Behaviour.ERROR_IN_OUTPUT
        )
        batch.completed += error is None
        if rule is not None and rule.behaviour is Behaviour.MISSING:
            return
        target = batch.outputs if is_output else batch.failures
        target.append(result)
        if rule is not None and rule.behaviour is Behaviour.DUPLICATE:
            target.append(result)

    def _close(self, batch: _Batch, phase: Phase) -> None:
        """Write the files of a batch that has ended."""
        code, message = (
            ("batch_expired", "This request could not be executed before the completion window "
             "expired.")
            if phase is Phase.EXPIRED
            else ("batch_cancelled", "This request was not executed because the batch was "
                  "cancelled.")
        )  # fmt: skip
        for line in batch.lines[batch.done :]:
            batch.failures.append(
                orjson.dumps(
                    {
                        "id": new_id("batch_req_"),
                        "custom_id": orjson.loads(line)["custom_id"],
                        "response": None,
                        "error": {"code": code, "message": message},
                    }
                )
            )
        if batch.is_met_by(Behaviour.SHUFFLE):
            source = random.Random(batch.id)  # noqa: S311 - an order, no secret
            source.shuffle(batch.outputs)
        batch.output_file_id = self._write(batch, "output", batch.outputs)
        batch.error_file_id = self._write(batch, "error", batch.failures)
        batch.lines, batch.outputs, batch.failures = [], [], []
        batch.is_closed = True

    def _write(self, batch: _Batch, kind: str, lines: list[bytes]) -> str | None:
        if not lines:
            return None
        made = self._add_file(
            b"\n".join(lines) + b"\n", f"{batch.id}_{kind}.jsonl", "batch_output",
            batch.output_seconds or 30 * DAY,
        )  # fmt: skip
        return made.id


def _read_body(content: bytes) -> dict[str, Any]:
    try:
        body = read_json(content)
    except ValueError as error:
        raise invalid(
            "We could not parse the JSON body of your request.", None, "invalid_json"
        ) from error
    if not isinstance(body, dict):
        raise invalid("The body of your request must be a JSON object.", None)
    return body


def _error_body(error: ApiError) -> dict[str, Any]:
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def _no_model(name: str) -> ApiError:
    return ApiError(
        404,
        "invalid_request_error",
        f"The model `{name}` does not exist or you do not have access to it.",
        code="model_not_found",
    )


def _line_error(
    code: str | None, message: str, line: int | None, param: str | None = None
) -> dict[str, Any]:
    return {"code": code, "line": line, "message": message, "param": param}


def _result_line(custom_id: str, status: int, body: Mapping[str, Any]) -> bytes:
    return orjson.dumps(
        {
            "id": new_id("batch_req_"),
            "custom_id": custom_id,
            "response": {"status_code": status, "request_id": new_id("req_"), "body": body},
            "error": None,
        }
    )


def _expiry(anchor: object, seconds: object) -> float | None:
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise invalid("Invalid anchor: only 'created_at' is supported.", "expires_after.anchor")
    text = str(seconds)
    if not text.isdigit() or not 3_600 <= int(text) <= 2_592_000:
        raise invalid("'seconds' must be between 3600 and 2592000.", "expires_after.seconds")
    return float(text)


def _check_metadata(metadata: object) -> Mapping[str, str] | None:
    if metadata is None:
        return None
    if not isinstance(metadata, dict):
        raise invalid("'metadata' must be an object.", "metadata", "invalid_type")
    if len(metadata) > 16:
        raise invalid("'metadata' may have at most 16 pairs.", "metadata", "too_many_properties")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise invalid("Values of 'metadata' must be strings.", "metadata", "invalid_type")
        if len(key) > 64 or len(value) > 512:
            raise invalid(
                "Keys of 'metadata' have at most 64 and values at most 512 characters.",
                "metadata", "string_above_max_length",
            )  # fmt: skip
    return metadata


def _page(known: list[dict[str, Any]], request: web.Request, limit: int) -> dict[str, Any]:
    """Return the page of a list that begins after the ``after`` of a request."""
    after = request.query.get("after")
    if after:
        ids = [each["id"] for each in known]
        if after not in ids:
            raise invalid(f"Invalid 'after': no object with id '{after}'.", "after")
        known = known[ids.index(after) + 1 :]
    page = known[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(known) > limit,
    }
