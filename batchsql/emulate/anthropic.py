"""Anthropic's wire format: Messages and Message Batches."""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import orjson
from aiohttp import web

from batchsql.emulate.answers import count_tokens
from batchsql.emulate.anthropic_rules import MessagesChecker, invalid
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

CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
RESULTS_KEPT_SECONDS = 29 * 24 * 3600
MODELS: Mapping[str, str] = {
    "claude-haiku-5-5": "claude-haiku-5-5-20260903",
    "claude-sonnet-5-5": "claude-sonnet-5-5-20260820",
    "claude-opus-5-5": "claude-opus-5-5-20260820",
    "claude-sonnet-5": "claude-sonnet-5-20260430",
    "claude-opus-5": "claude-opus-5-20260430",
    "claude-haiku-4-5": "claude-haiku-4-5-20251001",
    "claude-sonnet-4-5": "claude-sonnet-4-5-20250929",
    "claude-opus-4-5": "claude-opus-4-5-20251101",
}
_CACHED_FROM_TOKENS = 1024
_CACHE_SECONDS = {"5m": 300.0, "1h": 3600.0}
_MESSAGE_TOKENS = 4  # what the format adds to each message
_KINDS = {
    Behaviour.RATE_LIMIT: (429, "rate_limit_error", "Number of requests has exceeded your limit."),
    Behaviour.SERVER_ERROR: (500, "api_error", "Internal server error"),
    Behaviour.UNAVAILABLE: (503, "api_error", "Service unavailable"),
    Behaviour.OVERLOADED: (529, "overloaded_error", "Overloaded"),
    Behaviour.BAD_KEY: (401, "authentication_error", "invalid api key"),
    Behaviour.NO_CREDIT: (402, "billing_error", "Your credit balance is too low."),
}


@dataclass(frozen=True, slots=True)
class AnthropicLimits:
    """The provider's limits. Lower them to meet them in a rehearsal."""

    batch_requests: int = 100_000
    batch_bytes: int = 256 * 1024 * 1024
    queued_requests: int = 300_000
    context_tokens: int = 200_000
    concurrent_requests: int | None = None


@dataclass(slots=True)
class _Batch:
    id: str
    requests: list[bytes]
    rule: Rule | None
    timeline: Timeline
    done: int = 0
    results: list[bytes] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    content: bytes | None = None

    @property
    def has_ended(self) -> bool:
        return self.content is not None

    def is_met_by(self, behaviour: Behaviour) -> bool:
        return self.rule is not None and self.rule.behaviour is behaviour


