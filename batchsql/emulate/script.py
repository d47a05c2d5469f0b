"""What the emulator does wrong, and when: rules that match requests and name a misbehaviour."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from batchsql.errors import Mistake, SpecError


class Moment(str, Enum):
    """When a misbehaviour is looked for."""

    REQUEST = "request"  # an HTTP request has come in
    BATCH = "batch"  # a batch is being created
    ANSWER = "answer"  # the model answers a request, online or in a batch
    RESULT = "result"  # the answer of a batch is written into its file


class Behaviour(str, Enum):
    """What can go wrong. ``docs/rehearsal.md`` describes each of them."""

    RATE_LIMIT = "rate_limit"
    SERVER_ERROR = "server_error"
    UNAVAILABLE = "unavailable"
    OVERLOADED = "overloaded"
    BAD_KEY = "bad_key"
    NO_CREDIT = "no_credit"
    DROP = "drop"
    LOST_REPLY = "lost_reply"
    SLOW = "slow"
    TRUNCATE = "truncate"
    BAD_GATEWAY = "bad_gateway"
    REDIRECT = "redirect"

    EXPIRE = "expire"
    FAIL_VALIDATION = "fail_validation"
    QUEUE_FULL = "queue_full"
    SHUFFLE = "shuffle"
    ERRORS_ONLY = "errors_only"
    CANCEL_HANGS = "cancel_hangs"
    FOREIGN_URL = "foreign_url"

    REFUSAL = "refusal"
    LENGTH = "length"
    CONTENT_FILTER = "content_filter"
    EMPTY = "empty"
    INVALID_JSON = "invalid_json"
    WRONG_SHAPE = "wrong_shape"
    REJECTED = "rejected"
    TOO_LONG = "too_long"

    MISSING = "missing"
    DUPLICATE = "duplicate"
    ERROR_IN_OUTPUT = "error_in_output"

    @property
    def moment(self) -> Moment:
        """When this misbehaviour happens."""
        return _MOMENTS[self]


_BY_MOMENT = {
    Moment.REQUEST: (
        Behaviour.RATE_LIMIT, Behaviour.SERVER_ERROR, Behaviour.UNAVAILABLE, Behaviour.OVERLOADED,
        Behaviour.BAD_KEY, Behaviour.NO_CREDIT, Behaviour.DROP, Behaviour.LOST_REPLY,
        Behaviour.SLOW, Behaviour.TRUNCATE, Behaviour.BAD_GATEWAY, Behaviour.REDIRECT,
    ),
    Moment.BATCH: (
        Behaviour.EXPIRE, Behaviour.FAIL_VALIDATION, Behaviour.QUEUE_FULL, Behaviour.SHUFFLE,
        Behaviour.ERRORS_ONLY, Behaviour.CANCEL_HANGS, Behaviour.FOREIGN_URL,
    ),
    Moment.ANSWER: (
        Behaviour.REFUSAL, Behaviour.LENGTH, Behaviour.CONTENT_FILTER, Behaviour.EMPTY,
        Behaviour.INVALID_JSON, Behaviour.WRONG_SHAPE, Behaviour.REJECTED, Behaviour.TOO_LONG,
    ),
    Moment.RESULT: (Behaviour.MISSING, Behaviour.DUPLICATE, Behaviour.ERROR_IN_OUTPUT),
}  # fmt: skip
_MOMENTS = {behaviour: moment for moment, group in _BY_MOMENT.items() for behaviour in group}


class Rule(BaseModel):
    """One misbehaviour and the requests it meets.

    A request matches when every condition given holds. Of the matching ones the first ``skip``
    pass unharmed; then every ``every``-th is met, until ``count`` have been.

    ``endpoint`` is a pattern over the names that the emulator gives its operations, such as
    ``openai.chat``, ``anthropic.batches.create`` or ``*.batches.*``. ``text`` is looked for in the
    prompt, and for other requests in the body.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    behaviour: Behaviour
    endpoint: str | None = None
    text: str | None = None
    custom_id: str | None = None
    skip: int = Field(default=0, ge=0)
    every: int = Field(default=1, ge=1)
    count: int | None = Field(default=None, ge=1)

    #: rate_limit, overloaded, unavailable: the seconds in the reply's ``retry-after``.
    retry_after: float | None = Field(default=None, ge=0)
    #: slow: reply after so many seconds; without it, when the emulator is told to release.
    seconds: float | None = Field(default=None, ge=0)
    #: expire: the share of lines that finish; truncate: the share of bytes that are sent.
    fraction: float = Field(default=0.5, ge=0, le=1)
    #: rejected, error_in_output: the status of the line.
    status: int = Field(default=400, ge=400, le=599)
    #: fail_validation: the code in the batch's errors.
    code: str | None = None

    def matches(self, endpoint: str, texts: Sequence[str], custom_id: str | None) -> bool:
        """Return whether the conditions hold, the counting aside."""
        return (
            (self.endpoint is None or fnmatchcase(endpoint, self.endpoint))
            and (self.custom_id is None or self.custom_id == custom_id)
            and (self.text is None or any(self.text in each for each in texts))
        )


