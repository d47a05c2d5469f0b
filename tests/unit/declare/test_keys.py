from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsql.declare.keys import (
    RequestKeyer,
    asked_json,
    canonical_json,
    messages_json,
    spec_version,
)
from batchsql.declare.returns import Field, Returns, parse_returns
from batchsql.types import Message, ModelRef, Role
from batchsql.warehouse.shards import parse_messages

MESSAGES = st.lists(
    st.builds(Message, st.sampled_from(list(Role)), st.text(max_size=20)), max_size=5
)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)  # fmt: skip

HI = (Message(Role.USER, "hi"),)


def returns(**fields: Any) -> Returns:
    parsed, mistakes = parse_returns(fields)
    assert mistakes == []
    return parsed


BASE: dict[str, Any] = {
    "model": ModelRef("local", "smollm2"),
    "params": {"temperature": 0, "stop": ["a", "b"]},
    "returns": returns(
        a={"type": "string"},
        b={"type": "integer", "minimum": 1},
        c={
            "type": "object",
            "properties": {"x": {"type": "string"}, "y": {"type": "string"}},
        },
    ),
    "identity": {"weights": "abc"},
}

CHANGES: dict[str, dict[str, Any]] = {
    "provider": {"model": ModelRef("vllm", "smollm2")},
    "model name": {"model": ModelRef("local", "smollm3")},
    "parameter": {"params": {"temperature": 0.5, "stop": ["a", "b"]}},
    "one parameter more": {"params": {"temperature": 0, "stop": ["a", "b"], "seed": None}},
    "one parameter less": {"params": {"temperature": 0}},
    "order of a list": {"params": {"temperature": 0, "stop": ["b", "a"]}},
    "true is not 1": {"params": {"temperature": False, "stop": ["a", "b"]}},
    "text is not a number": {"params": {"temperature": "0", "stop": ["a", "b"]}},
    "identity": {"identity": {"weights": "abd"}},
    "no identity": {"identity": {}},
    "field order": {"returns": Returns(tuple(reversed(BASE["returns"].fields)))},
    "field name": {
        "returns": Returns((Field("z", {"type": "string"}), *BASE["returns"].fields[1:]))
    },
    "hidden": {
        "returns": Returns((Field("a", {"type": "string"}, True), *BASE["returns"].fields[1:]))
    },
    "bound": {
        "returns": returns(
            a={"type": "string"},
            b={"type": "integer", "minimum": 2},
            c={
                "type": "object",
                "properties": {"x": {"type": "string"}, "y": {"type": "string"}},
            },
        )
    },
    "order of properties": {
        "returns": returns(
            a={"type": "string"},
            b={"type": "integer", "minimum": 1},
            c={
                "type": "object",
                "properties": {"y": {"type": "string"}, "x": {"type": "string"}},
                "required": ["x", "y"],
            },
        )
    },
}


def request_key(messages: Any = HI, prefix: Any = (), **changes: Any) -> str:
    spec = {**BASE, **changes}
    keyer = RequestKeyer(
        spec["model"], spec["params"], spec["returns"], spec["identity"], tuple(prefix)
    )
    return keyer.key(messages_json(messages))


def version(**changes: Any) -> str:
    return spec_version(**{**BASE, "template": "{{ x }}", "normalize": "standard", **changes})


@pytest.mark.parametrize("name", CHANGES)
def test_request_key_changes_with(name: str) -> None:
    assert request_key(**CHANGES[name]) != request_key()


@pytest.mark.parametrize("name", CHANGES)
def test_spec_version_changes_with(name: str) -> None:
    assert version(**CHANGES[name]) != version()


@pytest.mark.parametrize("change", [{"template": "{{ y }}"}, {"normalize": "none"}])
def test_spec_version_changes_with_how_rows_are_rendered(change: dict[str, str]) -> None:
    assert version(**change) != version()


@pytest.mark.parametrize(
    "messages",
    [
        (),
        (Message(Role.SYSTEM, "hi"),),
        (Message(Role.USER, "hi "),),
        (Message(Role.USER, "h"), Message(Role.USER, "i")),
        (*HI, *HI),
    ],
)
def test_request_key_changes_with_the_messages(messages: tuple[Message, ...]) -> None:
    assert request_key(messages) != request_key()


def test_all_changes_give_keys_of_their_own() -> None:
    keys = {request_key(**change) for change in CHANGES.values()}
    assert len(keys) == len(CHANGES)


@pytest.mark.parametrize(
    "params",
    [
        {"stop": ["a", "b"], "temperature": 0},
        {"temperature": 0.0, "stop": ["a", "b"]},
        {"temperature": -0.0, "stop": ("a", "b")},
    ],
)
def test_keys_ignore_how_equal_parameters_are_written(params: dict[str, Any]) -> None:
    assert request_key(params=params) == request_key()
    assert version(params=params) == version()


def test_keys_ignore_the_order_of_schema_keywords() -> None:
    fields = BASE["returns"].fields
    turned = Field("b", dict(reversed(list(fields[1].schema.items()))))
    same = Returns((fields[0], turned, fields[2]))
    assert request_key(returns=same) == request_key()


def test_a_property_named_properties_is_one_of_the_users() -> None:
    inner = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "string"}}}
    outer = returns(o={"type": "object", "properties": {"properties": inner}})
    ((_, schema, _),) = asked_json(outer)
    assert isinstance(schema, dict)
    ((name, child),) = schema["properties"]
    assert name == "properties"
    assert [pair[0] for pair in child["properties"]] == ["b", "a"]


@given(MESSAGES, st.data())
def test_request_key_ignores_where_the_prefix_ends(messages: list[Message], data: Any) -> None:
    split = data.draw(st.integers(0, len(messages)))
    assert request_key(messages[split:], messages[:split]) == request_key(messages)


@given(MESSAGES, MESSAGES)
def test_requests_are_equal_exactly_if_their_messages_are(
    one: list[Message], other: list[Message]
) -> None:
    assert (request_key(one) == request_key(other)) == (one == other)


@given(MESSAGES)
def test_stored_messages_are_read_back_and_give_the_same_key(messages: list[Message]) -> None:
    stored = messages_json(messages).decode()
    assert parse_messages(stored) == tuple(messages)
    assert request_key(parse_messages(stored)) == request_key(messages)


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4))
def test_canonical_json_of_any_mapping_reads_back_whatever_its_order(value: dict[str, Any]) -> None:
    text = canonical_json(value)
    assert canonical_json(dict(reversed(list(value.items())))) == text
    assert json.loads(text) == json.loads(json.dumps(value))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, b"0"),
        (-0.0, b"0"),
        (1.5, b"1.5"),
        (1e20, b"100000000000000000000"),
        (10**20, b"100000000000000000000"),
        (-(2**63), b"-9223372036854775808"),
        (-(2**63) - 1, b"-9223372036854775809"),
        (2**64 - 1, b"18446744073709551615"),
        (True, b"true"),
        (None, b"null"),
        (
            {"b": 1, "a": {"d": (1, 2.0), "c": "é\u2028"}},
            '{"a":{"c":"é\u2028","d":[1,2]},"b":1}'.encode(),
        ),
        ({1: "x"}, b'{"1":"x"}'),
    ],
)  # fmt: skip
def test_canonical_json_writes_equal_values_alike(value: Any, expected: bytes) -> None:
    assert canonical_json(value) == expected
