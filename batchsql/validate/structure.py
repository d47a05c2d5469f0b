"""Whether one completion is an answer of the declared shape, and its canonical text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from typing import Any

import jsonschema_rs
import orjson

from batchsql.declare.returns import INT64_MAX, INT64_MIN, Returns, core_schema, is_nullable
from batchsql.types import Completion, FinishReason, Outcome

MAX_RAW_BYTES = 64 * 1024
MAX_SHOWN_CHARS = 100
_MAX_ERROR_CHARS = 400

_FENCE = re.compile(r"```(?:json)?[ \t]*\r?\n(.*?)\r?\n?```", re.DOTALL | re.IGNORECASE)
_DATE_TIME = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt ](\d\d):(\d\d):(\d\d)(?:\.(\d+))?(?:[Zz]|([+-])(\d\d):(\d\d))"
)

_FINISH_OUTCOMES = {
    FinishReason.LENGTH: (Outcome.TRUNCATED, "the model ran into its token limit"),
    FinishReason.REFUSAL: (Outcome.REFUSED, "the model refused to answer"),
    FinishReason.CONTENT_FILTER: (Outcome.FILTERED, "a content filter stopped the answer"),
}


@dataclass(slots=True)
class Verdict:
    """What one completion is worth.

    ``answer`` is set exactly when ``outcome`` is OK: compact JSON, keys in the order of the
    schema, values in the one form that every warehouse casts. Otherwise ``error`` says why in
    words safe to print, and ``raw`` holds the model's text, if there was any, as a JSON string
    literal in ASCII, which any text column can store.
    """

    outcome: Outcome
    answer: str | None = None
    error: str | None = None
    raw: str | None = None


class _BadValueError(Exception):
    """A value that the schema allows but no warehouse can hold."""

    def __init__(self, problem: str, value: object, *path: str | int) -> None:
        super().__init__(problem)
        self.problem = problem
        self.value = value
        self.path = path


_Canonical = Callable[[Any], Any]


class AnswerValidator:
    """Checks completions against one declaration. Safe to share between threads."""

    def __init__(self, returns: Returns, max_answer_bytes: int = 1_000_000) -> None:
        schema = returns.object_schema()
        self._schema: Mapping[str, Any] = schema
        self._validator = jsonschema_rs.validator_for(schema, validate_formats=True)
        self._canonical = _canonical_form(schema)
        self._max_answer_bytes = max_answer_bytes

    def check(self, completion: Completion) -> Verdict:
        """Return the verdict on one completion. Never raises, whatever its text holds.

        White space around the answer and one code fence around the whole of it are taken off;
        nothing else is repaired.
        """
        text = completion.text
        if completion.failure is not None:
            error = completion.error or completion.failure.value
            return Verdict(completion.failure, None, safe_text(error, _MAX_ERROR_CHARS), _raw(text))
        reason = completion.finish_reason
        if reason is not FinishReason.STOP and reason in _FINISH_OUTCOMES:
            outcome, error = _FINISH_OUTCOMES[reason]
            return Verdict(outcome, None, error, _raw(text))
        if text is None or not text.strip():
            return Verdict(Outcome.INVALID, None, "the model's answer is empty", _raw(text))
        try:
            return Verdict(Outcome.OK, self._answer(text))
        except _BadValueError as error:
            message = _describe(error.problem, error.path, error.value)
        except RecursionError:
            message = "the answer is nested too deeply"
        except Exception as error:  # noqa: BLE001  one hostile answer must not end a run
            message = f"the answer cannot be read ({type(error).__name__})"
        return Verdict(Outcome.INVALID, None, message, _raw(text))

    def _answer(self, text: str) -> str:
        if len(text) > self._max_answer_bytes:
            raise _BadValueError(f"the answer has more than {self._max_answer_bytes} bytes", text)
        body = text.strip()
        if body.startswith("```") and (fenced := _FENCE.fullmatch(body)):
            body = fenced[1]
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            problem = f"the answer is not JSON ({error.msg} at character {error.pos})"
            raise _BadValueError(problem, body) from None
        if not isinstance(value, dict):
            raise _BadValueError("the answer is no JSON object", value)
        if not self._validator.is_valid(value):
            raise self._mismatch(value)
        answer = orjson.dumps(self._canonical(value)).decode()
        # orjson keeps the last of two equal keys, which would hide what the model said first. No
        # key stands there twice where there are no more colons than keys.
        if answer != body and body.count(":") != len(value):
            _refuse_duplicate_keys(body)
        if len(answer.encode()) > self._max_answer_bytes:
            raise _BadValueError(f"the answer has more than {self._max_answer_bytes} bytes", text)
        return answer

    def _mismatch(self, value: dict[str, Any]) -> _BadValueError:
        error = next(iter(self._validator.iter_errors(value)))
        path = list(error.instance_path)
        keyword = str(error.schema_path[-1]) if error.schema_path else "schema"
        found: Any = value
        for step in path:
            found = found[step]
        rule: Any = self._schema
        for step in error.schema_path:
            rule = rule[step]
        if keyword == "required" and isinstance(found, dict):
            missing = next(name for name in rule if name not in found)
            return _BadValueError("it is missing", None, *path, missing)
        if keyword == "additionalProperties" and isinstance(found, dict):
            known = error.schema_path[:-1]
            owner: Any = self._schema
            for step in known:
                owner = owner[step]
            extra = next(name for name in found if name not in owner["properties"])
            return _BadValueError("it is not in the schema", found[extra], *path, extra)
        if keyword == "anyOf":
            core = rule[0]
            keyword, rule = ("enum", core["enum"]) if "enum" in core else ("const", core["const"])
        return _BadValueError(f"does not match {keyword} {_shown(rule)}", found, *path)


def safe_text(text: str, max_chars: int) -> str:
    """Return the text in one line of printable characters, cut at ``max_chars``.

    Control characters, terminal escapes, direction marks and lone surrogates are written as
    escapes.
    """
    if len(text) <= max_chars and text.isprintable():
        return text
    safe = "".join(
        char if char.isprintable() else f"\\u{ord(char):04x}" for char in text[: max_chars + 1]
    )
    return safe if len(safe) <= max_chars else f"{safe[: max_chars - 1]}…"


def _shown(value: object) -> str:
    if isinstance(value, str):
        return safe_text(value[: MAX_SHOWN_CHARS + 1], MAX_SHOWN_CHARS)
    return safe_text(json.dumps(value, ensure_ascii=False, default=str), MAX_SHOWN_CHARS)


def _describe(problem: str, path: tuple[str | int, ...], value: object) -> str:
    place = safe_text(".".join(str(step) for step in path), MAX_SHOWN_CHARS)
    where = f"{place}: " if path else ""
    shown = "" if value is None and problem == "it is missing" else f"; got {_shown(value)}"
    return f"{where}{problem}{shown}"


def _raw(text: str | None) -> str | None:
    if not text:
        return None
    literal = json.dumps(text[:MAX_RAW_BYTES])
    if len(text) <= MAX_RAW_BYTES and len(literal) <= MAX_RAW_BYTES:
        return literal
    note = f" [cut: {len(text)} characters in all]"
    kept = text[:MAX_RAW_BYTES]
    while len(literal := json.dumps(kept + note)) > MAX_RAW_BYTES:
        kept = kept[: min(len(kept) - 1, len(kept) * MAX_RAW_BYTES // len(literal))]
    return literal


def _refuse_duplicate_keys(body: str) -> None:
    def refuse(pairs: list[tuple[str, Any]]) -> None:
        names = set()
        for name, value in pairs:
            if name in names:
                raise _BadValueError("the key stands there twice", value, name)
            names.add(name)

    json.loads(body, object_pairs_hook=refuse, parse_int=float)


def _canonical_form(schema: Mapping[str, Any]) -> _Canonical:
    """Return the function that brings a value valid under ``schema`` into its canonical form."""
    core = core_schema(schema)
    form = _FORMS[core["type"]](core)
    if not is_nullable(schema):
        return form
    return lambda value: None if value is None else form(value)


def _string_form(schema: Mapping[str, Any]) -> _Canonical:
    by_format: dict[str, _Canonical] = {"date": _canonical_date, "date-time": _canonical_date_time}
    return by_format.get(schema.get("format", ""), _canonical_text)


def _canonical_text(value: str) -> str:
    if "\0" in value:
        raise _BadValueError("contains a NUL character", value)
    return value


def _canonical_date(value: str) -> str:
    try:
        return date.fromisoformat(value).isoformat()
    except ValueError:
        raise _BadValueError("is no date of the years 1 to 9999", value) from None


def _canonical_date_time(value: str) -> str:
    match = _DATE_TIME.fullmatch(value)
    if match is None:
        raise _BadValueError("is no RFC 3339 time", value)
    *parts, fraction, sign, hours, minutes = match.groups()
    try:
        year, month, day, hour, minute, second = map(int, parts)
        micros = int((fraction or "")[:6].ljust(6, "0"))
        local = datetime(year, month, day, hour, minute, second, micros, tzinfo=timezone.utc)
        offset = timedelta(hours=int(hours or 0), minutes=int(minutes or 0))
        moment = local + offset if sign == "-" else local - offset
    except (ValueError, OverflowError):
        raise _BadValueError("is no time of the years 1 to 9999 in UTC", value) from None
    return f"{moment.replace(tzinfo=None).isoformat()}Z"


def _integer_form(_schema: Mapping[str, Any]) -> _Canonical:
    return _canonical_integer


def _canonical_integer(value: int | float) -> int:
    # Beyond 64 bits orjson reads a float, which is out of range here too.
    if not INT64_MIN <= value <= INT64_MAX:
        raise _BadValueError("does not fit a 64-bit integer", value)
    return int(value)


def _number_form(_schema: Mapping[str, Any]) -> _Canonical:
    return _canonical_number


def _canonical_number(value: int | float) -> int | float:
    if not math.isfinite(value):
        raise _BadValueError("is no finite number", value)
    return value


def _boolean_form(_schema: Mapping[str, Any]) -> _Canonical:
    return bool


def _array_form(schema: Mapping[str, Any]) -> _Canonical:
    item_form = _canonical_form(schema["items"])

    def form(values: list[Any]) -> list[Any]:
        canonical = []
        for index, value in enumerate(values):
            try:
                canonical.append(item_form(value))
            except _BadValueError as error:
                raise _inside(error, index) from None
        return canonical

    return form


def _object_form(schema: Mapping[str, Any]) -> _Canonical:
    forms = [(name, _canonical_form(inner)) for name, inner in schema["properties"].items()]

    def form(values: dict[str, Any]) -> dict[str, Any]:
        canonical = {}
        for name, value_form in forms:
            if name not in values:
                continue
            try:
                canonical[name] = value_form(values[name])
            except _BadValueError as error:
                raise _inside(error, name) from None
        return canonical

    return form


def _inside(error: _BadValueError, step: str | int) -> _BadValueError:
    return _BadValueError(error.problem, error.value, step, *error.path)


_FORMS: Mapping[str, Callable[[Mapping[str, Any]], _Canonical]] = {
    "string": _string_form,
    "integer": _integer_form,
    "number": _number_form,
    "boolean": _boolean_form,
    "array": _array_form,
    "object": _object_form,
}