class Script:
    """The rules in force, with their counts. The first rule that meets a request decides."""

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self._rules: dict[Moment, list[list[Any]]] = {moment: [] for moment in Moment}
        self.add(*rules)

    def add(self, *rules: Rule) -> None:
        """Add rules behind those in force."""
        for rule in rules:
            self._rules[rule.behaviour.moment].append([rule, 0, 0])

    def clear(self) -> None:
        """Behave from now on."""
        for rules in self._rules.values():
            rules.clear()

    def has_rules(self, moment: Moment) -> bool:
        """Return whether anything can go wrong at a moment."""
        return bool(self._rules[moment])

    def meet(
        self, moment: Moment, endpoint: str, texts: Sequence[str] = (), custom_id: str | None = None
    ) -> Rule | None:
        """Return the rule that meets a request, and count it."""
        for entry in self._rules[moment]:
            rule, seen, met = entry
            if not rule.matches(endpoint, texts, custom_id):
                continue
            entry[1] = seen + 1
            is_due = seen >= rule.skip and (seen - rule.skip) % rule.every == 0
            if is_due and (rule.count is None or met < rule.count):
                entry[2] = met + 1
                found: Rule = rule
                return found
        return None


def parse_rules(document: object, subject: str) -> list[Rule]:
    """Return the rules in a parsed YAML or JSON document: a list of mappings.

    Raises SpecError with every mistake.
    """
    if not isinstance(document, list):
        message = "write a list of mappings, each with a behaviour"
        raise SpecError(subject, [Mistake("rules", message)], "rules")
    rules: list[Rule] = []
    mistakes: list[Mistake] = []
    for number, entry in enumerate(document, start=1):
        try:
            rules.append(Rule.model_validate(entry))
        except ValidationError as error:
            for each in error.errors():
                where = ".".join(map(str, each["loc"])) or "rule"
                mistakes.append(Mistake(f"rule {number}, {where}", _explain(where, each)))
    if mistakes:
        raise SpecError(subject, mistakes, "rules")
    return rules


def _explain(where: str, problem: Any) -> str:
    behaviours = f"the behaviours are: {', '.join(each.value for each in Behaviour)}"
    if problem["type"] == "extra_forbidden":
        return f"a rule has nothing of that name; it takes: {', '.join(Rule.model_fields)}"
    if problem["type"] == "missing":
        return f"is missing; {behaviours}"
    got = f"got {problem['input']!r}"
    if where == "behaviour":
        return f"{got}; {behaviours}"
    return f"{got}: {problem['msg']}"


def check_endpoints(rules: Iterable[Rule], operations: Iterable[str]) -> None:
    """Look for rules that meet no operation, ever.

    Raises SpecError with every mistake.
    """
    known = sorted(operations)
    mistakes = [
        Mistake(
            f"{rule.behaviour.value}, endpoint",
            f"no operation is called {rule.endpoint!r}; the operations are: {', '.join(known)}",
        )
        for rule in rules
        if rule.endpoint is not None and not any(fnmatchcase(name, rule.endpoint) for name in known)
    ]
    if mistakes:
        raise SpecError("rules", mistakes, "rules")


def read_rules(option: str) -> list[Rule]:
    """Return the rules of one ``--misbehave`` option.

    The option is a YAML file of rules, or one rule in short: a behaviour followed by
    ``condition=value`` pairs.

    >>> read_rules("rate_limit endpoint=openai.chat count=2 retry_after=1")[0].count
    2
    """
    if Path(option).suffix in (".yml", ".yaml"):
        try:
            content = yaml.safe_load(Path(option).read_text(encoding="utf-8"))
        except OSError as error:
            raise SpecError(
                option, [Mistake("file", f"cannot be read: {error}")], "rules"
            ) from error
        except yaml.YAMLError as error:
            raise SpecError(option, [Mistake("file", f"is not YAML: {error}")], "rules") from error
        return parse_rules(content, option)
    try:
        behaviour, *pairs = shlex.split(option)
    except ValueError as error:
        raise SpecError(option, [Mistake("rule", f"cannot be read: {error}")], "rules") from error
    entry: dict[str, str] = {"behaviour": behaviour}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise SpecError(option, [Mistake(pair, "write condition=value")], "rules")
        entry[name] = value
    return parse_rules([entry], option)
