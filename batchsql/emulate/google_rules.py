"""What Gemini demands of a ``generateContent`` request, and its errors."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from batchsql.emulate.provider import ApiError

MAX_OUTPUT_TOKENS = 65_536
STATUSES: Mapping[int, str] = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
    409: "ABORTED", 429: "RESOURCE_EXHAUSTED", 499: "CANCELLED", 500: "INTERNAL",
    503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED",
}  # fmt: skip
#: The numbers of ``google.rpc.Code``, which stand in the errors of operations and of lines.
CODES: Mapping[str, int] = {
    "CANCELLED": 1, "UNKNOWN": 2, "INVALID_ARGUMENT": 3, "DEADLINE_EXCEEDED": 4, "NOT_FOUND": 5,
    "PERMISSION_DENIED": 7, "RESOURCE_EXHAUSTED": 8, "FAILED_PRECONDITION": 9, "ABORTED": 10,
    "INTERNAL": 13, "UNAVAILABLE": 14, "UNAUTHENTICATED": 16,
}  # fmt: skip
_REQUEST = frozenset({
    "model", "contents", "systemInstruction", "generationConfig", "safetySettings", "tools",
    "toolConfig", "cachedContent", "serviceTier", "store",
})  # fmt: skip
_CONFIG = frozenset({
    "candidateCount", "enableEnhancedCivicAnswers", "frequencyPenalty", "imageConfig", "logprobs",
    "maxOutputTokens", "mediaResolution", "presencePenalty", "responseJsonSchema",
    "responseLogprobs", "responseMimeType", "responseModalities", "responseSchema", "seed",
    "speechConfig", "stopSequences", "temperature", "thinkingConfig", "topK", "topP",
})  # fmt: skip
_THINKING = frozenset({"includeThoughts", "thinkingBudget", "thinkingLevel"})
_THINKING_LEVELS = frozenset({"MINIMAL", "LOW", "MEDIUM", "HIGH"})
_PARTS = frozenset({
    "text", "thought", "thoughtSignature", "inlineData", "fileData", "functionCall",
    "functionResponse", "executableCode", "codeExecutionResult", "videoMetadata",
})  # fmt: skip
_OPENAPI = frozenset({
    "anyOf", "default", "description", "enum", "example", "format", "items", "maxItems",
    "maxLength", "maxProperties", "maximum", "minItems", "minLength", "minProperties", "minimum",
    "nullable", "pattern", "properties", "propertyOrdering", "required", "title", "type",
})  # fmt: skip
#: The keywords of ``responseJsonSchema`` that have an effect; the model ignores the others.
#: https://ai.google.dev/api/generate-content#FIELDS.response_json_schema
JSON_SCHEMA = frozenset({
    "$anchor", "$defs", "$id", "$ref", "additionalProperties", "anyOf", "description", "enum",
    "format", "items", "maxItems", "maximum", "minItems", "minimum", "oneOf", "prefixItems",
    "properties", "propertyOrdering", "required", "title", "type",
})  # fmt: skip
_TYPES = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})
_RANGES: Mapping[str, tuple[type, float, float]] = {
    "temperature": (float, 0, 2), "topP": (float, 0, 1), "topK": (int, 1, 1_000_000),
    "candidateCount": (int, 1, 1), "maxOutputTokens": (int, 1, MAX_OUTPUT_TOKENS),
    "seed": (int, -(2**31), 2**31 - 1), "presencePenalty": (float, -2, 2),
    "frequencyPenalty": (float, -2, 2),
}  # fmt: skip


class GoogleError(ApiError):
    """An error with the ``details`` that Google's errors have."""

    def __init__(
        self, status: int, message: str, *, kind: str | None = None, details: Iterable[Any] = ()
    ) -> None:
        super().__init__(status, kind or STATUSES.get(status, "UNKNOWN"), message)
        self.details = list(details)


class UnknownFieldError(GoogleError):
    """The request does not parse, so that a whole batch with it inline is refused."""


def invalid(message: str, field: str | None = None) -> GoogleError:
    """Return the error of a malformed request."""
    return GoogleError(400, message, details=_violation(message, field))


def detail(kind: str, **fields: Any) -> dict[str, Any]:
    """Return one of an error's details."""
    return {"@type": f"type.googleapis.com/google.rpc.{kind}", **fields}


def _violation(message: str, field: str | None) -> list[Any]:
    if field is None:
        return []
    return [detail("BadRequest", fieldViolations=[{"field": field, "description": message}])]


