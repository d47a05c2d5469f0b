"""What the user declares under ``returns``: the answer's fields and their JSON Schema."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from batchsql.errors import Mistake

Schema = Mapping[str, Any]

MAX_NAME_BYTES = 63  # PostgreSQL silently cuts longer column names
MAX_DEPTH = 8
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
RESERVED_NAMES = frozenset({"llm_status", "llm_request_id"})
RESERVED_PREFIX = "__batchsql"

_TYPES = ("string", "integer", "number", "boolean", "array", "object")
_FORMATS = ("date", "date-time")
_KEYWORDS_BY_TYPE: Mapping[str, tuple[str, ...]] = {
    "string": ("minLength", "maxLength", "format"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "boolean": (),
    "array": ("items", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties"),
}
_GENERAL_KEYWORDS = ("type", "nullable", "enum", "const", "description", "title")
_TYPED_KEYWORDS = tuple(dict.fromkeys(k for ks in _KEYWORDS_BY_TYPE.values() for k in ks))
SUPPORTED_KEYWORDS = _GENERAL_KEYWORDS + _TYPED_KEYWORDS

_UNBOUNDED_STRING_TOKENS = 1024
_UNBOUNDED_ITEMS = 16
_MIN_TOKENS, _MAX_TOKENS, _TOKEN_STEP = 32, 16_384, 16


class ValueKind(str, Enum):
    """What kind of value a field holds; a warehouse maps each kind to a column type."""

    TEXT = "text"
    INTEGER = "integer"
    NUMBER = "number"
    BOOLEAN = "boolean"
    DATE = "date"
    TIMESTAMP = "timestamp"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Field:
    """One output: its name, its standard JSON Schema, and whether it is kept from the table."""

    name: str
    schema: Schema
    hidden: bool = False

    @property
    def kind(self) -> ValueKind:
        """The kind of the field's values, null aside."""
        core = core_schema(self.schema)
        if core["type"] == "string":
            by_format = {"date": ValueKind.DATE, "date-time": ValueKind.TIMESTAMP}
            return by_format.get(core.get("format", ""), ValueKind.TEXT)
        return _KINDS[core["type"]]


