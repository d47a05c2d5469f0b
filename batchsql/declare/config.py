"""The keys of ``meta.llm``, each checked alone; what is wrong is told key by key."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError

from batchsql.declare.durations import Deadline
from batchsql.declare.normalize import Normalize
from batchsql.declare.routing import (
    OnComplete,
    read_condition,
    read_deadline,
    read_duration,
    read_on_complete,
    read_wait,
)
from batchsql.errors import Mistake, show_value
from batchsql.types import OnPending, RouteChoice, Runner


class AlternativeConfig(BaseModel):
    """Another model with options of its own."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str
    engine: dict[str, Any] = {}


class LlmConfig(BaseModel):
    """All keys with their defaults. Their meaning for users is in ``docs/declaring.md``."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str
    prompt: str
    returns: dict[str, Any]
    params: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    normalize: str = Normalize.STANDARD.value
    incremental: bool = False
    limit: Annotated[int, Field(ge=0)] | None = None
    read_from: list[str] | str = []
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    ledger_schema: Annotated[str, Field(min_length=1)] | None = None
    flush_rows: Annotated[int, Field(ge=1)] | None = None
    flush_seconds: Annotated[float, Field(gt=0)] = 5.0
    lease_seconds: Annotated[float, Field(ge=1)] = 60.0
    # Strict mode takes no text for an enum.
    route: Annotated[RouteChoice, Field(strict=False)] = RouteChoice.AUTO
    runner: Annotated[Runner, Field(strict=False)] = Runner.INLINE
    egress: bool = True
    alternatives: dict[Literal["engine"], str | AlternativeConfig] = {}
    urgent_when: Annotated[str | None, BeforeValidator(read_condition)] = None
    online_up_to: Annotated[int, Field(ge=0)] = 50
    max_batch_requests: Annotated[int, Field(ge=1)] | None = None
    retry_last_online: bool = True
    deadline: Annotated[Deadline | None, PlainValidator(read_deadline)] = None
    rescue_before: Annotated[float, BeforeValidator(read_duration)] = 3600.0
    rescue_max_usd: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    wait: Annotated[float, BeforeValidator(read_wait)] = 0.0
    on_pending: Annotated[OnPending, Field(strict=False)] = OnPending.BUILD
    on_complete: Annotated[OnComplete | None, PlainValidator(read_on_complete)] = None
    prices: dict[str, Any] | None = None
    allow_fresh_ledger: bool = False


_EXPLAINED = {
    "model": "a text such as 'local/smollm2-135m'",
    "prompt": "the path of a prompt file, or the prompt itself",
    "returns": "a mapping from each output's name to its JSON Schema",
    "params": "a mapping such as {temperature: 0}",
    "engine": "a mapping of engine options",
    "incremental": "true or false",
    "limit": "a whole number, 0 or more",
    "read_from": "a schema name, or a list of them",
    "max_attempts": "a whole number from 1 to 100",
    "ledger_schema": "a schema name",
    "flush_rows": "a whole number, 1 or more",
    "flush_seconds": "a number above 0",
    "lease_seconds": "a number, 1 or more",
    "route": "one of auto, batch, online, engine",
    "runner": "one of inline, detached",
    "egress": "true or false",
    "alternatives": "a mapping such as {engine: 'vllm/qwen3-8b'}, or {engine: {model: …, engine: "
    "{…}}} with options; its only key is engine",
    "online_up_to": "a whole number, 0 or more",
    "max_batch_requests": "a whole number, 1 or more",
    "retry_last_online": "true or false",
    "rescue_max_usd": "a number, 0 or more",
    "on_pending": "one of build, hold, fail",
    "prices": "a mapping of USD per million tokens",
    "allow_fresh_ledger": "true or false",
}


def read_config(merged: Mapping[str, Any]) -> tuple[LlmConfig | None, list[Mistake]]:
    """Return the keys with their values, or None and a mistake for each key that is wrong."""
    try:
        # YAML and JSON have one kind of number: a whole one is welcome where a float is meant.
        as_read = {
            key: float(value) if key.endswith("_seconds") and type(value) is int else value
            for key, value in merged.items()
        }
        return LlmConfig.model_validate(as_read), []
    except ValidationError as error:
        return None, _explain(error, merged)


def _explain(error: ValidationError, merged: Mapping[str, Any]) -> list[Mistake]:
    mistakes: dict[str, Mistake] = {}
    accepted = sorted(LlmConfig.model_fields)
    for problem in error.errors():
        key = str(problem["loc"][0])
        shown = show_value(key, merged.get(key))
        if problem["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, accepted, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            message = f"unknown key with value {shown}; {hint}accepted: {', '.join(accepted)}"
        elif problem["type"] == "missing":
            message = f"is missing; give {_EXPLAINED[key]}"
        elif problem["type"] == "value_error":
            message = str(problem["ctx"]["error"])
        else:
            message = f"got {shown}; wanted is {_EXPLAINED.get(key, problem['msg'])}"
        mistakes.setdefault(key, Mistake(key, message))
    return list(mistakes.values())