class Anthropic:
    """Messages and Message Batches, below ``/v1/messages``."""

    name = "anthropic"

    def __init__(
        self, world: World, limits: AnthropicLimits | None = None, models: Sequence[str] = ()
    ) -> None:
        self._world = world
        self._limits = limits or AnthropicLimits()
        self._models = {**MODELS, **{name: name for name in models}}
        self._batches: dict[str, _Batch] = {}
        self._check = MessagesChecker()
        self._signature = secrets.token_hex(8)

    @property
    def operations(self) -> Sequence[Operation]:
        """The calls that are served."""
        batches = "/v1/messages/batches"
        return [
            Operation(method, path, f"anthropic.{name}", handler)
            for method, path, name, handler in (
                ("POST", "/v1/messages", "messages", self._messages),
                ("POST", batches, "batches.create", self._create),
                ("GET", batches, "batches.list", self._list),
                ("GET", f"{batches}/{{id}}", "batches.retrieve", self._retrieve),
                ("POST", f"{batches}/{{id}}/cancel", "batches.cancel", self._cancel),
                ("DELETE", f"{batches}/{{id}}", "batches.delete", self._delete),
                ("GET", f"{batches}/{{id}}/results", "batches.results", self._results),
            )
        ]

    def authenticate(self, request: web.Request) -> None:
        """Accept any key in a Bearer header, or in the older ``x-api-key``.

        A URL of results at another origin is signed and needs no key.
        """
        if request.query.get("signature") == self._signature and request.path.endswith("/results"):
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        has_bearer = scheme.lower() == "bearer" and bool(key.strip())
        if not has_bearer and not request.headers.get("x-api-key", "").strip():
            raise ApiError(401, "authentication_error", "authorization header is required")
        if not request.headers.get("anthropic-version"):
            raise invalid("anthropic-version: header is required")

    def error_for(self, rule: Rule) -> ApiError:
        """Return Anthropic's error for a misbehaviour."""
        status, kind, message = _KINDS[rule.behaviour]
        headers = {} if rule.retry_after is None else {"retry-after": f"{rule.retry_after:g}"}
        return ApiError(status, kind, message, headers=headers)

    def error_reply(self, error: ApiError) -> web.Response:
        """Return an error as Anthropic words it."""
        return json_reply(_error_body(error), error.status, **error.headers)

    def prompt_of(self, body: Any) -> str:
        """Return the text of the system prompt and of all messages."""
        if isinstance(body, dict) and isinstance(body.get("messages"), list):
            return "\n".join(find_strings([body.get("system"), body["messages"]]))
        return "\n".join(find_strings(body))

    def batches(self) -> Sequence[_Batch]:
        """Return all batches, oldest first."""
        return list(self._batches.values())

    # --- messages -------------------------------------------------------------------------------

    async def _messages(self, request: web.Request) -> web.Response:
        body = _read_body(await request.read())
        if body.get("stream"):
            raise invalid("stream: the emulator does not stream")
        return json_reply(self._answer(body, "anthropic.messages"))

    def _answer(
        self, body: Any, endpoint: str, custom_id: str | None = None, batch_id: str | None = None
    ) -> dict[str, Any]:
        """Return a billed message, or raise ApiError and bill nothing."""
        checked = self._check.check(body, in_batch=batch_id is not None)
        snapshot = find_snapshot(self._models, checked.model)
        if snapshot is None:
            raise ApiError(404, "not_found_error", f"model: {checked.model}")
        blocks = checked.blocks
        tokens = sum(count_tokens(block.text) for block in blocks)
        tokens += _MESSAGE_TOKENS * len(body["messages"])
        if tokens > self._limits.context_tokens:
            raise too_long(self.name, self._limits.context_tokens, tokens)
        world = self._world
        question = Question(
            endpoint=endpoint, model=checked.model, body=body,
            system="\n".join(block.text for block in blocks if block.is_system),
            prompt="\n".join(block.text for block in blocks if not block.is_system),
            max_tokens=checked.max_tokens, schema=checked.schema,
            custom_id=custom_id, batch_id=batch_id,
        )  # fmt: skip
        given = answer(world, question, self.name)
        read, written = self._cache(snapshot, checked.blocks)
        fresh = tokens - read - sum(written.values())
        charge(world, self.name, question, given, input_tokens=tokens, cached_tokens=read)
        is_refusal = given.finish in ("refusal", "content_filter")
        stop = {"stop": "end_turn", "length": "max_tokens"}.get(given.finish, "refusal")
        return {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": snapshot,
            "content": [{"type": "text", "text": given.text}] if given.text else [],
            "stop_reason": stop,
            "stop_sequence": None,
            "stop_details": (
                {"type": "refusal", "category": None, "explanation": given.text or None}
                if is_refusal
                else None
            ),
            "usage": {
                "input_tokens": fresh,
                "cache_creation_input_tokens": sum(written.values()),
                "cache_read_input_tokens": read,
                "cache_creation": {
                    "ephemeral_5m_input_tokens": written["5m"],
                    "ephemeral_1h_input_tokens": written["1h"],
                },
                "output_tokens": given.output_tokens,
                "service_tier": "standard" if batch_id is None else "batch",
            },
        }

    def _cache(self, snapshot: str, blocks: Sequence[Any]) -> tuple[int, dict[str, int]]:
        """Return the tokens read from the cache, and those written by how long they are kept."""
        read, text, tokens = 0, "", 0
        written = {"5m": 0, "1h": 0}
        reached = 0
        for block in blocks:
            text += block.text + "\0"
            tokens += count_tokens(block.text)
            if block.ttl is None or tokens < _CACHED_FROM_TOKENS:
                continue
            seconds = _CACHE_SECONDS[block.ttl]
            if self._world.cache.touch(snapshot, text, self._world.clock.now(), seconds):
                read, written = tokens, {"5m": 0, "1h": 0}
            else:
                written[block.ttl] += tokens - reached
            reached = tokens
        return read, written

    # --- batches --------------------------------------------------------------------------------

    async def _create(self, request: web.Request) -> web.Response:
        content = await request.read()
        if len(content) > self._limits.batch_bytes:
            raise ApiError(413, "request_too_large", "Request exceeds the maximum size")
        body = _read_body(content)
        unknown = set(body) - {"requests"}
        if unknown:
            raise invalid(f"{sorted(unknown)[0]}: Extra inputs are not permitted")
        requests = body.get("requests")
        if not isinstance(requests, list):
            raise invalid("requests: Field required")
        if not requests:
            raise invalid("requests: List should have at least 1 item after validation, not 0")
        if len(requests) > self._limits.batch_requests:
            raise invalid(
                f"requests: List should have at most {self._limits.batch_requests} items after "
                f"validation, not {len(requests)}"
            )
        seen: set[str] = set()
        for number, entry in enumerate(requests):
            _check_entry(entry, number, seen)
        self.settle()
        waiting = sum(len(each.requests) for each in self._batches.values() if not each.has_ended)
        texts = []
        if self._world.script.has_rules(Moment.BATCH):
            texts = [content.decode("utf-8", "replace")]
        rule = self._world.script.meet(Moment.BATCH, "anthropic.batches.create", texts)
        is_full = waiting + len(requests) > self._limits.queued_requests
        if is_full or (rule is not None and rule.behaviour is Behaviour.QUEUE_FULL):
            raise ApiError(
                429, "rate_limit_error",
                "This request would exceed your organization's limit of "
                f"{self._limits.queued_requests:,} batch requests in the processing queue.",
            )  # fmt: skip
        batch = _Batch(
            new_id("msgbatch_"), [orjson.dumps(each) for each in requests], rule,
            self._world.timeline(rule),
        )  # fmt: skip
        self._batches[batch.id] = batch
        return json_reply(self._document(batch, request))

    async def _list(self, request: web.Request) -> web.Response:
        limit = parse_limit(request, default=20, most=1_000)
        self.settle()
        known = list(reversed(list(self._batches.values())))
        ids = [each.id for each in known]
        after, before = request.query.get("after_id"), request.query.get("before_id")
        for name, cursor in (("after_id", after), ("before_id", before)):
            if cursor and cursor not in ids:
                raise invalid(f"{name}: no batch with id {cursor}")
        if before:
            earlier = known[: ids.index(before)]
            page, has_more = earlier[-limit:], len(earlier) > limit
        else:
            later = known[ids.index(after) + 1 :] if after else known
            page, has_more = later[:limit], len(later) > limit
        return json_reply(
            {
                "data": [self._document(each, request) for each in page],
                "has_more": has_more,
                "first_id": page[0].id if page else None,
                "last_id": page[-1].id if page else None,
            }
        )

    def _find(self, request: web.Request) -> _Batch:
        batch = self._batches.get(request.match_info["id"])
        if batch is None:
            raise ApiError(404, "not_found_error", f"Batch {request.match_info['id']} not found")
        self.settle()
        return batch

    async def _retrieve(self, request: web.Request) -> web.Response:
        return json_reply(self._document(self._find(request), request))

    async def _cancel(self, request: web.Request) -> web.Response:
        batch = self._find(request)
        if batch.has_ended:
            raise invalid(f"Batch {batch.id} cannot be canceled because it has already ended")
        batch.timeline.cancel()
        self._settle(batch)
        return json_reply(self._document(batch, request))

    async def _delete(self, request: web.Request) -> web.Response:
        batch = self._find(request)
        if not batch.has_ended:
            raise invalid(f"Batch {batch.id} cannot be deleted while it is being processed")
        del self._batches[batch.id]
        return json_reply({"id": batch.id, "type": "message_batch_deleted"})

    async def _results(self, request: web.Request) -> web.Response:
        batch = self._find(request)
        if batch.content is None:
            raise ApiError(404, "not_found_error", f"Batch {batch.id} has no available results yet")
        if self._is_archived(batch):
            raise ApiError(404, "not_found_error", f"Results of batch {batch.id} were archived")
        return web.Response(body=batch.content, content_type="application/x-jsonl")

    def _is_archived(self, batch: _Batch) -> bool:
        return self._world.clock.now() >= batch.timeline.created_at + RESULTS_KEPT_SECONDS

    def _document(self, batch: _Batch, request: web.Request) -> dict[str, Any]:
        line = batch.timeline
        is_archived = self._is_archived(batch)
        counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
        # Nothing is told before the end.
        counts.update(batch.counts if batch.has_ended else {"processing": len(batch.requests)})
        status = "ended" if batch.has_ended else "canceling" if line.is_cancelled else "in_progress"
        root = request.path[: request.path.index("/v1/messages")]
        # Another origin, though the same server, so that it can be seen what is sent there.
        host, query = request.host, ""
        if batch.is_met_by(Behaviour.FOREIGN_URL):
            host = host.replace("127.0.0.1", "localhost")
            query = f"?signature={self._signature}"
        has_results = batch.has_ended and not is_archived
        return {
            "id": batch.id,
            "type": "message_batch",
            "processing_status": status,
            "request_counts": counts,
            "created_at": _stamp(line.created_at),
            "expires_at": _stamp(line.created_at + WINDOW_SECONDS),
            "ended_at": _stamp(line.at(line.phase)) if batch.has_ended else None,
            "cancel_initiated_at": (
                _stamp(line.at(Phase.CANCELLING)) if line.is_cancelled else None
            ),
            "archived_at": (
                _stamp(line.created_at + RESULTS_KEPT_SECONDS) if is_archived else None
            ),
            "results_url": (
                f"{request.scheme}://{host}{root}/v1/messages/batches/{batch.id}/results{query}"
                if has_results
                else None
            ),
        }

    # --- the life of a batch --------------------------------------------------------------------

    def settle(self) -> None:
        """Bring every batch to the present."""
        for batch in self._batches.values():
            self._settle(batch)

    def _settle(self, batch: _Batch) -> None:
        if batch.has_ended:
            return
        target = int(len(batch.requests) * batch.timeline.share)
        for number in range(batch.done, target):
            self._run(batch, number)
        batch.done = max(batch.done, target)
        phase = batch.timeline.phase
        if phase.is_final:
            self._end(batch, "expired" if phase is Phase.EXPIRED else "canceled")

    def _run(self, batch: _Batch, number: int) -> None:
        entry = orjson.loads(batch.requests[number])
        custom_id, params = entry["custom_id"], entry["params"]
        rule = None
        if self._world.script.has_rules(Moment.RESULT):
            rule = self._world.script.meet(
                Moment.RESULT, "anthropic.batches.line", (self.prompt_of(params),), custom_id
            )
        behaviour = None if rule is None else rule.behaviour
        result: dict[str, Any]
        try:
            if batch.is_met_by(Behaviour.ERRORS_ONLY) or behaviour is Behaviour.ERROR_IN_OUTPUT:
                raise invalid("This request failed, as the rehearsal asked for.")
            message = self._answer(params, "anthropic.batches.line", custom_id, batch.id)
            result = {"type": "succeeded", "message": message}
        except ApiError as error:
            result = {"type": "errored", "error": _error_body(error)}
        kind = result["type"]
        batch.counts[kind] = batch.counts.get(kind, 0) + 1
        copies = {Behaviour.MISSING: 0, Behaviour.DUPLICATE: 2}.get(behaviour or Behaviour.SLOW, 1)
        batch.results += [orjson.dumps({"custom_id": custom_id, "result": result})] * copies

    def _end(self, batch: _Batch, kind: str) -> None:
        """Write the results of a batch that has ended; what was not answered is ``kind``."""
        for request in batch.requests[batch.done :]:
            custom_id = orjson.loads(request)["custom_id"]
            batch.results.append(orjson.dumps({"custom_id": custom_id, "result": {"type": kind}}))
            batch.counts[kind] = batch.counts.get(kind, 0) + 1
        if batch.is_met_by(Behaviour.SHUFFLE):
            random.Random(batch.id).shuffle(batch.results)  # noqa: S311 - an order, no secret
        batch.content = b"".join(each + b"\n" for each in batch.results)
        batch.requests, batch.results = [], []


