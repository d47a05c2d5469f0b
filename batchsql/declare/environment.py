"""What a prompt template may use: Jinja in its sandbox, without clock, chance or runaway sizes."""

from __future__ import annotations

from datetime import date
from typing import Any

from jinja2 import StrictUndefined
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchsql.declare.printing import print_json, print_value

MAX_RENDERED_CHARS = 16 * 1024 * 1024
"""More than any model reads; a template that prints more is taken for a runaway loop."""

# Attributes of dates whose answer depends on the clock or on the machine's time zone.
_CLOCK_ATTRIBUTES = frozenset(
    {"now", "today", "utcnow", "fromtimestamp", "timestamp", "astimezone"}
)


class _PromptEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr in _CLOCK_ATTRIBUTES and isinstance(obj, date):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if (
            operator == "**"
            and isinstance(left, int)
            and isinstance(right, int)
            and left.bit_length() * right > 4096
        ):
            raise SecurityError("the exponent is too large for a prompt")
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                if (
                    isinstance(text, (str, bytes, list, tuple))
                    and isinstance(times, int)
                    and len(text) * times > MAX_RENDERED_CHARS
                ):
                    raise SecurityError(f"a text repeated {times} times is too long for a prompt")
        return super().call_binop(context, operator, left, right)


def _make_environment() -> _PromptEnvironment:
    environment = _PromptEnvironment(
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=print_value,
    )
    # The same row must always give the same prompt.
    del environment.globals["lipsum"]
    del environment.filters["random"]
    environment.filters["tojson"] = print_json
    environment.filters["string"] = print_value
    return environment


ENVIRONMENT = _make_environment()
GLOBALS = dict(ENVIRONMENT.globals)
