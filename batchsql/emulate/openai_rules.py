"""What OpenAI demands of a chat completion request, its strict schemas included."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from batchsql.emulate.provider import ApiError, find_strings

_PARAMS = frozenset({
    "messages", "model", "audio", "frequency_penalty", "function_call", "functions", "logit_bias",
    "logprobs", "max_completion_tokens", "max_tokens", "metadata", "modalities", "moderation", "n",
    "parallel_tool_calls", "prediction", "presence_penalty", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "reasoning_effort", "response_format",
    "safety_identifier", "seed", "service_tier", "stop", "store", "stream", "stream_options",
    "temperature", "tool_choice", "tools", "top_logprobs", "top_p", "user", "verbosity",
    "web_search_options",
})  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Models that think: they take max_completion_tokens only, and no temperature.
_REASONING = re.compile(r"(o\d|gpt-5|gpt-6)(?!.*chat)")
_RANGES = {"temperature": (0, 2), "top_p": (0, 1), "frequency_penalty": (-2, 2),
           "presence_penalty": (-2, 2)}  # fmt: skip

_SCHEMA_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_FORBIDDEN = frozenset({
    "allOf", "oneOf", "not", "if", "then", "else", "dependentRequired", "dependentSchemas",
    "patternProperties", "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties",
    "unevaluatedItems", "contains", "minContains", "maxContains", "uniqueItems", "prefixItems",
})  # fmt: skip
_FORMATS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid",
})  # fmt: skip
MAX_PROPERTIES, MAX_DEPTH, MAX_ENUM_VALUES, MAX_CHARACTERS = 5_000, 10, 1_000, 120_000


def invalid(message: str, param: str | None, code: str | None = None) -> ApiError:
    """Return the error of a malformed request."""
    return ApiError(400, "invalid_request_error", message, param=param, code=code)


@dataclass(frozen=True, slots=True)
class Chat:
    """What matters of a valid chat request."""

    model: str
    texts: list[str]
    max_tokens: int | None
    schema: Mapping[str, Any] | None
    wants_json: bool


class ChatChecker:
    """Checks chat requests. A response format that was seen before is not checked again."""

    def __init__(self) -> None:
        self._formats: dict[bytes, ApiError | None] = {}

    def check(self, body: Any) -> Chat:
        """Return what matters of a request, or raise ApiError as OpenAI would."""
        if not isinstance(body, Mapping):
            raise invalid("The body of your request must be a JSON object.", None)
        for name in body:
            if name not in _PARAMS:
                raise invalid(f"Unknown parameter: '{name}'.", name, "unknown_parameter")
        for name in ("model", "messages"):
            if name not in body:
                raise invalid(
                    f"Missing required parameter: '{name}'.", name, "missing_required_parameter"
                )
        model = body["model"]
        if not isinstance(model, str) or not model:
            raise invalid("Invalid type for 'model': expected a string.", "model", "invalid_type")
        if body.get("n", 1) not in (1, None):
            raise invalid("The emulator gives one choice; leave 'n' out.", "n", "unsupported_value")
        return Chat(
            model, _check_messages(body["messages"]), _check_numbers(body, model),
            *self._check_format(body.get("response_format"), body["messages"]),
        )  # fmt: skip

    def _check_format(self, wanted: Any, messages: Any) -> tuple[Mapping[str, Any] | None, bool]:
        if wanted is None:
            return None, False
        key = orjson.dumps(wanted)
        if key not in self._formats:
            try:
                _check_response_format(wanted)
                self._formats[key] = None
            except ApiError as error:
                self._formats[key] = error
        known = self._formats[key]
        if known is not None:
            raise ApiError(
                known.status, known.kind, known.message, param=known.param, code=known.code
            )
        if wanted["type"] == "json_object":
            if not any("json" in text.lower() for text in find_strings(messages)):
                raise invalid(
                    "'messages' must contain the word 'json' in some form, to use "
                    "'response_format' of type 'json_object'.",
                    "messages",
                )
            return None, True
        return (wanted["json_schema"]["schema"] if wanted["type"] == "json_schema" else None), False


def _check_messages(messages: Any) -> list[str]:
    """Return the text of each message."""
    if not isinstance(messages, list) or not messages:
        raise invalid(
            "Invalid 'messages': empty array. Expected an array with minimum length 1.",
            "messages", "empty_array",
        )  # fmt: skip
    texts = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, dict):
            raise invalid(f"Invalid type for '{where}': expected an object.", where, "invalid_type")
        if message.get("role") not in _ROLES:
            raise invalid(
                f"Invalid value: '{message.get('role')}'. Supported values are: "
                + ", ".join(f"'{role}'" for role in _ROLES),
                f"{where}.role", "invalid_value",
            )  # fmt: skip
        content = message.get("content")
        if isinstance(content, str):
            texts.append(content)
            continue
        if not isinstance(content, list) or not content:
            raise invalid(
                f"Invalid value for 'content': expected a string, got {content!r}.",
                f"{where}.content", "invalid_type",
            )  # fmt: skip
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                raise invalid("A content part needs a 'type'.", f"{where}.content", "invalid_value")
            if part["type"] == "text" and not isinstance(part.get("text"), str):
                raise invalid("A text part needs a 'text'.", f"{where}.content", "invalid_type")
        texts.append("".join(str(part.get("text", "")) for part in content))
    return texts


def _check_numbers(body: Mapping[str, Any], model: str) -> int | None:
    """Return the cap on the answer's tokens, if there is one."""
    is_reasoning = _REASONING.match(model) is not None
    if is_reasoning and body.get("max_tokens") is not None:
        raise invalid(
            "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
            "'max_completion_tokens' instead.",
            "max_tokens", "unsupported_parameter",
        )  # fmt: skip
    caps = [name for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None]
    if len(caps) == 2:
        raise invalid("Set only one of 'max_tokens' and 'max_completion_tokens'.", "max_tokens")
    for name in caps:
        if type(body[name]) is not int or body[name] < 1:
            raise invalid(
                f"Invalid '{name}': expected an integer of at least 1, got {body[name]!r}.",
                name, "integer_below_min_value",
            )  # fmt: skip
    for name, (least, most) in _RANGES.items():
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise invalid(f"Invalid type for '{name}': expected a number.", name, "invalid_type")
        if not least <= value <= most:
            raise invalid(
                f"Invalid '{name}': expected between {least} and {most}, got {value}.",
                name, "decimal_above_max_value",
            )  # fmt: skip
        if is_reasoning and value != (0 if "penalty" in name else 1):
            raise invalid(
                f"Unsupported value: '{name}' does not support {value} with this model. Only the "
                "default value is supported.",
                name, "unsupported_value",
            )  # fmt: skip
    return body[caps[0]] if caps else None