def _read_body(content: bytes) -> dict[str, Any]:
    try:
        body = read_json(content)
    except ValueError as error:
        raise invalid("The request body is not valid JSON") from error
    if not isinstance(body, dict):
        raise invalid("The request body must be a JSON object")
    return body


def _check_entry(entry: Any, number: int, seen: set[str]) -> None:
    """Check what creation checks of one request: its shape and its id, not its params."""
    where = f"requests.{number}"
    if not isinstance(entry, dict):
        raise invalid(f"{where}: Input should be an object")
    custom_id = entry.get("custom_id")
    if not isinstance(custom_id, str):
        raise invalid(f"{where}.custom_id: Field required")
    if not CUSTOM_ID.fullmatch(custom_id):
        raise invalid(f"{where}.custom_id: String should match pattern '^[a-zA-Z0-9_-]{{1,64}}$'")
    if custom_id in seen:
        raise invalid(f"requests: custom_id must be unique, {custom_id} is given twice")
    seen.add(custom_id)
    if not isinstance(entry.get("params"), dict):
        raise invalid(f"{where}.params: Field required")
    unknown = set(entry) - {"custom_id", "params"}
    if unknown:
        raise invalid(f"{where}.{sorted(unknown)[0]}: Extra inputs are not permitted")


def _error_body(error: ApiError) -> dict[str, Any]:
    return {
        "type": "error",
        "error": {"type": error.kind, "message": error.message},
        "request_id": new_id("req_"),
    }


def _stamp(seconds: float) -> str:
    moment = datetime.fromtimestamp(seconds, timezone.utc)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
