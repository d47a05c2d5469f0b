"""Text normalisation: what is hashed is what is sent."""

from __future__ import annotations

import unicodedata
from enum import Enum


class Normalize(str, Enum):
    """How much of a rendered text may be changed before it is hashed and sent."""

    NONE = "none"
    STANDARD = "standard"
    WHITESPACE = "whitespace"


def normalize_text(text: str, mode: Normalize = Normalize.STANDARD) -> str:
    """Return ``text`` normalised as ``mode`` says; a second pass changes nothing.

    ``standard`` is what cannot change meaning: Unicode NFC, CRLF and lone CR to LF, no spaces and
    tabs at the end of a line, no outer white space. ``whitespace`` also collapses every run of
    white space, line ends included, to one space. ``none`` returns the text as it is. Time is
    linear in the text's length whatever it holds.
    """
    if mode is Normalize.NONE:
        return text
    if not text.isascii() and not unicodedata.is_normalized("NFC", text):
        text = unicodedata.normalize("NFC", text)
    if mode is Normalize.WHITESPACE:
        return " ".join(text.split())
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if " \n" in text or "\t\n" in text:
        # Not a regular expression: `[ \t]+\n` takes quadratic time on a long run of spaces.
        text = "\n".join([line.rstrip(" \t") for line in text.split("\n")])
    return text.strip()
