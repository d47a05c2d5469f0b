"""Role lines: where a prompt's text is cut into messages."""

from __future__ import annotations

import itertools
import re
import secrets

from batchsql.declare.environment import ENVIRONMENT
from batchsql.declare.normalize import Normalize, normalize_text
from batchsql.types import Message, Role

_ROLE_LINE = re.compile(r"^(system|user|assistant):[ \t]*$", re.MULTILINE)
_ROLES = tuple(Role)

# No row can hold the mark, since it is drawn anew in each process. Only digits, so that a filter
# over a macro's text, such as upper, leaves it whole; \x02 is no white space, so trim does too.
_NONCE = str(secrets.randbits(160))
MARK = f"\x02{_NONCE}\x02"
_PROBE = f"role{_NONCE}_"


def mark_role_lines(source: str) -> str:
    """Return ``source`` with each role line in its text replaced by a mark of one line.

    A line that looks like one inside ``{{ }}``, ``{% %}`` or ``{# #}`` is left alone. To tell
    them apart each is first replaced by a name and a colon, which the lexer reads as it would read
    the role itself, and then looked for in the tokens of plain text.
    """
    probes = itertools.count()
    probed = _ROLE_LINE.sub(lambda _: f"{_PROBE}{next(probes)}:", source)
    text = "".join(value for _, kind, value in ENVIRONMENT.lex(probed) if kind == "data")
    in_text = {int(number) for number in re.findall(rf"{_PROBE}(\d+):", text)}
    numbers = itertools.count()

    def replace(match: re.Match[str]) -> str:
        if next(numbers) not in in_text:
            return match.group()
        return f"{MARK}{_ROLES.index(Role(match.group(1)))}"

    return _ROLE_LINE.sub(replace, source)


def without_marks(text: str) -> str:
    """Return the text without the marks of its role lines."""
    return re.sub(rf"{MARK}\d\n?", "", text)


def split_messages(text: str, mode: Normalize) -> tuple[Message, ...]:
    """Return the messages of a marked text, normalised; those without text are left out."""
    head, *rest = text.split(MARK)
    parts = [(Role.USER, head)] if head else []
    # The role line's own line end is no part of the message.
    parts += [(_ROLES[int(part[0])], part[1:].removeprefix("\n")) for part in rest]
    messages = []
    for role, text in parts:
        content = normalize_text(text, mode)
        if content and not content.isspace():
            messages.append(Message(role, content))
    return tuple(messages)