def _check_response_format(wanted: Any) -> None:
    if not isinstance(wanted, dict) or wanted.get("type") not in (
        "text", "json_object", "json_schema",
    ):  # fmt: skip
        raise invalid(
            "Invalid value for 'response_format.type'. Supported values are: 'text', "
            "'json_object', 'json_schema'.",
            "response_format.type", "invalid_value",
        )  # fmt: skip
    if wanted["type"] != "json_schema":
        return
    content = wanted.get("json_schema")
    if not isinstance(content, dict) or not isinstance(content.get("schema"), dict):
        raise invalid(
            "Missing required parameter: 'response_format.json_schema.schema'.",
            "response_format.json_schema", "missing_required_parameter",
        )  # fmt: skip
    name = content.get("name")
    if not isinstance(name, str) or not _SCHEMA_NAME.fullmatch(name):
        raise invalid(
            f"Invalid 'response_format.json_schema.name': got {name!r}, expected a string that "
            "matches the pattern '^[a-zA-Z0-9_-]+$' with at most 64 characters.",
            "response_format.json_schema.name", "invalid_value",
        )  # fmt: skip
    unknown = set(content) - {"name", "schema", "strict", "description"}
    if unknown:
        raise invalid(
            f"Unknown parameter: 'response_format.json_schema.{sorted(unknown)[0]}'.",
            "response_format.json_schema", "unknown_parameter",
        )  # fmt: skip
    if content.get("strict"):
        for message in strict_mistakes(content["schema"]):
            raise invalid(
                f"Invalid schema for response_format '{name}': {message}",
                "response_format", "invalid_schema",
            )  # fmt: skip


