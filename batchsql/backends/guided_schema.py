"""The user's schema for llguidance, which holds an engine's model to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_WIRE_NUMBER_LIMIT = 1e15
_WIRE_NUMBER_STEP = 1e-9
_WIRE_INTEGER_LIMIT = 10**18  # llguidance cannot take all of 64 bits


def tightened(schema: Any) -> Any:
    """Return the schema for the wire, without endless numbers.

    A small model can write the digits of an unbounded number up to its token limit. Integers get
    bounds of 18 digits, other numbers nine decimals. Answers are validated against the user's
    schema.
    """
    if isinstance(schema, list):
        return [tightened(inner) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    wire: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("title", "description"):
            continue
        if key in ("items", "anyOf"):
            wire[key] = tightened(value)
        elif key == "properties":
            wire[key] = {name: tightened(inner) for name, inner in value.items()}
        else:
            wire[key] = value
    if "enum" in schema or "const" in schema:
        return wire
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    if "integer" in types:
        for key in _BOUNDS:
            if key in wire:
                wire[key] = max(-_WIRE_INTEGER_LIMIT, min(_WIRE_INTEGER_LIMIT, wire[key]))
        _add_bounds(wire, -_WIRE_INTEGER_LIMIT, _WIRE_INTEGER_LIMIT)
    elif "number" in types and not _has_delicate_bounds(schema):
        _add_bounds(wire, -_WIRE_NUMBER_LIMIT, _WIRE_NUMBER_LIMIT)
        wire["multipleOf"] = _WIRE_NUMBER_STEP
    return wire


def _add_bounds(wire: dict[str, Any], low: float, high: float) -> None:
    if "exclusiveMinimum" not in wire:
        wire.setdefault("minimum", low)
    if "exclusiveMaximum" not in wire:
        wire.setdefault("maximum", high)


def _has_delicate_bounds(schema: Mapping[str, Any]) -> bool:
    """Whether steps of a billionth could leave no number between the user's own bounds."""
    bounds = [schema[key] for key in _BOUNDS if key in schema]
    return any(v != 0 and not 1e-3 <= abs(v) <= _WIRE_NUMBER_LIMIT for v in bounds)
