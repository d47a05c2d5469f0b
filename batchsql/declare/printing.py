"""What a value looks like in a prompt: the same in every process, time zone and locale."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from types import NoneType
from typing import Any
from uuid import UUID

import orjson
from jinja2.runtime import Undefined

_JSON_OPTIONS = orjson.OPT_PASSTHROUGH_DATETIME

# Nearly all cells are of these types, which hold no time with a zone.
_UNCHANGED = frozenset({str, int, float, bool, NoneType, Decimal, date, UUID, bytes})


def print_value(value: Any) -> str:
    """Return the text that ``{{ value }}`` prints; the same in every process and time zone.

    Raises:
        TypeError: the value has no text of its own, such as a function or a lazy filter's result.
    """
    if type(value) is str:
        return value
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, UUID, timedelta)):
        return str(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, (date, time)):
        return _print_time(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return value.hex()
    if isinstance(value, (dict, list, tuple, range)):
        return print_json(value)
    if isinstance(value, Undefined):
        return str(value)  # raises, and names what is undefined
    # The default text of other objects holds a memory address: a new prompt in every process.
    raise TypeError(
        f"a {type(value).__name__} cannot be printed; "
        "after map, select, batch and the like add `| list` or `| join`"
    )


def print_json(value: Any, indent: int | None = None) -> str:
    """Return ``value`` as compact JSON, keys in their own order, nothing escaped for HTML.

    ``indent`` may be 2 for one line per entry.
    """
    if indent not in (None, 2):
        raise ValueError(f"tojson takes indent=2 or none, not indent={indent!r}")
    options = _JSON_OPTIONS | (orjson.OPT_INDENT_2 if indent else 0)
    try:
        return orjson.dumps(value, default=_json_default, option=options).decode()
    except TypeError:
        # Integers beyond 64 bits and keys that are no text, as in a warehouse's MAP.
        return orjson.dumps(_plain_json(value), default=_json_default, option=options).decode()


def _json_default(value: Any) -> Any:
    if isinstance(value, Decimal):
        # A fragment, since a float would lose digits.
        return orjson.Fragment(format(value, "f")) if value.is_finite() else None
    if isinstance(value, range):
        return list(value)
    return print_value(value)


def _plain_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {print_value(key): _plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_json(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return orjson.Fragment(str(value))
    return value


def _print_time(value: date | time) -> str:
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(timezone.utc).replace(tzinfo=None).isoformat() + "Z"
    return value.isoformat()


def in_utc(value: Any) -> Any:
    """Return ``value`` with every aware time in UTC: a client's time zone must not show."""
    if type(value) in _UNCHANGED:
        return value
    if isinstance(value, datetime):
        return value if value.tzinfo is None else value.astimezone(timezone.utc)
    if isinstance(value, dict):
        return {key: in_utc(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [in_utc(item) for item in value]
    return value
