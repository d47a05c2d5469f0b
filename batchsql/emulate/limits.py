"""The limits of the emulated providers, as options of the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from batchsql.emulate.anthropic import AnthropicLimits
from batchsql.emulate.bedrock import BedrockLimits
from batchsql.emulate.google import GoogleLimits
from batchsql.emulate.openai import OpenAILimits
from batchsql.errors import Mistake, SpecError


def read_limits(options: Iterable[str]) -> Mapping[str, Any]:
    """Return the limits by provider, changed by options such as ``openai.batch_requests=10``.

    Raises SpecError with every mistake.
    """
    limits: dict[str, Any] = {
        "openai": OpenAILimits(),
        "anthropic": AnthropicLimits(),
        "bedrock": BedrockLimits(),
        "google": GoogleLimits(),
    }
    mistakes = []
    for option in options:
        name, _, number = option.partition("=")
        provider, _, limit = name.partition(".")
        known = [each.name for each in dataclasses.fields(limits.get(provider, OpenAILimits()))]
        if provider not in limits:
            mistakes.append(Mistake(option, f"the providers are: {', '.join(limits)}"))
        elif limit not in known:
            mistakes.append(Mistake(option, f"the limits of {provider} are: {', '.join(known)}"))
        elif not number.isdigit():
            mistakes.append(Mistake(option, f"got {number!r}; give a whole number"))
        else:
            limits[provider] = dataclasses.replace(limits[provider], **{limit: int(number)})
    if mistakes:
        raise SpecError("limits", mistakes, "limits")
    return limits
