"""The keys of a declaration that say where requests go and when: each read and checked alone.

Every ``read_`` function raises ValueError with a whole message, which pydantic passes on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from batchsql.declare.durations import Deadline, parse_deadline, parse_seconds
from batchsql.errors import show_value


@dataclass(frozen=True, slots=True)
class OnComplete:
    """What is told that every request has come to an end: a command, or a web address.

    Exactly one of them is set. The address may hold a secret in its path, so no repr shows it.
    """

    command: str | None = None
    webhook: str | None = field(default=None, repr=False)


def read_duration(value: object) -> float:
    """Return a duration in seconds."""
    seconds = parse_seconds(value)
    if seconds is None:
        raise ValueError(
            f"got {show_value('', value)}; wanted is a number of seconds or a text such as '90s', "
            "'30m', '6h', '2d' or '1h30m'"
        )
    return seconds


def read_wait(value: object) -> float:
    """Return how many seconds a run waits for its batches; ``forever`` is infinity."""
    if value == "forever":
        return math.inf
    try:
        return read_duration(value)
    except ValueError as error:
        raise ValueError(f"{error}, or 'forever'") from None


def read_deadline(value: object) -> Deadline | None:
    """Return when the answers are due. None: never."""
    if value is None:
        return None
    deadline = parse_deadline(value) if isinstance(value, str) else None
    if deadline is None:
        # YAML 1.1 reads a bare 16:30 as the number 990.
        hint = "" if isinstance(value, str) else "; put it in quotes, or YAML makes a number of it"
        raise ValueError(
            f"got {show_value('', value)}; wanted is a text: a duration above 0 such as '6h' or "
            f"'90m', or a time of day such as '06:30' or, for UTC, '06:30Z'{hint}"
        )
    return deadline


def read_condition(value: object) -> str | None:
    """Return a SQL condition on the model's columns, without white space around it.

    Which warehouse is to run it is not known here, so what no parser understands is let through.
    """
    if value is None:
        return None
    text = value.strip() if isinstance(value, str) else ""
    if not text or ";" in text or _is_statement(text):
        raise ValueError(
            f"got {show_value('', value)}; wanted is a SQL condition on the model's columns such "
            "as \"priority = 'high'\", without a semicolon"
        )
    return text


def _is_statement(text: str) -> bool:
    import sqlglot  # not wanted by those who declare no condition

    try:
        # First as a condition: a column may be named like a statement, as comment is.
        sqlglot.parse_one(text, into=sqlglot.exp.Condition)
        return False
    except sqlglot.errors.SqlglotError:
        pass
    try:
        sqlglot.parse_one(text)
        return True
    except sqlglot.errors.SqlglotError:
        return False


def read_on_complete(value: object) -> OnComplete | None:
    """Return what is told at the end. No message shows the value, which may hold a secret."""
    if value is None:
        return None
    given = {str(key): each for key, each in value.items()} if isinstance(value, Mapping) else {}
    if len(given) != 1 or not given.keys() <= {"command", "webhook"}:
        raise ValueError("wanted is a mapping with exactly one key, command or webhook")
    ((key, text),) = given.items()
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"its {key} is no text, or a blank one")
    if key == "command":
        return OnComplete(command=text)
    if not _is_plain_web_address(text):
        raise ValueError("its webhook is no http:// or https:// URL, or holds a user or password")
    return OnComplete(webhook=text)


def _is_plain_web_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port_is_number = parts.port is None or parts.port > 0
    except ValueError:
        return False
    return (
        parts.scheme in ("http", "https")
        and bool(parts.hostname)
        and "@" not in parts.netloc
        and port_is_number
        and not any(mark.isspace() for mark in text)
    )
