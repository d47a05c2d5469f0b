"""Keeps a model's special tokens out of the text of messages."""

from __future__ import annotations

import re
from collections.abc import Iterable

_BREAK = "\u200b"  # a zero-width space


class SpecialTokens:
    """The special tokens of one model, as they are written."""

    def __init__(self, tokens: Iterable[str]) -> None:
        # Of a single character nothing can be broken off.
        breakable = {token for token in tokens if len(token) > 1 and _BREAK not in token}
        longest_first = sorted(breakable, key=lambda token: (-len(token), token))
        self._pattern = (
            re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        )

    def neutralise(self, text: str) -> str:
        """Return the text with a zero-width space inside every special token.

        Where an engine parses special tokens in message content too, a row that holds
        ``<|im_end|>`` could otherwise end its own turn and speak as another role.
        """
        if self._pattern is None:
            return text
        while True:
            broken = self._pattern.sub(lambda m: m[0][0] + _BREAK + m[0][1:], text)
            if broken == text:
                return text
            text = broken  # breaking one token can leave another, shorter one inside it
