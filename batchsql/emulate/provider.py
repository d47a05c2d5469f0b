"""What the emulated providers share: errors, the world they live in, and how a request is answered.

A provider is one module with one class that satisfies ``Provider``; ``server.py`` lists them.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson
from aiohttp import web

from batchsql.emulate.answers import PrefixCache, SchemaAnswers, count_tokens, make_text
from batchsql.emulate.bill import Bill, Charge, hash_content
from batchsql.emulate.script import Behaviour, Moment, Rule, Script
from batchsql.emulate.timeline import WINDOW_SECONDS, Clock, Durations, Timeline

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_RUN, _NUMBERS = secrets.token_hex(8), itertools.count()
_DATED = re.compile(r"(.+?)-(\d{8}|\d{4}-\d{2}-\d{2})")


class ApiError(Exception):
    """A reply that is an error. ``kind`` and ``code`` are the provider's own words."""

    def __init__(
        self, status: int, kind: str, message: str, *, param: str | None = None,
        code: str | None = None, headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})


@dataclass(slots=True)
class World:
    """All state of an emulator. Whoever reads or changes it holds the emulator's lock."""

    clock: Clock
    durations: Durations
    script: Script
    bill: Bill = field(default_factory=Bill)
    answers: SchemaAnswers = field(default_factory=SchemaAnswers)
    cache: PrefixCache = field(default_factory=PrefixCache)

    def timeline(self, rule: Rule | None, window_seconds: float = WINDOW_SECONDS) -> Timeline:
        """Return the life of a batch that is created now under a misbehaviour."""
        behaviour = None if rule is None else rule.behaviour
        return Timeline(
            self.clock,
            self.durations,
            stalls_at=rule.fraction if rule and behaviour is Behaviour.EXPIRE else None,
            cancel_hangs=behaviour is Behaviour.CANCEL_HANGS,
            window_seconds=window_seconds,
        )


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a provider's API. Its name is what rules match and records show."""

    method: str
    path: str
    name: str
    handler: Handler


class EmulatedBatch(Protocol):
    """What the emulator's own controls need of a batch."""

    id: str
    timeline: Timeline


class Provider(Protocol):
    """One provider's wire format."""

    name: str

    @property
    def operations(self) -> Sequence[Operation]:
        """The calls that are served, their paths below the provider's own root."""

    def authenticate(self, request: web.Request) -> None:
        """Raise ApiError unless the request carries a key and the headers that must be there."""

    def error_for(self, rule: Rule) -> ApiError:
        """Return the error that this provider gives for a misbehaviour of a request."""

    def error_reply(self, error: ApiError) -> web.Response:
        """Return an error in the provider's shape."""

    def prompt_of(self, body: Any) -> str:
        """Return the text that a request body asks the model."""

    def batches(self) -> Sequence[EmulatedBatch]:
        """Return all batches, oldest first."""

    def settle(self) -> None:
        """Bring every batch, and what it has cost, to the present."""


