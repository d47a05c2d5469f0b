"""Google's wire format: Gemini's ``generateContent``, its batches and files."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from batchsql.emulate.answers import count_tokens
from batchsql.emulate.google_files import Files, stamp
from batchsql.emulate.google_rules import (
    CODES,
    MAX_OUTPUT_TOKENS,
    ContentChecker,
    GoogleError,
    UnknownFieldError,
    detail,
    invalid,
    read_fields,
)
from batchsql.emulate.provider import (
    ApiError,
    Operation,
    Question,
    World,
    answer,
    charge,
    find_strings,
    json_reply,
    new_id,
    read_json,
    too_long,
)
from batchsql.emulate.script import Behaviour, Moment, Rule
from batchsql.emulate.timeline import Phase, Timeline

WINDOW_SECONDS = 48 * 3600
MODELS = (
    "gemini-3.8-flash", "gemini-3.7-flash", "gemini-3.6-flash", "gemini-3.5-flash",
    "gemini-3.5-flash-lite", "gemini-3.1-pro-preview", "gemini-3.1-flash-lite",
    "gemini-3-flash-preview", "gemini-2.5-pro", "gemini-2.5-flash", "gemini-2.5-flash-lite",
)  # fmt: skip
_CACHED_FROM_TOKENS, _CACHE_STEP_TOKENS, _CACHE_SECONDS = 1024, 128, 300.0
_PAGE, _MAX_PAGE = 10, 100
_TYPE = "type.googleapis.com/google.ai.generativelanguage.v1main."
_INVALID_KEY = detail("ErrorInfo", reason="API_KEY_INVALID", domain="googleapis.com")
_KINDS = {
    Behaviour.RATE_LIMIT: (429, "You exceeded your current quota."),
    Behaviour.SERVER_ERROR: (500, "An internal error has occurred."),
    Behaviour.UNAVAILABLE: (503, "The service is currently unavailable."),
    Behaviour.OVERLOADED: (503, "The model is overloaded. Please try again later."),
    Behaviour.BAD_KEY: (400, "API key not valid. Please pass a valid API key."),
    Behaviour.NO_CREDIT: (429, "Your prepayment credits are depleted."),
}
_STATES = {
    Phase.VALIDATING: "PENDING",
    Phase.PROCESSING: "RUNNING",
    Phase.FINALIZING: "RUNNING",
    Phase.CANCELLING: "RUNNING",
    Phase.DONE: "SUCCEEDED",
    Phase.CANCELLED: "CANCELLED",
    Phase.EXPIRED: "EXPIRED",
}


@dataclass(frozen=True, slots=True)
class GoogleLimits:
    """The provider's limits. Lower them to meet them in a rehearsal."""

    inline_bytes: int = 20 * 1024 * 1024
    file_bytes: int = 2 * 1024 * 1024 * 1024
    concurrent_batches: int = 100
    enqueued_tokens: int = 400_000_000
    context_tokens: int = 1_048_576
    concurrent_requests: int | None = None


@dataclass(slots=True)
class _Line:
    """One request of a batch. ``mark`` is what its result is told apart by, as it came."""

    mark: dict[str, Any]
    key: str | None
    request: bytes


@dataclass(slots=True)
class _Batch:
    id: str
    model: str
    name: str
    file: str | None
    lines: list[_Line]
    rule: Rule | None
    timeline: Timeline
    fault: GoogleError | None = None
    total: int = 0
    tokens: int = 0
    ok: int = 0
    failed: int = 0
    is_partial: bool = False
    output: dict[str, Any] | None = None
    has_ended: bool = False
    results: list[dict[str, Any]] = field(default_factory=list)

    def is_met_by(self, behaviour: Behaviour) -> bool:
        return self.rule is not None and self.rule.behaviour is behaviour

    @property
    def state(self) -> str:
        phase = self.timeline.phase
        if self.fault is not None and phase is not Phase.VALIDATING:
            return "FAILED"
        return "PARTIALLY_SUCCEEDED" if self.is_partial else _STATES[phase]


