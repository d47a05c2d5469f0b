"""Answers fit their schema, and are always the same for the same seed."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest

from batchsql.emulate.answers import SchemaAnswers


def answers(schema: Any, count: int = 40) -> list[Any]:
    made = SchemaAnswers()
    key = json.dumps(schema).encode()
    return [json.loads(made.make(schema, key, seed)) for seed in range(count)]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "string", "minLength": 30, "maxLength": 31},
        {"type": "string", "maxLength": 3},
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        {"type": "string", "pattern": "^(low|high)$", "maxLength": 3},
        *(
            {"type": "string", "format": name}
            for name in (
                "date", "time", "date-time", "duration", "email", "hostname", "uri", "ipv4",
                "ipv6", "uuid",
            )
        ),
        {"type": "integer", "minimum": 1, "maximum": 5},
        {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 3},
        {"type": "integer", "maximum": -3},
        {"type": "integer", "minimum": 10, "multipleOf": 7},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.05},
        {"type": "number", "multipleOf": 0.5, "maximum": 3},
        {"type": "boolean"},
        {"type": "null"},
        {"type": ["integer", "null"], "minimum": 3},
        {"const": {"a": [1, None]}},
        {"enum": ["a", 2, None]},
        {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
        {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 6}]},
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
        {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 3, "uniqueItems": True},
        {"type": "array", "items": {"type": "string"}, "maxItems": 0},
        {
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"type": "array"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"tree": {"$ref": "#/$defs/tree"}},
            "required": ["tree"],
            "$defs": {
                "tree": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string"},
                        "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
                        "parent": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
                    },
                    "required": ["name", "children", "parent"],
                }
            },
        },
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)  # fmt: skip
def test_answer_fits_the_schema(schema: Any) -> None:
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    for value in answers(schema, 40):
        validator.validate(value)


def test_bounds_in_a_description_are_obeyed() -> None:
    schema = {"type": "integer", "description": "How bad.\n\n{minimum: 2, maximum: 4}"}
    assert set(answers(schema)) == {2, 3, 4}


def test_answers_repeat_and_vary_with_the_seed() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    assert answers(schema) == answers(schema)
    assert len({each["a"] for each in answers(schema)}) > 10
