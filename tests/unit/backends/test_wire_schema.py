from __future__ import annotations

import json
from typing import Any

import pytest

from batchsql.backends.wire_schema import wire_schema, without_filled_nulls
from batchsql.declare.returns import parse_returns

DECLARED: dict[str, Any] = {
    "a": {
        "type": "array",
        "items": {
            "type": "object",
            "nullable": True,
            "properties": {
                "x": {"type": "integer"},
                "y": {"type": ["string", "null"]},
                "minLength": {"type": "string"},
            },
            "required": ["x"],
        },
    }
}


def schema_of(declared: dict[str, Any]) -> dict[str, Any]:
    returns, mistakes = parse_returns(declared)
    assert mistakes == []
    return returns.object_schema()


def nothing(key: str, value: Any) -> bool:
    return False


def test_nothing_moved_leaves_the_schema_as_it_is() -> None:
    schema = schema_of(DECLARED)
    assert wire_schema(schema, nothing, all_required=False) == schema


def test_moved_keywords_are_said_in_the_description_and_names_are_kept() -> None:
    schema = schema_of({**DECLARED, "t": {"type": "string", "minLength": 2}})
    wire = wire_schema(schema, lambda key, _: key == "minLength", all_required=False)
    assert wire["properties"]["t"] == {"type": "string", "description": "minLength: 2"}
    assert '"minLength": {"type": "string"}' in json.dumps(wire)


def test_optional_properties_become_required_ones_that_may_be_null() -> None:
    wire = wire_schema(schema_of(DECLARED), nothing, all_required=True)
    inner = json.dumps(wire["properties"]["a"]["items"])
    assert '"required": ["x", "y", "minLength"]' in inner
    assert '"minLength": {"anyOf": [{"type": "string"}, {"type": "null"}]}' in inner
    assert inner.count('"null"') == 3  # the object's own, y's own, and the new one


@pytest.mark.parametrize(
    ("text", "restored"),
    [
        ('{"a":[{"x":1,"y":null,"minLength":null},null]}', '{"a":[{"x":1,"y":null},null]}'),
        ('{"a":[{"x":null}]}', '{"a":[{"x":null}]}'),
        ('{"a":[{"x":1,"x":2}]}', '{"a":[{"x":1,"x":2}]}'),
        ('{"a":3}', '{"a":3}'),
        ('{"a":["é",{"z":null}]}', '{"a":["é",{"z":null}]}'),
        ("no JSON", "no JSON"),
    ],
)
def test_filled_nulls_are_taken_off(text: str, restored: str) -> None:
    assert without_filled_nulls(text, schema_of(DECLARED)) == restored


def test_an_answer_without_optional_parts_is_not_touched() -> None:
    schema = schema_of({"a": {"type": "number"}})
    assert without_filled_nulls('{"a": 1.0}', schema) == '{"a": 1.0}'
