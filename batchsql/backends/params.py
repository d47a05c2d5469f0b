"""What a backend accepts as parameters or options, as data, and the check against it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from batchsql.errors import Mistake, show_value


@dataclass(frozen=True, slots=True)
class Param:
    """One accepted value: its type and its range, both ends included.

    ``text`` is one that is not empty; ``texts`` is one or a list of up to ``maximum`` of them.
    """

    kind: Literal["integer", "number", "boolean", "text", "texts"]
    minimum: float | None = None
    maximum: float | None = None

    def accepts(self, value: object) -> bool:
        """Return whether the value has the type and lies in the range."""
        if self.kind == "boolean":
            return isinstance(value, bool)
        if self.kind == "text":
            return isinstance(value, str) and bool(value.strip())
        if self.kind == "texts":
            texts = value if isinstance(value, (list, tuple)) else [value]
            fits = self.maximum is None or len(texts) <= self.maximum
            return bool(texts) and fits and all(isinstance(t, str) and t for t in texts)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        if self.kind == "integer" and not isinstance(value, int):
            return False
        low = -math.inf if self.minimum is None else self.minimum
        high = math.inf if self.maximum is None else self.maximum
        return math.isfinite(value) and low <= value <= high

    def __str__(self) -> str:
        if self.kind == "boolean":
            return "true or false"
        if self.kind == "text":
            return "a text"
        if self.kind == "texts":
            most = "" if self.maximum is None else f" of at most {self.maximum:g}"
            return f"a text, or a list{most}"
        noun = "a whole number" if self.kind == "integer" else "a number"
        low = "" if self.minimum is None else f" from {_plain(self.minimum)}"
        high = "" if self.maximum is None else f" to {_plain(self.maximum)}"
        return f"{noun}{low}{high}"


Params = Mapping[str, Param]


def check_values(values: Mapping[str, Any], accepted: Params, where: str) -> list[Mistake]:
    """Return a mistake for each value that is unknown or out of range."""
    mistakes = []
    for name, value in values.items():
        if name not in accepted:
            mistakes.append(Mistake(f"{where}.{name}", _explain_unknown(name, value, accepted)))
        elif not accepted[name].accepts(value):
            message = f"got {show_value(name, value)}; accepted: {accepted[name]}"
            mistakes.append(Mistake(f"{where}.{name}", message))
    return mistakes


def _explain_unknown(name: str, value: object, accepted: Params) -> str:
    known = sorted(accepted)
    near = difflib.get_close_matches(name, known, 1)
    # A number is shown where it is meant for something like max_tokens; a text may be a token.
    is_number = isinstance(value, (int, float))
    shown = show_value(near[0] if near and is_number else name, value)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"got {shown}, but nothing of that name is known; {hint}accepted: {', '.join(known)}"


def _plain(bound: float) -> str:
    return str(int(bound)) if float(bound).is_integer() else str(bound)
