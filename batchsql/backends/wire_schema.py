"""The user's schema in the dialect that a provider accepts, and its answers brought back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

Schema = Mapping[str, Any]
IsMoved = Callable[[str, Any], bool]
"""Whether a provider refuses a keyword with this value."""


def wire_schema(schema: Schema, is_moved: IsMoved, *, all_required: bool) -> dict[str, Any]:
    """Return the schema for the wire.

    Keywords that the provider refuses go into the description, where the model still reads them.
    With ``all_required`` an optional property becomes a required one that may be null;
    ``without_filled_nulls`` takes such nulls off again.
    """

    def convert(part: Schema) -> dict[str, Any]:
        wire: dict[str, Any] = {}
        moved: dict[str, Any] = {}
        for key, value in part.items():
            if key == "anyOf":
                wire[key] = [convert(option) for option in value]
            elif key == "items":
                wire[key] = convert(value)
            elif key == "properties":
                wire[key] = {name: convert(inner) for name, inner in value.items()}
            elif is_moved(key, value):
                moved[key] = value
            else:
                wire[key] = value
        if moved:
            said = [wire["description"]] if "description" in wire else []
            said += [f"{key}: {json.dumps(value)}" for key, value in moved.items()]
            wire["description"] = "; ".join(said)
        if all_required and "properties" in part:
            for name in _optional(part):
                wire["properties"][name] = _or_null(wire["properties"][name])
            wire["required"] = list(part["properties"])
        return wire

    return convert(schema)


def without_filled_nulls(text: str, schema: Schema) -> str:
    """Return the answer without the nulls of optional properties that may not be null.

    A text that is no plain JSON is returned as it is: judging it is the validator's work.
    """
    if "null" not in text or not _has_optional(schema):
        return text
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        return text
    return json.dumps(_restored(value, schema), ensure_ascii=False, separators=(",", ":"))


def _restored(value: Any, schema: Schema) -> Any:
    if isinstance(value, dict) and (described := _core(schema).get("properties")):
        dropped = {name for name in _optional(_core(schema)) if not _accepts_null(described[name])}
        return {
            name: _restored(inner, described.get(name, {}))
            for name, inner in value.items()
            if inner is not None or name not in dropped
        }
    if isinstance(value, list):
        return [_restored(inner, _core(schema).get("items", {})) for inner in value]
    return value


def _core(schema: Schema) -> Schema:
    core: Schema = schema["anyOf"][0] if "anyOf" in schema else schema
    return core


def _optional(schema: Schema) -> list[str]:
    required = schema.get("required", ())
    return [name for name in schema.get("properties", ()) if name not in required]


def _has_optional(schema: Schema) -> bool:
    core = _core(schema)
    inner = [*core.get("properties", {}).values(), *([core["items"]] if "items" in core else [])]
    return bool(_optional(core)) or any(_has_optional(part) for part in inner)


def _accepts_null(schema: Schema) -> bool:
    kinds = schema.get("type")
    return "anyOf" in schema or kinds == "null" or (isinstance(kinds, list) and "null" in kinds)


def _or_null(wire: dict[str, Any]) -> dict[str, Any]:
    return wire if _accepts_null(wire) else {"anyOf": [wire, {"type": "null"}]}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found