def strict_mistakes(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield what OpenAI's strict mode does not accept in a schema."""
    if schema.get("type") != "object":
        got = schema.get("type")
        yield f"schema must be a JSON Schema of 'type: \"object\"', got 'type: {got!r}'."
    if "anyOf" in schema:
        yield "schema must not have 'anyOf' at the top level."
    nodes = list(_walk(schema, (), 1))
    for node, path, depth in nodes:
        yield from _node_mistakes(node, f"In context={path!r}, ", depth)
    properties = [name for node, _, _ in nodes for name in node.get("properties", {})]
    values = [value for node, _, _ in nodes for value in node.get("enum", ())]
    constants = [node["const"] for node, _, _ in nodes if "const" in node]
    if len(properties) > MAX_PROPERTIES:
        yield f"schema has {len(properties)} properties; the maximum is {MAX_PROPERTIES}."
    if len(values) > MAX_ENUM_VALUES:
        yield f"schema has {len(values)} enum values; the maximum is {MAX_ENUM_VALUES}."
    names = [*properties, *schema.get("$defs", {}), *map(str, values), *map(str, constants)]
    if sum(map(len, names)) > MAX_CHARACTERS:
        yield f"names and values are longer than {MAX_CHARACTERS} characters together."


def _node_mistakes(node: Mapping[str, Any], where: str, depth: int) -> Iterator[str]:
    for keyword in sorted(_FORBIDDEN & set(node)):
        yield f"{where}'{keyword}' is not permitted."
    if depth > MAX_DEPTH and ("properties" in node or "items" in node):
        yield f"{where}the schema is nested more than {MAX_DEPTH} levels deep."
    if "properties" in node or _has_type(node, "object"):
        if node.get("additionalProperties") is not False:
            yield f"{where}'additionalProperties' is required to be supplied and to be false."
        for name in node.get("properties", {}):
            if name not in node.get("required", ()):
                yield (
                    f"{where}'required' is required to be supplied and to be an array including "
                    f"every key in properties. Missing '{name}'."
                )
        for name in node.get("required", ()):
            if name not in node.get("properties", {}):
                yield f"{where}'required' names '{name}', which is not in properties."
    if _has_type(node, "array") and "items" not in node:
        yield f"{where}array schema missing items."
    if "format" in node and node["format"] not in _FORMATS:
        yield f"{where}'{node['format']}' is not a valid format."
    if not {"type", "$ref", "anyOf", "enum", "const"} & set(node):
        yield f"{where}schema must have a 'type' key."


def _has_type(node: Mapping[str, Any], kind: str) -> bool:
    value = node.get("type")
    return kind in value if isinstance(value, list) else value == kind


def _walk(
    node: Any, path: tuple[str, ...], depth: int
) -> Iterator[tuple[Mapping[str, Any], tuple[str, ...], int]]:
    """Yield every schema in a schema, with its path and its depth of nesting."""
    if not isinstance(node, Mapping):
        return
    yield node, path, depth
    for keyword in ("properties", "$defs", "definitions"):
        children = node.get(keyword)
        if isinstance(children, Mapping):
            step = depth + 1 if keyword == "properties" else 1
            for name, child in children.items():
                yield from _walk(child, (*path, keyword, name), step)
    for number, child in enumerate(node.get("anyOf", ())):
        yield from _walk(child, (*path, "anyOf", str(number)), depth)
    if "items" in node:
        yield from _walk(node["items"], (*path, "items"), depth + 1)