def read_fields(value: Any, known: Collection[str], where: str) -> dict[str, Any]:
    """Return a message's fields by their camelCase names; Google takes snake_case as well."""
    if not isinstance(value, dict):
        message = f"Invalid value at '{where}' (not a message), {orjson.dumps(value).decode()}"
        raise UnknownFieldError(400, message, details=_violation(message, where))
    found = {}
    for name, content in value.items():
        camel = re.sub(r"_([a-z])", lambda match: match[1].upper(), name)
        if camel not in known:
            at = f" at '{where}'" if where else ""
            message = (
                f'Invalid JSON payload received. Unknown name "{name}"{at}: Cannot find field.'
            )
            raise UnknownFieldError(400, message, details=_violation(message, where))
        found[camel] = content
    return found


@dataclass(frozen=True, slots=True)
class Content:
    """What matters of a valid request. ``schema`` holds only what has an effect."""

    system: str
    prompt: str
    max_tokens: int | None
    schema: Mapping[str, Any] | None
    wants_json: bool


class ContentChecker:
    """Checks requests. A schema that was seen before is not checked again."""

    def __init__(self) -> None:
        self._schemas: dict[bytes, Mapping[str, Any] | GoogleError] = {}

    def check(self, body: Any) -> Content:
        """Return what matters of a request, or raise GoogleError as Gemini would."""
        fields = read_fields(body, _REQUEST, "")
        if not isinstance(fields.get("contents"), list) or not fields["contents"]:
            raise invalid(
                "* GenerateContentRequest.contents: contents is not specified", "contents"
            )
        prompt = []
        for number, content in enumerate(fields["contents"]):
            prompt += _texts(content, f"contents[{number}]")
        system: list[str] = []
        if fields.get("systemInstruction") is not None:
            system = _texts(fields["systemInstruction"], "system_instruction")
        config = read_fields(fields.get("generationConfig") or {}, _CONFIG, "generation_config")
        _check_ranges(config)
        _check_stops(config.get("stopSequences"))
        _check_thinking(config.get("thinkingConfig"))
        schema = self._schema(config)
        return Content(
            "\n".join(system), "\n".join(prompt), config.get("maxOutputTokens"), schema,
            wants_json=config.get("responseMimeType") == "application/json",
        )  # fmt: skip

    def _schema(self, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
        kind = config.get("responseMimeType") or "text/plain"
        if kind not in ("text/plain", "application/json", "text/x.enum"):
            raise _bad_config("response_mime_type", f"unsupported mime type: {kind}")
        given = [name for name in ("responseSchema", "responseJsonSchema") if name in config]
        if not given:
            return None
        if len(given) > 1:
            raise _bad_config(
                "response_json_schema", "only one of response_schema and response_json_schema"
            )
        if kind == "text/plain":
            raise _bad_config(
                "response_schema", "only allowed when response_mime_type is application/json"
            )
        key = orjson.dumps([given[0], config[given[0]]])
        if key not in self._schemas:
            read = _read_openapi if given[0] == "responseSchema" else _read_json_schema
            try:
                self._schemas[key] = read(config[given[0]], f"generation_config.{_snake(given[0])}")
            except GoogleError as error:
                self._schemas[key] = error
        found = self._schemas[key]
        if isinstance(found, GoogleError):
            raise found
        return found


def _bad_config(field: str, problem: str) -> GoogleError:
    return invalid(
        f"* GenerateContentRequest.generation_config.{field}: {problem}",
        f"generation_config.{field}",
    )


def _texts(content: Any, where: str) -> list[str]:
    fields = read_fields(content, {"role", "parts"}, where)
    if fields.get("role", "user") not in ("user", "model"):
        raise invalid("Please use a valid role: user, model.")
    if not isinstance(fields.get("parts"), list) or not fields["parts"]:
        raise invalid(
            f"* GenerateContentRequest.{where}.parts: contents.parts must not be empty.", where
        )
    texts = []
    for number, part in enumerate(fields["parts"]):
        known = read_fields(part, _PARTS, f"{where}.parts[{number}]")
        if not isinstance(known.get("text"), str) or not known["text"]:
            others = sorted(set(known) - {"text"})
            raise invalid(
                f"* GenerateContentRequest.{where}.parts[{number}].data: "
                + (f"the emulator takes text only, not {others[0]}" if others else
                   "required oneof field 'data' must have one initialized field"),
                f"{where}.parts[{number}]",
            )  # fmt: skip
        texts.append(known["text"])
    return texts


def _check_ranges(config: Mapping[str, Any]) -> None:
    for name, (kind, low, high) in _RANGES.items():
        value = config.get(name)
        if value is None:
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or (kind is int and not isinstance(value, int)):
            message = f"Invalid value at 'generation_config.{_snake(name)}', {value!r}"
            raise UnknownFieldError(400, message, details=_violation(message, "generation_config"))
        if not low <= value <= high:
            raise _bad_config(
                _snake(name), f"{_snake(name)} must be in the range [{low:g}, {high:g}]."
            )


def _check_stops(stops: Any) -> None:
    if stops is None:
        return
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise _bad_config("stop_sequences", "a list of strings that are not empty")
    if len(stops) > 5:
        raise _bad_config("stop_sequences", f"at most 5 stop sequences, got {len(stops)}")


def _check_thinking(config: Any) -> None:
    if config is None:
        return
    where = "generation_config.thinking_config"
    fields = read_fields(config, _THINKING, where)
    budget, level = fields.get("thinkingBudget"), fields.get("thinkingLevel")
    if budget is not None and level is not None:
        raise invalid("You can only set only one of thinking budget and thinking level.", where)
    if budget is not None and (type(budget) is not int or not -1 <= budget <= 32_768):
        raise invalid(
            f"The thinking budget {budget} is invalid. Please choose a value up to 32768."
        )
    if level is not None and (not isinstance(level, str) or level.upper() not in _THINKING_LEVELS):
        message = f"Invalid value at '{where}.thinking_level', \"{level}\""
        raise UnknownFieldError(400, message, details=_violation(message, where))


def _read_json_schema(schema: Any, where: str) -> dict[str, Any]:
    """Return what has an effect of a JSON Schema."""
    if not isinstance(schema, dict):
        raise invalid(f"Invalid value at '{where}' (not a schema)", where)
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in _TYPES:
            raise invalid(f"* GenerateContentRequest.{where}.type: unknown type {kind!r}", where)
    _check_required(schema, where)
    if "enum" in schema and not schema["enum"]:
        raise invalid(f"* GenerateContentRequest.{where}.enum: cannot be empty", where)
    if "$ref" in schema and any(not name.startswith("$") for name in schema):
        raise invalid(f"* GenerateContentRequest.{where}: $ref allows no other fields", where)
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name not in JSON_SCHEMA:
            continue
        if name in ("properties", "$defs"):
            found[name] = {
                key: _read_json_schema(inner, f"{where}.{name}[{key}]")
                for key, inner in value.items()
            }
        elif name in ("anyOf", "oneOf", "prefixItems"):
            found["anyOf" if name == "oneOf" else name] = [
                _read_json_schema(inner, f"{where}.{name}[{number}]")
                for number, inner in enumerate(value)
            ]
        elif name == "items":
            found[name] = _read_json_schema(value, f"{where}.items")
        else:
            found[name] = value
    return found


def _read_openapi(schema: Any, where: str) -> dict[str, Any]:
    """Return a ``responseSchema``, an OpenAPI object, as a JSON Schema."""
    fields = read_fields(schema, _OPENAPI, where)
    _check_required(fields, where)
    found = {name: value for name, value in fields.items() if name not in ("nullable", "example")}
    if "type" in fields:
        kind = str(fields["type"]).lower()
        if kind not in _TYPES:
            message = f"Invalid value at '{where}.type', \"{fields['type']}\""
            raise UnknownFieldError(400, message, details=_violation(message, where))
        found["type"] = kind
    if "enum" in fields and not all(isinstance(value, str) for value in fields["enum"]):
        raise invalid(f"* GenerateContentRequest.{where}.enum: only strings", where)
    if "properties" in fields:
        found["properties"] = {
            name: _read_openapi(inner, f"{where}.properties[{name}]")
            for name, inner in fields["properties"].items()
        }
    if "items" in fields:
        found["items"] = _read_openapi(fields["items"], f"{where}.items")
    if "anyOf" in fields:
        found["anyOf"] = [_read_openapi(inner, f"{where}.any_of") for inner in fields["anyOf"]]
    return {"anyOf": [found, {"type": "null"}]} if fields.get("nullable") else found


def _check_required(schema: Mapping[str, Any], where: str) -> None:
    for number, name in enumerate(schema.get("required", ())):
        if name not in schema.get("properties", {}):
            raise invalid(
                f"* GenerateContentRequest.{where}.required[{number}]: property is not defined",
                where,
            )


def _snake(name: str) -> str:
    return re.sub(r"([A-Z])", lambda match: f"_{match[1].lower()}", name)
