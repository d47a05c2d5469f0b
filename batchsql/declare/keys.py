"""Content keys: what makes two questions the same question.

Two levels. The *item key* is computed in the warehouse from a row's input columns (see
``warehouse.base.item_key_sql``) and includes the spec version made here. The *request key* is
computed here, for new items only, from what is logically asked: model, parameters, the shape of
the answer, what else makes the answers (weights, template) and the rendered messages. Nothing that
merely describes a run goes in: no route, tags, limits, credentials or derived defaults.

All keys are the first 128 bits of a SHA-256, which both warehouses store as a 16-byte uuid. At ten
thousand million keys the chance of one collision is about 10^-19.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from batchsql.declare.returns import Field, Returns
from batchsql.types import Message, ModelRef

KEY_RECIPE = 1
"""Version of both recipes. A change of it re-keys from the stored requests and re-pays nothing."""

KEY_HEX_DIGITS = 32

_INT64_MIN, _UINT64_MAX = -(2**63), 2**64 - 1


def canonical_json(value: object) -> bytes:
    """Return JSON bytes that are the same for equal values: keys sorted, no white space.

    A float with no fraction is written as an integer, so ``0`` and ``0.0`` are one value.
    """
    return orjson.dumps(_canonical(value), option=orjson.OPT_SORT_KEYS)


def _canonical(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not _INT64_MIN <= value <= _UINT64_MAX:
        return orjson.Fragment(str(value))  # orjson writes 64 bits only
    return value


def asked_json(returns: Returns) -> list[list[object]]:
    """Return the declared outputs as data whose order is kept: it changes what a model writes."""
    return [[field.name, _ordered(field.schema), field.hidden] for field in returns.fields]


def _ordered(schema: object) -> object:
    """Write ``properties`` as pairs, since their order matters and sorted keys would lose it."""
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: [[name, _ordered(child)] for name, child in value.items()]
        if key == "properties" and isinstance(value, Mapping)
        else _ordered(value)
        for key, value in schema.items()
    }


def parse_asked(asked: Sequence[Sequence[Any]]) -> Returns:
    """Return the outputs that ``asked_json`` was made of."""
    return Returns(tuple(Field(name, _unordered(schema), hidden) for name, schema, hidden in asked))


def _unordered(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: {name: _unordered(child) for name, child in value}
        if key == "properties" and isinstance(value, list)
        else _unordered(value)
        for key, value in schema.items()
    }


def digest(data: bytes) -> str:
    """Return the key of some bytes: 32 hex digits."""
    return hashlib.sha256(data).hexdigest()[:KEY_HEX_DIGITS]


def spec_version(
    *,
    model: ModelRef,
    template: str,
    params: Mapping[str, Any],
    returns: Returns,
    normalize: str,
    identity: Mapping[str, Any],
) -> str:
    """Return the key of all that an answer depends on except the row."""
    return digest(
        canonical_json(
            {
                "recipe": KEY_RECIPE,
                "model": str(model),
                "template": template,
                "params": params,
                "returns": asked_json(returns),
                "normalize": normalize,
                "identity": identity,
            }
        )
    )


def messages_json(messages: Sequence[Message]) -> bytes:
    """Write messages as the ledger stores them: a JSON list of [role, text] pairs."""
    return orjson.dumps([[message.role, message.content] for message in messages])


class RequestKeyer:
    """Makes the request keys of one spec.

    The part that all requests share is hashed once; how the messages are split into a shared prefix
    and the row's own does not change a key.

    >>> from batchsql.types import Role
    >>> from batchsql.declare.returns import Field, Returns
    >>> hi = (Message(Role.USER, "hi"),)
    >>> def keyer(prefix):
    ...     return RequestKeyer(ModelRef("local", "m"), {}, Returns(()), {}, prefix)
    >>> keyer(hi).key(messages_json(hi)) == keyer(()).key(messages_json(hi + hi))
    True
    """

    def __init__(
        self,
        model: ModelRef,
        params: Mapping[str, Any],
        returns: Returns,
        identity: Mapping[str, Any],
        prefix: Sequence[Message],
    ) -> None:
        head = canonical_json(
            {
                "recipe": KEY_RECIPE,
                "model": str(model),
                "params": params,
                "returns": asked_json(returns),
                "identity": identity,
            }
        )
        shared = head + b"\n" + messages_json(prefix)[:-1]
        self._prefix = hashlib.sha256(shared)
        self._prefix_and_more = hashlib.sha256(shared + b"," if prefix else shared)

    def key(self, suffix_json: bytes) -> str:
        """Return the request key for a row's own messages, given as ``messages_json`` of them."""
        hashed = (self._prefix if suffix_json == b"[]" else self._prefix_and_more).copy()
        hashed.update(suffix_json[1:])
        return hashed.hexdigest()[:KEY_HEX_DIGITS]
