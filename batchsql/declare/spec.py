"""What the user declares under ``meta.llm``: read once, checked whole, frozen.

Every mistake is collected, so that one look mends them all. Nothing here touches a warehouse or a
model; what needs the model's columns is checked by ``check_columns`` as soon as they are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchsql.declare.config import read_config
from batchsql.declare.durations import Deadline
from batchsql.declare.normalize import Normalize
from batchsql.declare.prompt import (
    BoundPrompt,
    Prompt,
    PromptSyntaxError,
    UnknownColumnsError,
    parse_prompt,
)
from batchsql.declare.returns import Returns, parse_returns
from batchsql.declare.routing import OnComplete
from batchsql.errors import Mistake, SpecError
from batchsql.types import ModelRef, OnPending, RouteChoice, Runner

CheckModel = Callable[[ModelRef, Mapping[str, Any], Mapping[str, Any]], list[Mistake]]
"""Looks at the provider, the parameters and the engine options; returns the mistakes."""

CheckPrices = Callable[[object], list[Mistake]]
"""Looks at the declared prices; returns the mistakes."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another model that may be asked, with its engine options."""

    model: ModelRef
    engine: Mapping[str, Any]


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
    flush_rows: int | None
    flush_seconds: float
    lease_seconds: float
    route: RouteChoice
    runner: Runner
    egress: bool
    alternatives: Mapping[str, Alternative]
    urgent_when: str | None
    online_up_to: int
    max_batch_requests: int | None
    retry_last_online: bool
    deadline: Deadline | None
    rescue_before_seconds: float
    rescue_max_usd: float
    wait_seconds: float
    on_pending: OnPending
    on_complete: OnComplete | None
    prices: Mapping[str, float] | None
    allow_fresh_ledger: bool
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
    check_prices: CheckPrices = lambda value: [],
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
        check_prices: knows the kinds of tokens that have a price.
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

    config, config_mistakes = read_config(merged)
    mistakes += config_mistakes
    broken = {mistake.where.split(".")[0] for mistake in config_mistakes}

    model = None
    if "model" not in broken:
        model, found = _read_model("model", merged["model"])
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
    alternatives: dict[str, Alternative] = {}
    if "alternatives" not in broken:
        for kind, given in merged.get("alternatives", {}).items():
            other: Mapping[str, Any] = {"model": given} if isinstance(given, str) else given
            ref, found = _read_model(f"alternatives.{kind}", other["model"])
            mistakes += found
            if ref is not None:
                alternatives[kind] = Alternative(ref, other.get("engine", {}))
    if "prices" not in broken and merged.get("prices") is not None:
        mistakes += check_prices(merged["prices"])
    if not broken & {"rescue_max_usd", "deadline"}:
        mistakes += _check_rescue(merged)
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
        route=config.route,
        runner=config.runner,
        egress=config.egress,
        alternatives=alternatives,
        urgent_when=config.urgent_when,
        online_up_to=config.online_up_to,
        max_batch_requests=config.max_batch_requests,
        retry_last_online=config.retry_last_online,
        # Under route: batch nothing goes online, so what is cancelled would only be repeated.
        deadline=None if config.route is RouteChoice.BATCH else config.deadline,
        rescue_before_seconds=config.rescue_before,
        rescue_max_usd=config.rescue_max_usd,
        wait_seconds=config.wait,
        on_pending=config.on_pending,
        on_complete=config.on_complete,
        prices=config.prices,
        allow_fresh_ledger=config.allow_fresh_ledger,
        unique_key=keys or (),
    )


def _check_rescue(merged: Mapping[str, Any]) -> list[Mistake]:
    """Look for money set aside for a rescue that never comes."""
    allowed = merged.get("rescue_max_usd", 0)
    if not allowed or merged.get("deadline") is not None:
        return []
    message = f"got {allowed!r} but there is no deadline to rescue for; give one, or leave this out"
    return [Mistake("rescue_max_usd", message)]


def _read_model(where: str, text: str) -> tuple[ModelRef | None, list[Mistake]]:
    provider, slash, name = text.partition("/")
    if not (provider and slash and name):
        return None, [
            Mistake(where, f"got {text!r}; write provider/name, such as 'local/smollm2-135m'")
        ]
    return ModelRef(provider, name), []


def _read_prompt(value: str, project_root: Path) -> tuple[str, Prompt | None, list[Mistake]]:
    if "\n" in value or "{{" in value or "{%" in value:
        return parse_template(value, "prompt")
    root = project_root.resolve()
    try:
        path = (root / value).resolve()
        if not path.is_relative_to(root):
            message = f"got {value!r}, which is outside the project; move the file into it"
            return "", None, [Mistake("prompt", message)]
        return parse_template(path.read_text(encoding="utf-8"), f"prompt {value}")
    except UnicodeDecodeError:
        return "", None, [Mistake(f"prompt {value}", "is not UTF-8 text; save it as UTF-8")]
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        reason = f"there is no file {value!r:.80} in the project {root.name}"
    except (OSError, ValueError) as error:  # a text that is too long for a path, for example
        reason = f"cannot read a file {value!r:.80} ({getattr(error, 'strerror', None) or error})"
    hint = "; in a YAML file dbt renders {{ column }} to nothing, so write the prompt as a file"
    return "", None, [Mistake("prompt", f"{reason}{hint if ' ' in value else ''}")]


def parse_template(text: str, where: str) -> tuple[str, Prompt | None, list[Mistake]]:
    """Return the text of a prompt as it is hashed, the prompt parsed, and the mistakes found."""
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