@dataclass(frozen=True, slots=True)
class Returns:
    """All outputs in the order in which they are declared."""

    fields: tuple[Field, ...]

    @property
    def visible(self) -> tuple[Field, ...]:
        """The fields that become columns, in declared order."""
        return tuple(field for field in self.fields if not field.hidden)

    @property
    def asked(self) -> tuple[Field, ...]:
        """All fields in the order in which the model answers them, hidden ones first.

        A model writes from left to right, so a hidden reasoning field helps only what follows it.
        """
        return tuple(sorted(self.fields, key=lambda field: not field.hidden))

    def object_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the whole answer, in standard keywords only."""
        return {
            "type": "object",
            "properties": {field.name: dict(field.schema) for field in self.asked},
            "required": [field.name for field in self.asked],
            "additionalProperties": False,
        }

    def default_max_tokens(self) -> int:
        """Return how many tokens an answer can need, counting a token for each character.

        A multiple of 16 between 32 and 16,384. Where the schema sets no bound, a usual size is
        assumed: 1,024 tokens for a string, 16 items for an array.
        """
        tokens = -(-_answer_size(self.object_schema()) // _TOKEN_STEP) * _TOKEN_STEP
        return max(_MIN_TOKENS, min(_MAX_TOKENS, tokens))


def core_schema(schema: Schema) -> Schema:
    """Return a parsed schema with the null alternative taken off: ``type`` is one plain name."""
    if "anyOf" in schema:
        core: Schema = schema["anyOf"][0]
        return core
    if isinstance(schema["type"], list):
        return {**schema, "type": schema["type"][0]}
    return schema


def is_nullable(schema: Schema) -> bool:
    """Return whether a parsed schema accepts null."""
    return "anyOf" in schema or isinstance(schema["type"], list)


def parse_returns(raw: object, where: str = "returns") -> tuple[Returns, list[Mistake]]:
    """Parse a declared ``returns`` and report every mistake in it, not only the first.

    The fields hold standard JSON Schema: ``hidden`` and ``nullable`` are folded away, every enum
    has a type, and every object names its required properties and closes itself. An output with
    mistakes is left out, so the result is to be used only when the list is empty.
    """
    if not isinstance(raw, Mapping) or not raw:
        return Returns(()), [
            Mistake(
                where,
                f"got {_show(raw)}; it must map at least one output name to a JSON Schema "
                "fragment, such as {category: {enum: [a, b]}}",
            )
        ]
    mistakes: list[Mistake] = []
    fields: list[Field] = []
    seen: dict[str, str] = {}
    for name, fragment in raw.items():
        found = _name_mistakes(name, f"{where}.{_label(name)}", seen)
        field, more = _parse_field(str(name), fragment, f"{where}.{_label(name)}")
        mistakes += found + more
        if field is not None and not found and not more:
            fields.append(field)
    hidden = [f for f in raw.values() if isinstance(f, Mapping) and f.get("hidden") is True]
    if len(hidden) == len(raw):
        mistakes.append(
            Mistake(where, "every output is hidden; leave at least one without `hidden: true`")
        )
    return Returns(tuple(fields)), mistakes


def _name_mistakes(name: object, where: str, seen: dict[str, str]) -> list[Mistake]:
    if not isinstance(name, str):
        return [Mistake(where, f"the output name {_show(name)} is no text; put it in quotes")]
    problem = _text_problem(name)
    if not name.strip():
        problem = "is empty; give the column a name"
    elif problem is None and len(name.encode()) > MAX_NAME_BYTES:
        problem = f"has {len(name.encode())} bytes; at most {MAX_NAME_BYTES} fit a column name"
    elif name.lower() in RESERVED_NAMES or name.lower().startswith(RESERVED_PREFIX):
        problem = (
            f"is reserved: {', '.join(sorted(RESERVED_NAMES))} and names that start with "
            f"{RESERVED_PREFIX} are batchsql's own; choose another name"
        )
    elif name.lower() in seen:
        problem = (
            f"equals {_show(seen[name.lower()])} when case is ignored, as DuckDB does; rename one"
        )
    seen.setdefault(name.lower(), name)
    return [] if problem is None else [Mistake(where, f"the output name {_show(name)} {problem}")]


def _parse_field(name: str, fragment: object, where: str) -> tuple[Field | None, list[Mistake]]:
    if not isinstance(fragment, Mapping):
        return None, [_not_a_schema(fragment, where)]
    rest = {key: value for key, value in fragment.items() if key != "hidden"}
    hidden = fragment.get("hidden", False)
    schema, mistakes = _parse_schema(rest, where, 1)
    if not isinstance(hidden, bool):
        message = f"got {_show(hidden)}; accepted: true or false"
        mistakes = [Mistake(f"{where}.hidden", message), *mistakes]
    return (Field(name, schema, hidden is True) if schema is not None else None), mistakes


def _not_a_schema(fragment: object, where: str) -> Mistake:
    hint = (
        f"write {{type: {fragment}}}"
        if isinstance(fragment, str) and fragment in _TYPES
        else "write a JSON Schema fragment, such as {type: string, maxLength: 200}"
    )
    return Mistake(where, f"got {_show(fragment)}, which is no mapping; {hint}")


def _parse_schema(
    fragment: object, where: str, depth: int
) -> tuple[dict[str, Any] | None, list[Mistake]]:
    """Return the fragment as standard JSON Schema, or None beside the reasons why not."""
    if not isinstance(fragment, Mapping):
        return None, [_not_a_schema(fragment, where)]
    if depth > MAX_DEPTH:
        return None, [
            Mistake(where, f"nested {depth} levels deep; at most {MAX_DEPTH}: flatten the answer")
        ]
    mistakes = [_unsupported(key, where) for key in fragment if key not in SUPPORTED_KEYWORDS]
    notes: dict[str, Any] = {}
    for key in ("title", "description"):
        if key in fragment:
            notes[key] = fragment[key]
            if not isinstance(fragment[key], str):
                mistakes.append(_wrong(fragment, key, where, "text"))
            elif _text_problem(fragment[key]):
                mistakes.append(Mistake(f"{where}.{key}", f"it {_text_problem(fragment[key])}"))

    type_name, nullable, found = _parse_type(fragment, where)
    mistakes += found
    values, values_nullable, found = _parse_values(fragment, type_name, where)
    mistakes += found
    if type_name is None and not found and values:
        type_name = _type_of_values(values)
    if type_name is None:
        if not mistakes:
            message = f"no type given; add type (one of {', '.join(_TYPES)}), enum or const"
            mistakes.append(Mistake(where, message))
        return None, mistakes

    body: dict[str, Any] = {"type": type_name}
    misplaced = [
        key
        for key in fragment
        if key in _TYPED_KEYWORDS and (values or key not in _KEYWORDS_BY_TYPE[type_name])
    ]
    for key in misplaced:
        reason = (
            "enum and const already name every value; remove it"
            if values
            else f"does not apply to type {type_name}, which takes: "
            f"{', '.join(_KEYWORDS_BY_TYPE[type_name]) or 'no bounds'}"
        )
        mistakes.append(Mistake(f"{where}.{key}", f"got {_show(fragment[key])}; {reason}"))
    if values:
        body |= {"const": values[0]} if "const" in fragment else {"enum": values}
    elif not misplaced:
        more, found = _PARSERS[type_name](fragment, where, depth)
        body |= more
        mistakes += found
    if mistakes:
        return None, mistakes
    if nullable or values_nullable:
        if values:
            return {**notes, "anyOf": [body, {"type": "null"}]}, []
        body["type"] = [type_name, "null"]
    return {**notes, **body}, []


def _parse_type(fragment: Schema, where: str) -> tuple[str | None, bool, list[Mistake]]:
    mistakes = []
    nullable = fragment.get("nullable", False)
    if not isinstance(nullable, bool):
        mistakes.append(_wrong(fragment, "nullable", where, "true or false"))
    if "type" not in fragment:
        return None, nullable is True, mistakes
    declared = fragment["type"]
    names = declared if isinstance(declared, list) else [declared]
    real = [name for name in names if name != "null"]
    if len(real) != 1 or len(names) > 2 or real[0] not in _TYPES:
        accepted = f"one of {', '.join(_TYPES)}, or a list of one of them and 'null'"
        mistakes.append(_wrong(fragment, "type", where, accepted))
        return None, False, mistakes
    return real[0], nullable is True or "null" in names, mistakes


def _parse_values(
    fragment: Schema, type_name: str | None, where: str
) -> tuple[list[Any], bool, list[Mistake]]:
    """Return the values of ``enum`` or ``const`` without null, and whether null is one of them."""
    if "enum" in fragment and "const" in fragment:
        return [], False, [Mistake(where, "enum and const stand side by side; keep one of them")]
    key = "enum" if "enum" in fragment else "const"
    if key not in fragment:
        return [], False, []
    accepted = "texts, integers, numbers or booleans"
    declared = fragment[key] if key == "enum" else [fragment[key]]
    if not isinstance(declared, list):
        return [], False, [_wrong(fragment, key, where, f"a list of {accepted}")]
    values = [value for value in declared if value is not None]
    if not values:
        return [], False, [_wrong(fragment, key, where, f"at least one value among {accepted}")]
    mistakes = []
    for value in values:
        if not isinstance(value, (str, int, float)):
            mistakes.append(Mistake(f"{where}.{key}", f"got {_show(value)}; accepted: {accepted}"))
        elif isinstance(value, str) and _text_problem(value):
            mistakes.append(Mistake(f"{where}.{key}", f"{_show(value)} {_text_problem(value)}"))
        elif isinstance(value, float) and not math.isfinite(value):
            mistakes.append(Mistake(f"{where}.{key}", f"got {value}; accepted: finite numbers"))
        elif isinstance(value, int) and not INT64_MIN <= value <= INT64_MAX:
            mistakes.append(Mistake(f"{where}.{key}", f"got {value}; it does not fit 64 bits"))
    if mistakes:
        return [], False, mistakes
    found = _type_of_values(values)
    if found is None:
        message = f"got {_show(declared)}; the values must be of one type beside null"
        return [], False, [Mistake(f"{where}.{key}", message)]
    if type_name is not None and found != type_name and (found, type_name) != ("integer", "number"):
        message = f"got {_show(declared)}, which are of type {found}; the type says {type_name}"
        return [], False, [Mistake(f"{where}.{key}", message)]
    if len(set(values)) < len(values):
        message = f"got {_show(declared)}; a value stands there twice: remove one"
        return [], False, [Mistake(f"{where}.{key}", message)]
    return values, len(values) < len(declared), []


def _type_of_values(values: list[Any]) -> str | None:
    kinds = {type(value) for value in values}
    if kinds == {int, float}:
        return "number"
    names = {str: "string", bool: "boolean", int: "integer", float: "number"}
    return names[kinds.pop()] if len(kinds) == 1 else None


_Parsed = tuple[dict[str, Any], list[Mistake]]


def _parse_string(fragment: Schema, where: str, _depth: int) -> _Parsed:
    if "format" not in fragment:
        return _parse_counts(fragment, "minLength", "maxLength", where)
    mistakes = []
    if fragment["format"] not in _FORMATS:
        mistakes.append(_wrong(fragment, "format", where, " or ".join(_FORMATS)))
    mistakes += [
        Mistake(
            f"{where}.{key}", f"got {_show(fragment[key])}; a format has its own length: remove it"
        )
        for key in ("minLength", "maxLength")
        if key in fragment
    ]
    return {"format": fragment["format"]}, mistakes


def _parse_counts(fragment: Schema, low_key: str, high_key: str, where: str) -> _Parsed:
    body: dict[str, Any] = {}
    mistakes = []
    for key in (low_key, high_key):
        if key not in fragment:
            continue
        value = fragment[key]
        if type(value) is not int or not 0 <= value <= 2**31 - 1:
            mistakes.append(_wrong(fragment, key, where, "a whole number from 0 to 2147483647"))
        else:
            body[key] = value
    if body.get(low_key, 0) > body.get(high_key, math.inf):
        mistakes.append(_empty_range(where, f"{low_key} {body[low_key]}", high_key, body[high_key]))
    return body, mistakes


def _parse_integer(fragment: Schema, where: str, _depth: int) -> _Parsed:
    body: dict[str, Any] = {}
    mistakes = []
    for key in _KEYWORDS_BY_TYPE["integer"]:
        if key not in fragment:
            continue
        value = fragment[key]
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int:
            mistakes.append(_wrong(fragment, key, where, "a whole number"))
        elif not INT64_MIN <= value <= INT64_MAX:
            accepted = f"a whole number of 64 bits, from {INT64_MIN} to {INT64_MAX}"
            mistakes.append(_wrong(fragment, key, where, accepted))
        else:
            body[key] = value
    low, high = integer_range(body)
    if low > high:
        mistakes.append(_no_number_left(body, where))
    return body, mistakes


def integer_range(schema: Schema) -> tuple[int, int]:
    """Return the smallest and largest integer that the bounds allow, within 64 bits."""
    low = max(schema.get("minimum", INT64_MIN), schema.get("exclusiveMinimum", INT64_MIN - 1) + 1)
    high = min(schema.get("maximum", INT64_MAX), schema.get("exclusiveMaximum", INT64_MAX + 1) - 1)
    return low, high


def _parse_number(fragment: Schema, where: str, _depth: int) -> _Parsed:
    body: dict[str, Any] = {}
    mistakes = []
    for key in _KEYWORDS_BY_TYPE["number"]:
        if key not in fragment:
            continue
        value = fragment[key]
        if type(value) not in (int, float) or not abs(value) <= 1.7e308:
            mistakes.append(_wrong(fragment, key, where, "a finite number"))
        else:
            body[key] = value
    low = max(body.get("minimum", -math.inf), body.get("exclusiveMinimum", -math.inf))
    high = min(body.get("maximum", math.inf), body.get("exclusiveMaximum", math.inf))
    is_open = low == body.get("exclusiveMinimum") or high == body.get("exclusiveMaximum")
    if low > high or (low == high and is_open):
        mistakes.append(_no_number_left(body, where))
    return body, mistakes


def _parse_boolean(_fragment: Schema, _where: str, _depth: int) -> _Parsed:
    return {}, []


def _parse_array(fragment: Schema, where: str, depth: int) -> _Parsed:
    if "items" not in fragment:
        message = "an array needs items, the schema of its elements; add items: {type: string}"
        return {}, [Mistake(where, message)]
    items, mistakes = _parse_schema(fragment["items"], f"{where}.items", depth + 1)
    counts, found = _parse_counts(fragment, "minItems", "maxItems", where)
    return {"items": items, **counts}, mistakes + found


def _parse_object(fragment: Schema, where: str, depth: int) -> _Parsed:
    declared = fragment.get("properties")
    if not isinstance(declared, Mapping) or not declared:
        message = (
            f"got {_show(declared)}; an object needs properties, which map each name to a schema"
        )
        return {}, [Mistake(f"{where}.properties", message)]
    mistakes = []
    properties = {}
    for name, inner in declared.items():
        at = f"{where}.properties.{_label(name)}"
        if not isinstance(name, str) or not name:
            mistakes.append(
                Mistake(at, f"the name {_show(name)} is no text; put a name in quotes there")
            )
        elif _text_problem(name):
            mistakes.append(Mistake(at, f"the name {_show(name)} {_text_problem(name)}"))
        properties[name], found = _parse_schema(inner, at, depth + 1)
        mistakes += found
    required = fragment.get("required", list(declared))
    if (
        not isinstance(required, list)
        or any(not isinstance(name, str) or name not in declared for name in required)
        or len(set(required)) < len(required)
    ):
        accepted = f"a list of property names, each once: {_show(list(declared))}"
        mistakes.append(_wrong(fragment, "required", where, accepted))
    if fragment.get("additionalProperties", False) is not False:
        accepted = "only false, since a column needs to know what it holds"
        mistakes.append(_wrong(fragment, "additionalProperties", where, accepted))
    return {
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }, mistakes


_PARSERS: Mapping[str, Callable[[Schema, str, int], _Parsed]] = {
    "string": _parse_string,
    "integer": _parse_integer,
    "number": _parse_number,
    "boolean": _parse_boolean,
    "array": _parse_array,
    "object": _parse_object,
}
_KINDS: Mapping[str, ValueKind] = {
    "integer": ValueKind.INTEGER,
    "number": ValueKind.NUMBER,
    "boolean": ValueKind.BOOLEAN,
    "array": ValueKind.JSON,
    "object": ValueKind.JSON,
}


def _unsupported(key: object, where: str) -> Mistake:
    if key == "hidden":
        message = "hidden hides a whole output; move it up beside the output's own type"
    else:
        message = f"unsupported schema keyword; supported: {', '.join(SUPPORTED_KEYWORDS)}"
    return Mistake(f"{where}.{_label(key)}", message)


def _wrong(fragment: Schema, key: str, where: str, accepted: str) -> Mistake:
    return Mistake(f"{where}.{key}", f"got {_show(fragment[key])}; accepted: {accepted}")


def _empty_range(where: str, low: str, high_key: str, high: object) -> Mistake:
    message = f"{low} is above {high_key} {high}, so no value is left; swap or widen them"
    return Mistake(where, message)


def _no_number_left(body: Schema, where: str) -> Mistake:
    bounds = ", ".join(f"{key} {value}" for key, value in body.items())
    return Mistake(where, f"{bounds} leave no value; swap or widen the bounds")


def _text_problem(text: str) -> str | None:
    if "\0" in text:
        return "contains a NUL character, which no warehouse stores; remove it"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "contains half of a surrogate pair, which is no text; remove it"
    return None


def _show(value: object) -> str:
    text = ascii(value) if isinstance(value, str) and _text_problem(value) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _label(key: object) -> str:
    text = str(key)
    return text if text.isprintable() and len(text) <= MAX_NAME_BYTES else _show(text)


def _json_bytes(value: object) -> int:
    return len(json.dumps(value, ensure_ascii=False).encode())


def _answer_size(schema: Schema) -> int:
    """Return an upper bound of an answer's length in characters of compact JSON."""
    core = core_schema(schema)
    if "const" in core or "enum" in core:
        values = core.get("enum", [core.get("const")])
        return max(max(_json_bytes(value) for value in values), 4 * is_nullable(schema))
    return max(_SIZES[core["type"]](core), 4 * is_nullable(schema))


def _array_size(schema: Schema) -> int:
    count: int = schema.get("maxItems", _UNBOUNDED_ITEMS)
    return 2 + count * (1 + _answer_size(schema["items"]))


def _object_size(schema: Schema) -> int:
    members = schema["properties"].items()
    return 2 + sum(2 + _json_bytes(name) + _answer_size(inner) for name, inner in members)


def _string_size(schema: Schema) -> int:
    if "format" in schema:
        return 2 + (10 if schema["format"] == "date" else 32)
    if "maxLength" not in schema:
        return _UNBOUNDED_STRING_TOKENS
    # A character outside ASCII, or an escaped one, takes more than one token.
    return 2 + math.ceil(int(schema["maxLength"]) * 1.5)


def _integer_size(schema: Schema) -> int:
    return max(len(str(bound)) for bound in integer_range(schema))


_SIZES: Mapping[str, Callable[[Schema], int]] = {
    "string": _string_size,
    "integer": _integer_size,
    "number": lambda _: 24,
    "boolean": lambda _: 5,
    "array": _array_size,
    "object": _object_size,
}
