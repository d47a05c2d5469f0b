from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest

from batchsql.declare.returns import ValueKind, parse_returns


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels - 1):
        schema = {"type": "array", "items": schema}
    return schema


GOOD = {
    "text": ({"type": "string"}, {"type": "string"}, ValueKind.TEXT),
    "bounded": (
        {"type": "integer", "minimum": 1, "maximum": 5.0},
        {"type": "integer", "minimum": 1, "maximum": 5},
        ValueKind.INTEGER,
    ),
    "enum_without_type": (
        {"enum": ["a", "b"]},
        {"type": "string", "enum": ["a", "b"]},
        ValueKind.TEXT,
    ),
    "enum_with_null": (
        {"enum": [1, None]},
        {"anyOf": [{"type": "integer", "enum": [1]}, {"type": "null"}]},
        ValueKind.INTEGER,
    ),
    "enum_of_numbers": ({"enum": [1, 1.5]}, {"type": "number", "enum": [1, 1.5]}, ValueKind.NUMBER),
    "const": ({"const": True}, {"type": "boolean", "const": True}, ValueKind.BOOLEAN),
    "type_list": (
        {"type": ["string", "null"], "maxLength": 3},
        {"type": ["string", "null"], "maxLength": 3},
        ValueKind.TEXT,
    ),
    "nullable": (
        {"type": "number", "nullable": True},
        {"type": ["number", "null"]},
        ValueKind.NUMBER,
    ),
    "date": (
        {"type": "string", "format": "date"},
        {"type": "string", "format": "date"},
        ValueKind.DATE,
    ),
    "date_time": (
        {"type": ["null", "string"], "format": "date-time"},
        {"type": ["string", "null"], "format": "date-time"},
        ValueKind.TIMESTAMP,
    ),
    "array": (
        {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        ValueKind.JSON,
    ),
    "object": (
        {"type": "object", "properties": {"a": {"type": "boolean", "title": "A"}}},
        {
            "type": "object",
            "properties": {"a": {"title": "A", "type": "boolean"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        ValueKind.JSON,
    ),
    "deepest": (nested(8), nested(8), ValueKind.JSON),
}


@pytest.mark.parametrize("case", GOOD)
def test_fragment_becomes_standard_schema_and_kind(case: str) -> None:
    declared, schema, kind = GOOD[case]
    returns, mistakes = parse_returns({"x": declared})
    assert mistakes == []
    assert returns.fields[0].schema == schema
    assert returns.fields[0].kind is kind
    jsonschema_rs.meta.validate(returns.object_schema())


BAD: dict[str, tuple[Any, str, str]] = {
    "no_mapping": ("string", "returns.x", "write {type: string}"),
    "no_type": ({}, "returns.x", "no type given"),
    "unknown_type": ({"type": "float"}, "returns.x.type", "one of string, integer"),
    "two_types": ({"type": ["string", "integer"]}, "returns.x.type", "one of string"),
    "only_null": ({"type": ["null"]}, "returns.x.type", "one of string"),
    "unsupported": ({"type": "string", "pattern": "a"}, "returns.x.pattern", "supported: type"),
    "ref": ({"$ref": "#/a"}, "returns.x.$ref", "unsupported schema keyword"),
    "examples": ({"type": "string", "examples": []}, "returns.x.examples", "unsupported"),
    "nested_hidden": (
        {"type": "array", "items": {"type": "string", "hidden": True}},
        "returns.x.items.hidden",
        "move it up",
    ),
    "hidden_text": ({"type": "string", "hidden": "yes"}, "returns.x.hidden", "true or false"),
    "nullable_text": ({"type": "string", "nullable": 1}, "returns.x.nullable", "true or false"),
    "description": ({"type": "string", "description": 1}, "returns.x.description", "text"),
    "misplaced": ({"type": "integer", "minLength": 1}, "returns.x.minLength", "does not apply"),
    "bound_on_enum": ({"enum": ["a"], "maxLength": 1}, "returns.x.maxLength", "remove it"),
    "empty_enum": ({"enum": []}, "returns.x.enum", "at least one value"),
    "null_enum": ({"enum": [None]}, "returns.x.enum", "at least one value"),
    "mixed_enum": ({"enum": ["a", 1]}, "returns.x.enum", "of one type"),
    "bool_int_enum": ({"enum": [True, 1]}, "returns.x.enum", "of one type"),
    "twice": ({"enum": ["a", "a"]}, "returns.x.enum", "twice"),
    "enum_list": ({"enum": [[1]]}, "returns.x.enum", "accepted"),
    "enum_type": ({"type": "integer", "enum": ["a"]}, "returns.x.enum", "type says integer"),
    "enum_nul": ({"enum": ["a\0"]}, "returns.x.enum", "NUL"),
    "enum_nan": ({"enum": [float("nan")]}, "returns.x.enum", "finite"),
    "enum_big": ({"enum": [2**63]}, "returns.x.enum", "64 bits"),
    "enum_const": ({"enum": ["a"], "const": "a"}, "returns.x", "keep one"),
    "min_max": ({"type": "integer", "minimum": 5, "maximum": 1}, "returns.x", "leave no value"),
    "open_integers": (
        {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
        "returns.x",
        "leave no value",
    ),
    "open_numbers": (
        {"type": "number", "minimum": 1, "exclusiveMaximum": 1},
        "returns.x",
        "leave no value",
    ),
    "big_bound": ({"type": "integer", "maximum": 2**63}, "returns.x.maximum", "64 bits"),
    "text_bound": ({"type": "integer", "minimum": "1"}, "returns.x.minimum", "whole number"),
    "bool_bound": ({"type": "number", "minimum": True}, "returns.x.minimum", "finite number"),
    "nan_bound": (
        {"type": "number", "minimum": float("nan")},
        "returns.x.minimum",
        "finite number",
    ),
    "lengths": ({"type": "string", "minLength": 3, "maxLength": 2}, "returns.x", "is above"),
    "negative": ({"type": "string", "minLength": -1}, "returns.x.minLength", "from 0"),
    "format": ({"type": "string", "format": "email"}, "returns.x.format", "date or date-time"),
    "no_items": ({"type": "array"}, "returns.x", "needs items"),
    "no_properties": ({"type": "object"}, "returns.x.properties", "needs properties"),
    "open_object": (
        {
            "type": "object",
            "properties": {"a": {"type": "string"}},
            "additionalProperties": True,
        },
        "returns.x.additionalProperties",
        "only false",
    ),
    "required": (
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["b"]},
        "returns.x.required",
        "'a'",
    ),
    "deep": (nested(9), "returns.x" + ".items" * 8, "at most 8"),
}


@pytest.mark.parametrize("case", BAD)
def test_mistake_names_its_place_and_what_is_accepted(case: str) -> None:
    declared, where, part = BAD[case]
    _, mistakes = parse_returns({"x": declared})
    assert [m.where for m in mistakes] == [where]
    assert part in mistakes[0].message


@pytest.mark.parametrize(
    ("names", "part"),
    [
        (["llm_status"], "reserved"),
        (["LLM_Request_Id"], "reserved"),
        (["__batchsql_x"], "reserved"),
        (["é" * 32], "64 bytes"),
        (["a\0b"], "NUL"),
        (["\ud800"], "surrogate"),
        ([" "], "empty"),
        ([True], "quotes"),
        (["Label", "label"], "when case is ignored"),
    ],
)
def test_output_name_is_refused(names: list[Any], part: str) -> None:
    _, mistakes = parse_returns({name: {"type": "string"} for name in names})
    assert len(mistakes) == 1
    assert part in mistakes[0].message


@pytest.mark.parametrize("raw", [None, {}, [], "category"])
def test_returns_must_be_a_filled_mapping(raw: Any) -> None:
    _, mistakes = parse_returns(raw)
    assert [m.where for m in mistakes] == ["returns"]


def test_all_mistakes_are_reported_at_once() -> None:
    _, mistakes = parse_returns(
        {
            "a": {"type": "string", "pattern": "x", "minLength": -1},
            "b": {"type": "integer", "minimum": "low"},
            "llm_status": {"type": "string"},
        }
    )
    assert [m.where for m in mistakes] == [
        "returns.a.pattern",
        "returns.a.minLength",
        "returns.b.minimum",
        "returns.llm_status",
    ]


def test_all_hidden_is_a_mistake() -> None:
    _, mistakes = parse_returns({"why": {"type": "string", "hidden": True}})
    assert "every output is hidden" in mistakes[0].message


def test_cyclic_fragment_is_a_mistake() -> None:
    cyclic: dict[str, Any] = {"type": "array"}
    cyclic["items"] = cyclic
    _, mistakes = parse_returns({"x": cyclic})
    assert "at most 8" in mistakes[0].message


def test_object_schema_asks_hidden_fields_first() -> None:
    returns, _ = parse_returns(
        {
            "b": {"type": "string", "nullable": True},
            "why": {"type": "string", "hidden": True},
            "a": {"enum": ["x"]},
        }
    )
    schema = returns.object_schema()
    assert list(schema["properties"]) == schema["required"] == ["why", "b", "a"]
    assert schema["additionalProperties"] is False
    assert [field.name for field in returns.visible] == ["b", "a"]
    assert "hidden" not in json.dumps(schema)
    assert "nullable" not in json.dumps(schema)


@pytest.mark.parametrize(
    ("fragment", "tokens"),
    [
        ({"type": "boolean"}, 32),
        ({"type": "string", "maxLength": 200}, 320),
        ({"type": "string"}, 1040),
        ({"type": "integer"}, 32),
        ({"enum": ["x" * 40, "y"]}, 64),
        ({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}}, 48),
        ({"type": "array", "items": {"type": "string"}, "maxItems": 1000}, 16_384),
    ],
)
def test_default_max_tokens_covers_the_longest_answer(
    fragment: dict[str, Any], tokens: int
) -> None:
    returns, mistakes = parse_returns({"v": fragment})
    assert mistakes == []
    assert returns.default_max_tokens() == tokens
