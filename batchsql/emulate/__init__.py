"""A rehearsal server: the providers' wire formats on loopback, misbehaving on demand.

Nothing here asks a model or costs money. ``docs/rehearsal.md`` says how to use it.
"""

from batchsql.emulate.anthropic import AnthropicLimits
from batchsql.emulate.bedrock import BedrockLimits
from batchsql.emulate.bill import Bill, Charge
from batchsql.emulate.google import GoogleLimits
from batchsql.emulate.openai import OpenAILimits
from batchsql.emulate.script import Behaviour, Rule
from batchsql.emulate.server import Call, Emulator
from batchsql.emulate.timeline import Durations

__all__ = [
    "AnthropicLimits", "BedrockLimits", "Behaviour", "Bill", "Call", "Charge", "Durations",
    "Emulator", "GoogleLimits", "OpenAILimits", "Rule",
]  # fmt: skip
