"""Answers without a model: a value that fits the schema, always the same for the same request."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

Maker = Callable[[random.Random, int], Any]

CHARACTERS_PER_TOKEN = 4
_MAX_DEPTH = 8
_WORDS = (
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "harbor", "island", "juniper",
    "kelp", "lagoon", "meadow", "north", "orchid", "pebble", "quartz", "river", "summit", "tundra",
)  # fmt: skip
# Where a schema dialect has no bounds, clients write them into the description: a model reads it.
_HINT = re.compile(r"\b(m(?:in|ax)(?:imum|Length|Items)|exclusiveM(?:in|ax)imum): (-?[\d.]+)")
_FORMATS: Mapping[str, Callable[[random.Random], str]] = {
    "date": lambda r: f"20{r.randrange(10, 30)}-{r.randrange(1, 13):02}-{r.randrange(1, 29):02}",
    "time": lambda r: f"{r.randrange(24):02}:{r.randrange(60):02}:{r.randrange(60):02}Z",
    "date-time": lambda r: f"{_FORMATS['date'](r)}T{_FORMATS['time'](r)}",
    "duration": lambda r: f"P{r.randrange(1, 30)}D",
    "email": lambda r: f"{r.choice(_WORDS)}@example.com",
    "hostname": lambda r: f"{r.choice(_WORDS)}.example.com",
    "uri": lambda r: f"https://example.com/{r.choice(_WORDS)}",
    "ipv4": lambda r: f"192.0.2.{r.randrange(1, 255)}",
    "ipv6": lambda r: f"2001:db8::{r.randrange(1, 65536):x}",
    "uuid": lambda r: (
        f"{r.getrandbits(32):08x}-{r.getrandbits(16):04x}-4{r.getrandbits(12):03x}-"
        f"8{r.getrandbits(12):03x}-{r.getrandbits(48):012x}"
    ),
}


def count_tokens(text: str) -> int:
    """Return a plausible number of tokens: one for four characters, rounded up."""
    return -(-len(text) // CHARACTERS_PER_TOKEN)


def make_text(seed: int) -> str:
    """Return a short free text."""
    source = random.Random(seed)  # noqa: S311 - no secret; must repeat
    return f"{source.choice(_WORDS)} {source.choice(_WORDS)} {source.choice(_WORDS)}".capitalize()


class SchemaAnswers:
    """Makes JSON texts that fit schemas. A schema is compiled once."""

    def __init__(self) -> None:
        self._makers: dict[bytes, Maker] = {}

    def make(self, schema: Mapping[str, Any], schema_bytes: bytes, seed: int) -> str:
        """Return a JSON text that fits ``schema``; the same seed always yields the same text."""
        maker = self._makers.get(schema_bytes)
        if maker is None:
            maker = self._makers[schema_bytes] = _Compiler(schema).compile(schema)
        return orjson.dumps(maker(random.Random(seed), 0)).decode()  # noqa: S311


class _Compiler:
    """Turns a schema into a function that makes values."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._references: dict[str, Maker] = {}

    def compile(self, schema: Any) -> Maker:
        if not isinstance(schema, Mapping):
            return lambda source, depth: source.choice(_WORDS)
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]))
        if "const" in schema:
            constant = schema["const"]
            return lambda source, depth: constant
        if "enum" in schema:
            values = list(schema["enum"])
            return lambda source, depth: source.choice(values)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._choice(schema[keyword])
        if "allOf" in schema:
            merged: dict[str, Any] = {}
            for each in schema["allOf"]:
                merged.update(self._resolve(each))
            return self.compile({**merged, **{k: v for k, v in schema.items() if k != "allOf"}})
        kind = schema.get("type", "object" if "properties" in schema else "string")
        if isinstance(kind, list):
            return self._choice([{**schema, "type": each} for each in kind])
        return self._typed(kind, {**_hints(schema), **schema})

    def _typed(self, kind: str, schema: Mapping[str, Any]) -> Maker:
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            return self._array(schema)
        if kind == "string":
            return _string(schema)
        if kind in ("integer", "number"):
            return _number(schema, is_integer=kind == "integer")
        if kind == "boolean":
            return lambda source, depth: source.random() < 0.5
        return lambda source, depth: None

    def _resolve(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._lookup(str(schema["$ref"])) if "$ref" in schema else schema

    def _lookup(self, reference: str) -> Mapping[str, Any]:
        found: Any = self._root
        for part in reference.removeprefix("#").split("/"):
            if part:
                found = found[part.replace("~1", "/").replace("~0", "~")]
        result: Mapping[str, Any] = found
        return result

    def _reference(self, reference: str) -> Maker:
        def make(source: random.Random, depth: int) -> Any:
            if reference not in self._references:
                self._references[reference] = self.compile(self._lookup(reference))
            return self._references[reference](source, depth)

        return make

    def _choice(self, schemas: Sequence[Any]) -> Maker:
        makers = [self.compile(each) for each in schemas]
        # What ends a recursion: a variant without children, null above all.
        plain = [
            maker
            for maker, schema in zip(makers, schemas, strict=True)
            if not {"$ref", "properties", "items"} & set(schema)
        ] or makers[-1:]
        return lambda source, depth: source.choice(plain if depth > _MAX_DEPTH else makers)(
            source, depth + 1
        )

    def _object(self, schema: Mapping[str, Any]) -> Maker:
        required = set(schema.get("required", ()))
        parts = [
            (name, self.compile(each), name in required)
            for name, each in schema.get("properties", {}).items()
        ]

        def make(source: random.Random, depth: int) -> Any:
            return {
                name: maker(source, depth + 1)
                for name, maker, is_required in parts
                if is_required or depth <= _MAX_DEPTH
            }

        return make

    def _array(self, schema: Mapping[str, Any]) -> Maker:
        item = self.compile(schema.get("items", {"type": "string"}))
        least = int(schema.get("minItems", 0))
        most = int(schema.get("maxItems", max(least, 3)))
        is_unique = bool(schema.get("uniqueItems"))

        def make(source: random.Random, depth: int) -> Any:
            length = least if depth > _MAX_DEPTH else source.randint(least, min(most, least + 3))
            values = [item(source, depth + 1) for _ in range(length)]
            if is_unique:
                seen = {json.dumps(each): each for each in values}
                for _ in range(100):
                    if len(seen) >= least:
                        break
                    value = item(source, depth + 1)
                    seen[json.dumps(value)] = value
                values = list(seen.values())
            return values

        return make


def _hints(schema: Mapping[str, Any]) -> dict[str, Any]:
    found = _HINT.findall(str(schema.get("description", "")))
    return {name: float(value) if "." in value else int(value) for name, value in found}


def _string(schema: Mapping[str, Any]) -> Maker:
    least = int(schema.get("minLength", 0))
    most = int(schema["maxLength"]) if "maxLength" in schema else None
    if "pattern" in schema:
        return _patterned(str(schema["pattern"]), least, most)
    known = _FORMATS.get(str(schema.get("format")))
    if known is not None:
        return lambda source, depth: known(source)

    def make(source: random.Random, depth: int) -> Any:
        text = f"{source.choice(_WORDS)} {source.choice(_WORDS)}"
        while len(text) < least:
            text += f" {source.choice(_WORDS)}"
        return text if most is None else text[:most]

    return make


def _patterned(pattern: str, least: int, most: int | None) -> Maker:
    import rstr

    def make(source: random.Random, depth: int) -> Any:
        generator = rstr.Rstr(source)
        text = ""
        for _ in range(50):
            text = generator.xeger(pattern)
            if len(text) >= least and (most is None or len(text) <= most):
                break
        return text

    return make


def _number(schema: Mapping[str, Any], *, is_integer: bool) -> Maker:
    step = schema.get("multipleOf")
    unit = step if step is not None else (1 if is_integer else 0.01)
    least, most = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        least = schema["exclusiveMinimum"] + unit
    if "exclusiveMaximum" in schema:
        most = schema["exclusiveMaximum"] - unit
    if least is None:
        least = 0 if most is None or most >= 0 else most - 100 * unit
    if most is None:
        most = least + 100 * unit
    first, last = -int(-least // unit), int(most // unit)

    def make(source: random.Random, depth: int) -> Any:
        number = source.randint(first, max(first, last)) * unit
        if is_integer:
            return int(number)
        return number if isinstance(unit, int) else min(max(round(number, 6), least), most)

    return make


@dataclass(slots=True)
class PrefixCache:
    """The provider's memory of prompt prefixes, by content and with an end."""

    _known: dict[bytes, float]

    def __init__(self) -> None:
        self._known = {}

    def longest_repeat(
        self, scope: str, text: str, now: float, *, least: int, step: int, seconds: float
    ) -> int:
        """Return how many tokens of the prompt's beginning are known, and remember all of it.

        Counts in steps from ``least`` tokens on, as providers do that cache on their own.
        """
        tokens = len(text) // CHARACTERS_PER_TOKEN
        if tokens < least:
            return 0
        digest = hashlib.blake2b(scope.encode(), digest_size=16)
        known, done, size = 0, 0, least
        while size <= tokens:
            digest.update(text[done : size * CHARACTERS_PER_TOKEN].encode("utf-8", "surrogatepass"))
            done = size * CHARACTERS_PER_TOKEN
            key = digest.digest()
            if self._known.get(key, 0.0) > now:
                known = size
            self._known[key] = now + seconds
            size += step
        return known

    def touch(self, scope: str, text: str, now: float, seconds: float) -> bool:
        """Remember one prefix, and return whether it was known."""
        key = hashlib.blake2b(
            f"{scope}\0{text}".encode("utf-8", "surrogatepass"), digest_size=16
        ).digest()
        was_known = self._known.get(key, 0.0) > now
        self._known[key] = now + seconds
        return was_known
