"""What the user declares under ``meta.llm``: read once, checked whole, frozen.

Every mistake is collected, so that one look mends them all. Nothing here touches a warehouse or a
model; what needs the model's columns is checked by ``check_columns`` as soon as they are known.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from batchsql.declare.normalize import Normalize
from batchsql.declare.prompt import (
    BoundPrompt,
    Prompt,
    PromptSyntaxError,
    UnknownColumnsError,
    parse_prompt,
)
from batchsql.declare.returns import Returns, parse_returns
from batchsql.errors import Mistake, SpecError, show_value
from batchsql.types import ModelRef

CheckModel = Callable[[ModelRef, Mapping[str, Any], Mapping[str, Any]], list[Mistake]]
"""Looks at the provider, the parameters and the engine options; returns the mistakes."""


class LlmConfig(BaseModel):
    """The keys of ``meta.llm``. Their meaning for users is in ``docs/declaring.md``."""

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
    flush_rows: Annotated[int, Field(ge=1)] = 100
    flush_seconds: Annotated[float, Field(gt=0)] = 5.0
    lease_seconds: Annotated[float, Field(ge=1)] = 60.0


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
}


@dataclass(frozen=True, slots=True)
class Declaration:
    """One enrichment as declared, every default filled in."""

    subject: str
    model: ModelRef
    template: str
    prompt: Prompt
    returns: Returns
    params: Mapping[str, Any]
    engine: Mapping[str, Any]
    normalize: Normalize
    incremental: bool
    limit: int | None
    read_from: tuple[str, ...]
    max_attempts: int
    ledger_schema: str | None
    flush_rows: int
    flush_seconds: float
    lease_seconds: float
    unique_key: tuple[str, ...]

    @property
    def max_tokens(self) -> int:
        """The user's limit of an answer's tokens, or what the outputs can need."""
        declared = self.params.get("max_tokens")
        return int(declared) if declared is not None else self.returns.default_max_tokens()


def parse_declaration(
    subject: str,
    meta_llm: object,
    *,
    defaults: object = None,
    overrides: object = None,
    unique_key: object = None,
    project_root: Path,
    check_model: CheckModel,
    more_mistakes: Sequence[Mistake] = (),
) -> Declaration:
    """Read a declaration, its project's defaults under it and one run's overrides over it.

    Args:
        subject: the dbt model, for messages.
        meta_llm: what stands under ``meta.llm``.
        defaults: what stands under ``meta.llm_defaults``.
        overrides: the ``batchsql`` var of this run.
        unique_key: dbt's ``unique_key`` config: None, a column or a list of columns.
        project_root: the directory prompt paths start from and may not leave.
        check_model: knows the providers, their parameters and engine options.
        more_mistakes: mistakes found elsewhere, to be reported together with these.

    Raises:
        SpecError: with every mistake found.
    """
    mistakes = list(more_mistakes)
    merged: dict[str, Any] = {}
    for where, layer in (
        ("llm_defaults", defaults),
        ("llm", meta_llm),
        ("vars.batchsql", overrides),
    ):
        if layer is None:
            continue
        if not isinstance(layer, Mapping):
            mistakes.append(Mistake(where, f"got {layer!r}, a mapping of keys is wanted"))
            continue
        for key, value in layer.items():
            both_maps = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
            # Options are laid over each other one by one; outputs are declared as a whole.
            joined = (
                {**merged[key], **value} if both_maps and key in ("params", "engine") else value
            )
            merged[str(key)] = joined
    if not merged:
        mistakes.append(
            Mistake("meta.llm", "is missing; declare at least model, prompt and returns there")
        )
        raise SpecError(subject, mistakes)

    config, config_mistakes = _read_config(merged)
    mistakes += config_mistakes
    broken = {mistake.where.split(".")[0] for mistake in config_mistakes}

    model = None
    if "model" not in broken:
        model, found = _read_model(merged["model"])
        mistakes += found
    if model and not broken & {"params", "engine"}:
        mistakes += check_model(model, merged.get("params", {}), merged.get("engine", {}))
    template, prompt = "", None
    if "prompt" not in broken:
        template, prompt, found = _read_prompt(merged["prompt"], project_root)
        mistakes += found
    returns = None
    if "returns" not in broken:
        returns, found = parse_returns(merged["returns"])
        mistakes += found
    normalize = merged.get("normalize", Normalize.STANDARD.value)
    if "normalize" not in broken and normalize not in [mode.value for mode in Normalize]:
        accepted = ", ".join(mode.value for mode in Normalize)
        mistakes.append(Mistake("normalize", f"got {normalize!r}; accepted: {accepted}"))
    keys = _read_unique_key(unique_key)
    if keys is None:
        mistakes.append(
            Mistake("unique_key", f"got {unique_key!r}; give one column or a list of columns")
        )
    elif merged.get("incremental") is True and not keys:
        mistakes.append(
            Mistake(
                "unique_key",
                "is missing; an incremental model needs one to replace the rows it has answered, "
                "so add unique_key to the model's config",
            )
        )
    if mistakes or config is None or model is None or prompt is None or returns is None:
        raise SpecError(subject, mistakes)
    read_from = [config.read_from] if isinstance(config.read_from, str) else config.read_from
    return Declaration(
        subject=subject,
        model=model,
        template=template,
        prompt=prompt,
        returns=returns,
        params=config.params,
        engine=config.engine,
        normalize=Normalize(config.normalize),
        incremental=config.incremental,
        limit=config.limit,
        read_from=tuple(read_from),
        max_attempts=config.max_attempts,
        ledger_schema=config.ledger_schema,
        flush_rows=config.flush_rows,
        flush_seconds=config.flush_seconds,
        lease_seconds=config.lease_seconds,
        unique_key=keys or (),
    )


def _read_config(merged: Mapping[str, Any]) -> tuple[LlmConfig | None, list[Mistake]]:
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
        else:
            message = f"got {shown}; wanted is {_EXPLAINED.get(key, problem['msg'])}"
        mistakes.setdefault(key, Mistake(key, message))
    return list(mistakes.values())


def _read_model(text: str) -> tuple[ModelRef | None, list[Mistake]]:
    provider, slash, name = text.partition("/")
    if not (provider and slash and name):
        return None, [
            Mistake("model", f"got {text!r}; write provider/name, such as 'local/smollm2-135m'")
        ]
    return ModelRef(provider, name), []


def _read_prompt(value: str, project_root: Path) -> tuple[str, Prompt | None, list[Mistake]]:
    if "\n" in value or "{{" in value or "{%" in value:
        return _parse_template(value, "prompt")
    root = project_root.resolve()
    try:
        path = (root / value).resolve()
        if not path.is_relative_to(root):
            message = f"got {value!r}, which is outside the project; move the file into it"
            return "", None, [Mistake("prompt", message)]
        return _parse_template(path.read_text(encoding="utf-8"), f"prompt {value}")
    except UnicodeDecodeError:
        return "", None, [Mistake(f"prompt {value}", "is not UTF-8 text; save it as UTF-8")]
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        reason = f"there is no file {value!r:.80} in the project {root.name}"
    except (OSError, ValueError) as error:  # a text that is too long for a path, for example
        reason = f"cannot read a file {value!r:.80} ({getattr(error, 'strerror', None) or error})"
    hint = "; in a YAML file dbt renders {{ column }} to nothing, so write the prompt as a file"
    return "", None, [Mistake("prompt", f"{reason}{hint if ' ' in value else ''}")]


def _parse_template(text: str, where: str) -> tuple[str, Prompt | None, list[Mistake]]:
    template = text.replace("\r\n", "\n").replace("\r", "\n")
    try:
        prompt = parse_prompt(template)
    except PromptSyntaxError as error:
        return template, None, [Mistake(where, str(error))]
    if prompt.refers_to_columns:
        return template, prompt, []
    message = (
        "refers to no column, so every row would get the same answer. Write a column as "
        "{{ column }}, in a prompt file or inside {% raw %} in the .sql file: in a YAML file dbt "
        "renders it to nothing"
    )
    return template, prompt, [Mistake(where, message)]


def _read_unique_key(value: object) -> tuple[str, ...] | None:
    if value is None:
        return ()
    names = value if isinstance(value, (list, tuple)) else [value]
    if names and all(isinstance(name, str) and name for name in names):
        return tuple(_unquoted(name) for name in names)
    return None


def _unquoted(name: str) -> str:
    """Take off the quotes that dbt's own SQL needs around a name with blanks or capitals."""
    if len(name) > 2 and name[0] == name[-1] == '"':
        return name[1:-1].replace('""', '"')
    return name


