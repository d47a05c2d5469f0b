"""Prompts rendered for tests, as plain pairs of role and text."""

from __future__ import annotations

from typing import Any

from batchsql.declare.normalize import Normalize
from batchsql.declare.prompt import parse_prompt
from batchsql.types import Message

Pairs = list[tuple[str, str]]


def render(source: str, mode: Normalize = Normalize.STANDARD, /, **row: Any) -> Pairs:
    """Render one row of a model that selects just these columns."""
    bound = parse_prompt(source).bind(list(row), mode)
    return pairs(bound.render(row))


def pairs(messages: tuple[Message, ...]) -> Pairs:
    return [(message.role.value, message.content) for message in messages]


def text_of(source: str, **row: Any) -> str:
    """Return the text of a prompt that is one user message."""
    ((role, content),) = render(source, **row)
    assert role == "user"
    return content