@dataclass(frozen=True, slots=True)
class Question:
    """A valid request to a model, whatever provider it came by."""

    endpoint: str
    model: str
    body: Mapping[str, Any]
    prompt: str
    system: str
    max_tokens: int | None
    schema: Mapping[str, Any] | None
    wants_json: bool = False
    custom_id: str | None = None
    batch_id: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said. ``rule`` is the misbehaviour that shaped it, if one did."""

    text: str
    finish: str  # "stop", "length", "refusal" or "content_filter"
    output_tokens: int
    body_hash: str


def answer(world: World, question: Question, provider: str) -> Answer:
    """Return the answer to a question. It is not billed yet.

    Raises ApiError where a rule has the request rejected or too long.
    """
    rule = None
    if world.script.has_rules(Moment.ANSWER):
        rule = world.script.meet(
            Moment.ANSWER, question.endpoint, (question.system, question.prompt), question.custom_id
        )
    body_hash = hash_content(question.body)
    behaviour = None if rule is None else rule.behaviour
    if rule is not None and behaviour is Behaviour.REJECTED:
        raise _rejected(rule.status, provider)
    if behaviour is Behaviour.TOO_LONG:
        raise too_long(provider, 1_000_000, 1_000_001)
    text = _text(world, question, int(body_hash[:16], 16))
    finish = "stop"
    if behaviour is Behaviour.REFUSAL:
        text, finish = "I'm sorry, but I can't help with that.", "refusal"
    elif behaviour is Behaviour.CONTENT_FILTER:
        text, finish = "", "content_filter"
    elif behaviour is Behaviour.EMPTY:
        text = ""
    elif behaviour is Behaviour.INVALID_JSON:
        text = f"Sure! Here is the answer: {text[: max(1, len(text) // 2)]}"
    elif behaviour is Behaviour.WRONG_SHAPE:
        text = '{"unexpected": true}'
    elif behaviour is Behaviour.LENGTH:
        text, finish = text[: len(text) // 2], "length"
    tokens = count_tokens(text)
    if question.max_tokens is not None and tokens > question.max_tokens:
        text, tokens, finish = text[: question.max_tokens * 4], question.max_tokens, "length"
    return Answer(text, finish, tokens, body_hash)


def _text(world: World, question: Question, seed: int) -> str:
    if question.schema is not None:
        key = orjson.dumps(question.schema)
        return world.answers.make(question.schema, key, seed)
    return f'{{"answer": "{make_text(seed)}"}}' if question.wants_json else make_text(seed)


def charge(
    world: World, provider: str, question: Question, given: Answer, *, input_tokens: int,
    cached_tokens: int,
) -> None:  # fmt: skip
    """Bill an answer."""
    world.bill.add(
        Charge(
            provider=provider,
            route="online" if question.batch_id is None else "batch",
            model=question.model,
            body_hash=given.body_hash,
            prompt_hash=hash_content([question.model, question.system, question.prompt]),
            custom_id=question.custom_id,
            batch_id=question.batch_id,
            finish=given.finish,
            input_tokens=input_tokens,
            cached_tokens=cached_tokens,
            output_tokens=given.output_tokens,
        )
    )


def _rejected(status: int, provider: str) -> ApiError:
    message = "The request was rejected, as the rehearsal asked for."
    if status >= 500:
        return ApiError(status, "api_error" if provider == "anthropic" else "server_error", message)
    if status == 429:
        kind = "rate_limit_error" if provider == "anthropic" else "requests"
        return ApiError(status, kind, message, code="rate_limit_exceeded")
    return ApiError(status, "invalid_request_error", message)


def too_long(provider: str, limit: int, tokens: int) -> ApiError:
    """Return the error of a prompt that does not fit the model's window."""
    if provider == "anthropic":
        return ApiError(
            400, "invalid_request_error", f"prompt is too long: {tokens} tokens > {limit} maximum"
        )
    if provider == "google":
        return ApiError(
            400,
            "INVALID_ARGUMENT",
            f"The input token count ({tokens}) exceeds the maximum number of tokens allowed "
            f"({limit}).",
        )
    return ApiError(
        400,
        "invalid_request_error",
        f"This model's maximum context length is {limit} tokens. However, your messages resulted "
        f"in {tokens} tokens. Please reduce the length of the messages.",
        param="messages",
        code="context_length_exceeded",
    )


def find_snapshot(models: Mapping[str, str], model: str) -> str | None:
    """Return the dated snapshot that answers for a model's name, or None if there is no such."""
    if model in models:
        return models[model]
    dated = _DATED.fullmatch(model)
    return model if dated is not None and models.get(dated[1]) == model else None


def new_id(prefix: str) -> str:
    """Return an id that no other object has, also across restarts."""
    return f"{prefix}{_RUN}{next(_NUMBERS):012x}"


def read_json(content: bytes) -> Any:
    """Return the JSON value of a request body, or raise ValueError."""
    return orjson.loads(content)


def json_reply(content: object, status: int = 200, **headers: str) -> web.Response:
    """Return a JSON reply."""
    return web.Response(
        body=orjson.dumps(content), status=status, content_type="application/json", headers=headers
    )


def find_strings(value: object) -> Iterator[str]:
    """Yield every string in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from find_strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from find_strings(each)


def parse_limit(request: web.Request, *, default: int, most: int) -> int:
    """Return the page size that a list call asks for."""
    text = request.query.get("limit", str(default))
    if not text.isdigit() or not 1 <= int(text) <= most:
        raise ApiError(
            400,
            "invalid_request_error",
            f"Invalid 'limit': expected an integer between 1 and {most}, got {text!r}.",
            param="limit",
        )
    return int(text)