def check_columns(declaration: Declaration, columns: Sequence[str]) -> BoundPrompt:
    """Bind the prompt to the columns that the model selects, and check the names against them.

    Raises:
        SpecError: the prompt or the unique key names a column that is not selected, an output has
            the name of a column, or a column has a name that batchsql adds itself.
    """
    mistakes = []
    bound = None
    try:
        bound = declaration.prompt.bind(columns, declaration.normalize)
    except UnknownColumnsError as error:
        mistakes.append(Mistake("prompt", str(error)))
    lower = {column.casefold(): column for column in columns}
    for field in declaration.returns.visible:
        if field.name.casefold() in lower:
            mistakes.append(
                Mistake(
                    f"returns.{field.name}",
                    f"the model selects a column {lower[field.name.casefold()]!r} already; rename "
                    "the output or the column",
                )
            )
    for name in ("llm_status", "llm_request_id"):
        if name in lower:
            mistakes.append(
                Mistake(f"column {lower[name]}", "batchsql adds a column of this name; rename it")
            )
    for column in columns:
        if column.casefold().startswith("__batchsql"):
            mistakes.append(
                Mistake(f"column {column}", "names from __batchsql on are taken; rename it")
            )
    for key in declaration.unique_key:
        if key not in columns and key.casefold() not in lower:
            mistakes.append(
                Mistake(
                    "unique_key",
                    f"the model does not select {key!r}; it selects {', '.join(columns)}",
                )
            )
    if mistakes or bound is None:
        raise SpecError(declaration.subject, mistakes)
    return bound