class Google:
    """Models, batches and files, below ``/v1`` or ``/v1beta``."""

    name = "google"

    def __init__(
        self, world: World, limits: GoogleLimits | None = None, models: Sequence[str] = ()
    ) -> None:
        self._world = world
        self._limits = limits or GoogleLimits()
        self._models = dict.fromkeys([*MODELS, *models])
        self._batches: dict[str, _Batch] = {}
        self._check = ContentChecker()
        self._files = Files(world.clock, self._limits.file_bytes)

    @property
    def operations(self) -> Sequence[Operation]:
        """The calls that are served."""
        root = "/{version:v1(?:beta)?}"
        one = f"{root}/batches/{{id}}"
        return [
            Operation(method, path, f"google.{name}", handler)
            for method, path, name, handler in (
                ("POST", f"{root}/models/{{model}}:generateContent", "generate", self._generate),
                ("POST", f"{root}/models/{{model}}:batchGenerateContent", "batches.create",
                 self._create),
                ("GET", f"{root}/models", "models.list", self._list_models),
                ("GET", f"{root}/models/{{model}}", "models.get", self._get_model),
                ("GET", f"{root}/batches", "batches.list", self._list),
                ("GET", one, "batches.get", self._get),
                ("POST", f"{one}:cancel", "batches.cancel", self._cancel),
                ("DELETE", one, "batches.delete", self._delete),
                ("POST", f"/upload{root}/files", "files.upload", self._files.upload),
                ("GET", f"{root}/files/{{id}}:download", "files.download", self._download),
                ("GET", f"{root}/files/{{id}}", "files.get", self._files.get),
                ("DELETE", f"{root}/files/{{id}}", "files.delete", self._files.delete),
            )
        ]  # fmt: skip

    def authenticate(self, request: web.Request) -> None:
        """Accept any key in ``x-goog-api-key`` or the query; the upload's own URL needs none."""
        if self._files.is_upload(request):
            return
        key = request.headers.get("x-goog-api-key") or request.query.get("key", "")
        if not key.strip():
            raise GoogleError(
                403,
                "Method doesn't allow unregistered callers (callers without established identity). "
                "Please use API Key or other form of API consumer identity to call this API.",
            )

    def error_for(self, rule: Rule) -> ApiError:
        """Return Google's error for a misbehaviour."""
        status, message = _KINDS[rule.behaviour]
        details = [_INVALID_KEY] if rule.behaviour is Behaviour.BAD_KEY else []
        if rule.retry_after is not None:
            details.append(detail("RetryInfo", retryDelay=f"{rule.retry_after:g}s"))
        return GoogleError(status, message, details=details)

    def error_reply(self, error: ApiError) -> web.Response:
        """Return an error as Google words it."""
        made = _as_google(error)
        body: dict[str, Any] = {"code": made.status, "message": made.message, "status": made.kind}
        if made.details:
            body["details"] = made.details
        return json_reply({"error": body}, made.status)

    def prompt_of(self, body: Any) -> str:
        """Return the text of the system instruction and of all contents."""
        if isinstance(body, dict) and isinstance(body.get("contents"), list):
            system = body.get("systemInstruction", body.get("system_instruction"))
            return "\n".join(find_strings([system, body["contents"]]))
        return "\n".join(find_strings(body))

    def batches(self) -> Sequence[_Batch]:
        """Return all batches, oldest first."""
        return list(self._batches.values())

    # --- models ---------------------------------------------------------------------------------

    def _find_model(self, name: str) -> str:
        model = name.removeprefix("models/")
        if model not in self._models:
            raise GoogleError(
                404,
                f"models/{model} is not found for API version v1, or is not supported for "
                "generateContent. Call ListModels to see the list of available models and their "
                "supported methods.",
            )
        return model

    async def _list_models(self, request: web.Request) -> web.Response:
        return json_reply({"models": [_model_document(name) for name in self._models]})

    async def _get_model(self, request: web.Request) -> web.Response:
        return json_reply(_model_document(self._find_model(request.match_info["model"])))

    async def _generate(self, request: web.Request) -> web.Response:
        body = _read_body(await request.read())
        return json_reply(self._answer(body, request.match_info["model"], "google.generate"))

    def _answer(
        self, body: Any, model: str, endpoint: str, key: str | None = None,
        batch_id: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return a billed answer, or raise ApiError and bill nothing."""
        model = self._find_model(model)
        checked = self._check.check(body)
        text = f"{checked.system}\n{checked.prompt}"
        tokens = count_tokens(text)
        if tokens > self._limits.context_tokens:
            raise too_long(self.name, self._limits.context_tokens, tokens)
        world = self._world
        question = Question(
            endpoint=endpoint, model=model, body=body, system=checked.system,
            prompt=checked.prompt, max_tokens=checked.max_tokens, schema=checked.schema,
            wants_json=checked.wants_json, custom_id=key, batch_id=batch_id,
        )  # fmt: skip
        given = answer(world, question, self.name)
        cached = world.cache.longest_repeat(
            f"google/{model}", text, world.clock.now(),
            least=_CACHED_FROM_TOKENS, step=_CACHE_STEP_TOKENS, seconds=_CACHE_SECONDS,
        )  # fmt: skip
        charge(world, self.name, question, given, input_tokens=tokens, cached_tokens=cached)
        usage = {"promptTokenCount": tokens, "totalTokenCount": tokens + given.output_tokens}
        if cached:
            usage["cachedContentTokenCount"] = cached
        reply = {"usageMetadata": usage, "modelVersion": model, "responseId": new_id("")}
        if given.finish == "refusal":  # a model's refusal has no form of its own here
            return {"promptFeedback": {"blockReason": "PROHIBITED_CONTENT"}, **reply}
        usage["candidatesTokenCount"] = given.output_tokens
        reasons = {"stop": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY"}
        candidate: dict[str, Any] = {"finishReason": reasons[given.finish], "index": 0}
        if given.text:
            candidate["content"] = {"parts": [{"text": given.text}], "role": "model"}
        return {"candidates": [candidate], **reply}

    # --- batches --------------------------------------------------------------------------------

    async def _create(self, request: web.Request) -> web.Response:
        content = await request.read()
        if len(content) > self._limits.inline_bytes:
            raise invalid(
                f"Request payload size exceeds the limit: {self._limits.inline_bytes} bytes."
            )
        model = self._find_model(request.match_info["model"])
        outer = read_fields(_read_body(content), {"batch"}, "")
        batch = read_fields(
            outer.get("batch"), {"displayName", "inputConfig", "model", "priority"}, "batch"
        )
        if not isinstance(batch.get("displayName"), str) or not batch["displayName"]:
            raise invalid("batch.display_name is required", "batch.display_name")
        source = read_fields(
            batch.get("inputConfig"), {"fileName", "requests"}, "batch.input_config"
        )
        if len(source) != 1:
            raise invalid("batch.input_config needs one of file_name and requests", "batch")
        fault = None
        if "requests" in source:
            lines = self._read_inlined(source["requests"])
        else:
            file = self._files.find(str(source["fileName"]))
            try:
                lines = _read_lines(file.content)
            except GoogleError as error:  # found only while the batch is prepared
                lines, fault = [], error
        tokens = sum(count_tokens(line.request.decode("utf-8", "replace")) for line in lines)
        rule = self._rule_for(content, lines)
        self._check_queue(model, tokens, rule)
        if rule is not None and rule.behaviour is Behaviour.FAIL_VALIDATION:
            kind = (rule.code or "INVALID_ARGUMENT").upper()
            fault = GoogleError(400, "The batch failed, as the rehearsal asked for.", kind=kind)
        made = _Batch(
            new_id("batches/"), model, batch["displayName"], source.get("fileName"), lines, rule,
            self._world.timeline(rule, WINDOW_SECONDS), fault, len(lines), tokens,
        )  # fmt: skip
        self._batches[made.id] = made
        self._settle(made)
        return json_reply(self._document(made))

    def _read_inlined(self, requests: Any) -> list[_Line]:
        where = "batch.input_config.requests"
        entries = read_fields(requests, {"requests"}, where).get("requests")
        if not isinstance(entries, list) or not entries:
            raise invalid(f"{where}.requests must not be empty", where)
        lines = []
        for number, entry in enumerate(entries):
            fields = read_fields(entry, {"request", "metadata"}, f"{where}.requests[{number}]")
            metadata = fields.get("metadata")
            if metadata is not None and not isinstance(metadata, dict):
                raise invalid(f"{where}.requests[{number}].metadata must be an object", where)
            try:
                self._check.check(fields.get("request"))
            except UnknownFieldError:
                raise
            except GoogleError:
                pass  # the line's own error, once it is processed
            mark = {} if metadata is None else {"metadata": metadata}
            key = (metadata or {}).get("key")
            lines.append(_Line(mark, key, orjson.dumps(fields["request"])))
        return lines

    def _rule_for(self, content: bytes, lines: Sequence[_Line]) -> Rule | None:
        script = self._world.script
        if not script.has_rules(Moment.BATCH):
            return None
        texts = [content.decode("utf-8", "replace")]
        texts += [line.request.decode("utf-8", "replace") for line in lines]
        return script.meet(Moment.BATCH, "google.batches.create", texts)

    def _check_queue(self, model: str, tokens: int, rule: Rule | None) -> None:
        self.settle()
        waiting = [each for each in self._batches.values() if not each.has_ended]
        queued = sum(each.tokens for each in waiting if each.model == model)
        is_met = rule is not None and rule.behaviour is Behaviour.QUEUE_FULL
        quota = None
        if len(waiting) >= self._limits.concurrent_batches:
            quota = "ConcurrentBatchesPerProject"
        elif is_met or queued + tokens > self._limits.enqueued_tokens:
            quota = "BatchEnqueuedTokensPerProjectPerModel"
        if quota is not None:
            violation = detail("QuotaFailure", violations=[{"quotaId": quota}])
            raise GoogleError(429, "You exceeded your current quota.", details=[violation])

    def _find(self, request: web.Request) -> _Batch:
        name = f"batches/{request.match_info['id']}"
        batch = self._batches.get(name)
        if batch is None:
            raise GoogleError(404, f"Batch {name} not found.")
        self._settle(batch)
        return batch

    async def _get(self, request: web.Request) -> web.Response:
        return json_reply(self._document(self._find(request)))

    async def _list(self, request: web.Request) -> web.Response:
        size = request.query.get("pageSize", str(_PAGE))
        token = request.query.get("pageToken", "0")
        if not size.isdigit() or not token.isdigit():
            raise invalid("page_size and page_token must be what the server takes", "page_size")
        self.settle()
        first, last = int(token), int(token) + (min(int(size), _MAX_PAGE) or _PAGE)
        known = list(reversed(list(self._batches.values())))
        page: dict[str, Any] = {"operations": [self._document(each) for each in known[first:last]]}
        if last < len(known):
            page["nextPageToken"] = str(last)
        return json_reply(page)

    async def _cancel(self, request: web.Request) -> web.Response:
        batch = self._find(request)
        if batch.has_ended:
            raise GoogleError(400, f"{batch.id} has ended already.", kind="FAILED_PRECONDITION")
        batch.timeline.cancel()
        self._settle(batch)
        return json_reply({})

    async def _delete(self, request: web.Request) -> web.Response:
        del self._batches[self._find(request).id]
        return json_reply({})

    async def _download(self, request: web.Request) -> web.Response:
        self.settle()
        return await self._files.download(request)

    def _document(self, batch: _Batch) -> dict[str, Any]:
        line, state = batch.timeline, batch.state
        ended_at = min(self._world.clock.now(), line.at(line.phase))
        stats = {"requestCount": batch.total}
        stats["pendingRequestCount"] = batch.total - int(batch.total * line.share)
        if batch.has_ended:
            stats["successfulRequestCount"], stats["failedRequestCount"] = batch.ok, batch.failed
            stats["pendingRequestCount"] = batch.total - batch.ok - batch.failed
        metadata: dict[str, Any] = {
            "@type": f"{_TYPE}GenerateContentBatch",
            "model": f"models/{batch.model}",
            "displayName": batch.name,
            "createTime": stamp(line.created_at),
            "updateTime": stamp(ended_at),
            # A count of zero is left out, and numbers are texts, as in Google's JSON.
            "batchStats": {name: str(count) for name, count in stats.items() if count},
            "state": f"BATCH_STATE_{state}",
            "name": batch.id,
        }
        if batch.file is not None:
            metadata["inputConfig"] = {"fileName": batch.file}
        document: dict[str, Any] = {"name": batch.id, "metadata": metadata}
        if not batch.has_ended:
            return document
        metadata["endTime"] = stamp(ended_at)
        document["done"] = True
        if batch.output is not None:
            metadata["output"] = batch.output
            document["response"] = {"@type": f"{_TYPE}GenerateContentBatchOutput", **batch.output}
        elif state == "CANCELLED":
            document["error"] = {"code": CODES["CANCELLED"], "message": "The batch was cancelled."}
        elif state == "EXPIRED":
            document["error"] = {
                "code": CODES["DEADLINE_EXCEEDED"],
                "message": "The batch expired.",
            }
        elif batch.fault is not None:
            document["error"] = _line_error(batch.fault)
        return document

    # --- the life of a batch --------------------------------------------------------------------

    def settle(self) -> None:
        """Bring every batch to the present."""
        for batch in self._batches.values():
            self._settle(batch)

    def _settle(self, batch: _Batch) -> None:
        """End a batch whose time has come. Its lines are answered, and billed, only then.

        One that has expired gives nothing and is not billed. A cancelled one gives nothing either,
        but what it had processed is billed: Google does not say, so the rehearsal takes the worst.
        """
        phase = batch.timeline.phase
        if batch.has_ended:
            return
        if batch.state == "FAILED" or phase is Phase.EXPIRED:
            batch.has_ended = True
        elif phase is Phase.CANCELLED:
            for line in batch.lines[: int(batch.total * batch.timeline.share)]:
                self._run(batch, line)
            batch.has_ended = True
        elif phase is Phase.DONE:
            for line in batch.lines:
                self._run(batch, line)
            self._write(batch)
            batch.has_ended = True
        if batch.has_ended:
            batch.lines, batch.results = [], []

    def _run(self, batch: _Batch, line: _Line) -> None:
        body = orjson.loads(line.request)
        rule = None
        if self._world.script.has_rules(Moment.RESULT):
            rule = self._world.script.meet(
                Moment.RESULT, "google.batches.line", (self.prompt_of(body),), line.key
            )
        behaviour = None if rule is None else rule.behaviour
        result: dict[str, Any]
        try:
            if batch.is_met_by(Behaviour.ERRORS_ONLY):
                raise invalid("This request failed, as the rehearsal asked for.")
            if rule is not None and behaviour is Behaviour.ERROR_IN_OUTPUT:
                raise GoogleError(rule.status, "This request failed, as the rehearsal asked for.")
            said = self._answer(body, batch.model, "google.batches.line", line.key, batch.id)
            result = {"response": said}
            batch.ok += 1
        except ApiError as error:
            result = {"error": _line_error(_as_google(error))}
            batch.failed += 1
        if behaviour is Behaviour.MISSING:
            batch.is_partial = True
            return
        copies = 2 if behaviour is Behaviour.DUPLICATE else 1
        batch.results += [{**line.mark, **result}] * copies

    def _write(self, batch: _Batch) -> None:
        if batch.is_met_by(Behaviour.SHUFFLE):
            random.Random(batch.id).shuffle(batch.results)  # noqa: S311 - an order, no secret
        if batch.file is None:
            batch.output = {"inlinedResponses": {"inlinedResponses": batch.results}}
            return
        content = b"".join(orjson.dumps(each) + b"\n" for each in batch.results)
        ended_at = batch.timeline.at(Phase.DONE)
        file = f"files/{batch.id.replace('batches/', 'batch-')}"
        self._files.add_generated(file, content, ended_at)
        batch.output = {"responsesFile": file}


def _as_google(error: ApiError) -> GoogleError:
    return error if isinstance(error, GoogleError) else GoogleError(error.status, error.message)


def _line_error(error: GoogleError) -> dict[str, Any]:
    return {"code": CODES.get(error.kind, CODES["UNKNOWN"]), "message": error.message}


def _read_body(content: bytes) -> Any:
    try:
        return read_json(content)
    except ValueError as error:
        raise invalid("Invalid JSON payload received. Parsing error.") from error


def _read_lines(content: bytes) -> list[_Line]:
    """Return the requests in a file. Only LF ends a line."""
    lines = []
    for number, text in enumerate(content.split(b"\n"), start=1):
        if not text.strip():
            continue
        try:
            fields = read_fields(read_json(text), {"key", "request"}, f"line {number}")
            request = orjson.dumps(fields["request"])
        except (ValueError, KeyError) as error:
            raise invalid(f"Line {number} of the input file is no request.") from error
        key = fields.get("key")
        lines.append(_Line({} if key is None else {"key": key}, key, request))
    if not lines:
        raise invalid("The input file is empty.")
    return lines


def _model_document(name: str) -> dict[str, Any]:
    return {
        "name": f"models/{name}",
        "displayName": name,
        "inputTokenLimit": 1_048_576,
        "outputTokenLimit": MAX_OUTPUT_TOKENS,
        "supportedGenerationMethods": ["generateContent", "batchGenerateContent"],
    }
