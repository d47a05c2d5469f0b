"""What Anthropic demands of a Messages request, its schemas for structured output included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from batchsql.emulate.provider import ApiError

_PARAMS = frozenset({
    "max_tokens", "messages", "model", "cache_control", "container", "diagnostics",
    "inference_geo", "metadata", "output_config", "service_tier", "speed", "stop_sequences",
    "stream", "system", "temperature", "thinking", "tool_choice", "tools", "top_k", "top_p",
})  # fmt: skip
_FORBIDDEN = frozenset({
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength",
    "maxLength", "maxItems", "uniqueItems", "contains", "minContains", "maxContains",
    "prefixItems", "minProperties", "maxProperties", "patternProperties", "propertyNames", "oneOf",
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "unevaluatedProperties",
    "unevaluatedItems",
})  # fmt: skip
_FORMATS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "uri", "ipv4", "ipv6", "uuid",
})  # fmt: skip
MAX_OPTIONAL, MAX_UNIONS, MAX_CACHE_MARKS = 24, 16, 4


def invalid(message: str) -> ApiError:
    """Return the error of a malformed request."""
    return ApiError(400, "invalid_request_error", message)


@dataclass(frozen=True, slots=True)
class Block:
    """One text of a prompt, and for how long the prompt up to its end is to be cached."""

    text: str
    is_system: bool
    ttl: str | None


@dataclass(frozen=True, slots=True)
class Messages:
    """What matters of a valid request."""

    model: str
    blocks: list[Block]
    max_tokens: int
    schema: Mapping[str, Any] | None


class MessagesChecker:
    """Checks Messages requests. A schema that was seen before is not checked again."""

    def __init__(self) -> None:
        self._schemas: dict[bytes, str | None] = {}

    def check(self, body: Mapping[str, Any], *, in_batch: bool) -> Messages:
        """Return what matters of a request, or raise ApiError as Anthropic would."""
        for name in body:
            if name not in _PARAMS:
                raise invalid(f"{name}: Extra inputs are not permitted")
        for name in ("model", "max_tokens", "messages"):
            if name not in body:
                raise invalid(f"{name}: Field required")
        if not isinstance(body["model"], str) or not body["model"]:
            raise invalid("model: Input should be a valid string")
        max_tokens = body["max_tokens"]
        if type(max_tokens) is not int:
            raise invalid("max_tokens: Input should be a valid integer")
        if max_tokens < (1 if in_batch else 0):
            least = "1" if in_batch else "0"
            raise invalid(f"max_tokens: Input should be greater than or equal to {least}")
        if in_batch:
            for name in ("stream", "speed"):
                if body.get(name):
                    raise invalid(f"{name}: not supported in batches")
        for name in ("temperature", "top_p"):
            value = body.get(name)
            if value is not None and not (
                isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1
            ):
                raise invalid(f"{name}: Input should be a number from 0 to 1")
        blocks = [*_system(body.get("system")), *_messages(body["messages"])]
        if sum(block.ttl is not None for block in blocks) > MAX_CACHE_MARKS:
            raise invalid(
                f"A maximum of {MAX_CACHE_MARKS} blocks with cache_control may be provided."
            )
        ages = [block.ttl for block in blocks if block.ttl is not None]
        if ages != sorted(ages):  # "1h" before "5m"
            raise invalid(
                "cache_control.ttl: a ttl='1h' block must not come after a ttl='5m' block."
            )
        return Messages(body["model"], blocks, max_tokens, self._schema(body.get("output_config")))

    def _schema(self, config: Any) -> Mapping[str, Any] | None:
        if config is None:
            return None
        if not isinstance(config, dict):
            raise invalid("output_config: Input should be an object")
        for name in config:
            if name not in ("format", "effort"):
                raise invalid(f"output_config.{name}: Extra inputs are not permitted")
        wanted = config.get("format")
        if wanted is None:
            return None
        if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
            raise invalid("output_config.format.type: Input should be 'json_schema'")
        schema = wanted.get("schema")
        if not isinstance(schema, dict):
            raise invalid("output_config.format.schema: Field required")
        for name in wanted:
            if name not in ("type", "schema"):
                raise invalid(f"output_config.format.{name}: Extra inputs are not permitted")
        key = orjson.dumps(schema)
        if key not in self._schemas:
            self._schemas[key] = next(schema_mistakes(schema), None)
        mistake = self._schemas[key]
        if mistake is not None:
            raise invalid(f"output_config.format.schema: {mistake}")
        return schema


def _system(system: Any) -> Iterator[Block]:
    if isinstance(system, str):
        yield Block(system, True, None)
    elif isinstance(system, list):
        yield from _blocks(system, "system", is_system=True)
    elif system is not None:
        raise invalid("system: Input should be a string or a list of text blocks")


def _messages(messages: Any) -> Iterator[Block]:
    if not isinstance(messages, list):
        raise invalid("messages: Input should be a valid list")
    if not messages:
        raise invalid("messages: at least one message is required")
    for number, message in enumerate(messages):
        where = f"messages.{number}"
        if not isinstance(message, dict):
            raise invalid(f"{where}: Input should be an object")
        if message.get("role") not in ("user", "assistant"):
            raise invalid(f"{where}.role: Input should be 'user' or 'assistant'")
        content = message.get("content")
        if isinstance(content, str):
            if not content or (not content.strip() and number < len(messages) - 1):
                raise invalid(f"{where}: all messages must have non-empty content")
            yield Block(content, False, None)
        elif isinstance(content, list) and content:
            yield from _blocks(content, f"{where}.content", is_system=False)
        else:
            raise invalid(f"{where}.content: Field required")
    if messages[0].get("role") != "user":
        raise invalid('messages: first message must use the "user" role')


def _blocks(blocks: list[Any], where: str, *, is_system: bool) -> Iterator[Block]:
    for number, block in enumerate(blocks):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise invalid(f"{where}.{number}.type: Field required")
        if block["type"] != "text":
            continue
        text = block.get("text")
        if not isinstance(text, str):
            raise invalid(f"{where}.{number}.text: Field required")
        if not text.strip():
            raise invalid("messages: text content blocks must contain non-whitespace text")
        yield Block(text, is_system, _ttl(block.get("cache_control"), f"{where}.{number}"))


def _ttl(control: Any, where: str) -> str | None:
    if control is None:
        return None
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        raise invalid(f"{where}.cache_control.type: Input should be 'ephemeral'")
    for name in control:
        if name not in ("type", "ttl"):
            raise invalid(f"{where}.cache_control.{name}: Extra inputs are not permitted")
    ttl: str = control.get("ttl", "5m")
    if ttl not in ("5m", "1h"):
        raise invalid(f"{where}.cache_control.ttl: Input should be '5m' or '1h'")
    return ttl


def schema_mistakes(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield what Anthropic does not accept in a schema for structured output."""
    nodes = list(_walk(schema))
    for node in nodes:
        kind = node.get("type", "unknown")
        found = sorted(_FORBIDDEN & set(node))
        if found:
            yield f"For '{kind}' type, properties {', '.join(found)} are not supported"
        is_object = "properties" in node or kind == "object"
        if is_object and node.get("additionalProperties") is not False:
            yield "For 'object' type, 'additionalProperties' must be explicitly set to false"
        if kind == "array" and node.get("minItems", 0) not in (0, 1):
            yield "For 'array' type, 'minItems' values other than 0 or 1 are not supported"
        if "format" in node and node["format"] not in _FORMATS:
            yield f"String format '{node['format']}' is not supported"
        if any(isinstance(value, (dict, list)) for value in node.get("enum", ())):
            yield "Enum values must be strings, numbers, booleans or null"
        if not {"type", "$ref", "anyOf", "allOf", "enum", "const"} & set(node):
            yield "Schema type is missing"
        reference = node.get("$ref")
        if reference is not None and not str(reference).startswith("#/"):
            yield f"External $ref '{reference}' is not supported"
    if _is_recursive(schema):
        yield "Recursive schemas are not supported"
    optional = sum(
        name not in node.get("required", ())
        for node in nodes
        for name in node.get("properties", {})
    )
    if optional > MAX_OPTIONAL:
        yield f"Schemas contain too many optional parameters ({optional}), limit: {MAX_OPTIONAL}"
    unions = sum("anyOf" in node or isinstance(node.get("type"), list) for node in nodes)
    if unions > MAX_UNIONS:
        yield f"Schemas contain too many union types ({unions}), limit: {MAX_UNIONS}"


def _children(node: Mapping[str, Any]) -> Iterator[Any]:
    for keyword in ("properties", "$defs", "definitions"):
        yield from node.get(keyword, {}).values()
    for keyword in ("anyOf", "allOf"):
        yield from node.get(keyword, ())
    if "items" in node:
        yield node["items"]


def _walk(node: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(node, Mapping):
        yield node
        for child in _children(node):
            yield from _walk(child)


def _is_recursive(schema: Mapping[str, Any]) -> bool:
    """Return whether a definition leads back to itself."""
    if any(node.get("$ref") == "#" for node in _walk(schema)):
        return True
    links = {
        f"#/{keyword}/{name}": {str(each["$ref"]) for each in _walk(child) if "$ref" in each}
        for keyword in ("$defs", "definitions")
        for name, child in schema.get(keyword, {}).items()
    }
    for start in links:
        seen: set[str] = set()
        waiting = list(links[start])
        while waiting:
            each = waiting.pop()
            if each == start:
                return True
            if each not in seen:
                seen.add(each)
                waiting += links.get(each, ())
    return False
