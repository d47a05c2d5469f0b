"""Keys of fixed questions. A key that changes makes every user pay again.

If one of these has to change, ``KEY_RECIPE`` must too, and stored requests be re-keyed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from batchsql.declare.keys import RequestKeyer, messages_json, spec_version
from batchsql.declare.returns import Returns, parse_returns
from batchsql.types import Message, ModelRef, Role
from tests.support.golden import assert_golden
from tests.support.sessions import Open, duckdb_sessions, postgres_sessions

FOLDER = Path(__file__).parent

SPECS: Mapping[str, Mapping[str, Any]] = {
    "smallest": {"returns": {"category": {"enum": ["billing", "bug"]}}},
    "full": {
        "model": ModelRef("openai_compatible", "qwen/qwen3:8b"),
        "template": "system:\nYou label.\nuser:\n{{ body }} ü\n",
        "params": {"temperature": 0.0, "top_p": 0.95, "stop": ["\n"], "seed": 7},
        "returns": {
            "why": {"type": "string", "maxLength": 200, "hidden": True},
            "urgency": {"type": "integer", "minimum": 1, "maximum": 5, "nullable": True},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
            "at": {"type": "object", "properties": {"b": {"type": "string"}, "a": {"const": 1}}},
        },
        "normalize": "whitespace",
        "identity": {"endpoint": "http://localhost:8000/v1"},
    },
}

MESSAGES: Mapping[str, Sequence[Message]] = {
    "user": (Message(Role.USER, "What is it?"),),
    "chat": (
        Message(Role.SYSTEM, "You label."),
        Message(Role.USER, 'odd: \\ " / \x00 \x7f \u2028 é 😀 </script>\n\ttab'),
        Message(Role.ASSISTANT, "{}"),
        Message(Role.USER, "שלום"),
    ),
}

ROWS: Mapping[str, Mapping[str, str]] = {
    "texts": {
        "duckdb": "select 'it''s' as body, 'é 😀' as \"Sub ject\", '' as empty, "
        "null::varchar as gone",
        "postgres": "select 'it''s' as body, 'é 😀' as \"Sub ject\", '' as empty, "
        "null::text as gone",
    },
    "numbers": {
        "duckdb": "select 7 as n, 1.50::decimal(10,2) as price, 0.1::double as f, "
        "-0.0::double as z, true as b",
        "postgres": "select 7 as n, 1.50::numeric as price, 0.1::float8 as f, "
        "'-0'::float8 as z, true as b",
    },
    "times": {
        "duckdb": "select date '2024-02-29' as d, timestamp '2024-02-29 12:00:00.5' as t, "
        "'2024-02-29 12:00:00+05:30'::timestamptz as z, 'infinity'::date as i",
        "postgres": "select date '2024-02-29' as d, timestamp '2024-02-29 12:00:00.5' as t, "
        "'2024-02-29 12:00:00+05:30'::timestamptz as z, 'infinity'::date as i",
    },
    "nested": {
        "duckdb": "select ['a', null] as l, {'a': 1} as s, '{\"b\": 1.50}'::json as j, "
        "'\\xDE'::blob as x",
        "postgres": "select array['a', null] as l, array[1.5]::float8[] as s, "
        "'{\"b\": 1.50}'::jsonb as j, '\\xde'::bytea as x, '[1,5]'::int4range as r",
    },
}  # fmt: skip


def _spec(declared: Mapping[str, Any]) -> dict[str, Any]:
    returns, mistakes = parse_returns(declared["returns"])
    assert mistakes == []
    return {
        "model": declared.get("model", ModelRef("local", "smollm2")),
        "template": declared.get("template", "{{ body }}"),
        "params": declared.get("params", {}),
        "returns": returns,
        "normalize": declared.get("normalize", "standard"),
        "identity": declared.get("identity", {}),
    }


def test_spec_versions_and_request_keys_stay() -> None:
    found: dict[str, Any] = {}
    for name, declared in SPECS.items():
        spec = _spec(declared)
        returns: Returns = spec["returns"]
        keyer = RequestKeyer(spec["model"], spec["params"], returns, spec["identity"], ())
        found[name] = {
            "spec_version": spec_version(**spec),
            "request_keys": {
                label: keyer.key(messages_json(messages)) for label, messages in MESSAGES.items()
            },
        }
    assert_golden(FOLDER / "request_keys.json", found)


@pytest.mark.parametrize("warehouse", ["duckdb", "postgres"])
def test_item_keys_stay(warehouse: str, request: pytest.FixtureRequest) -> None:
    def keys(open_: Open) -> dict[str, str]:
        session = open_({})
        return {name: session.keys(selects[warehouse])[0] for name, selects in ROWS.items()}

    if warehouse == "duckdb":
        with duckdb_sessions() as open_:
            found = keys(open_)
    else:
        with postgres_sessions(request.getfixturevalue("postgres_uri")) as open_:
            found = keys(open_)
    assert_golden(FOLDER / f"item_keys_{warehouse}.json", found)
