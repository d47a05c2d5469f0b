"""Whether rows may go where a declaration sends them, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from batchsql.backends import registry
from batchsql.declare.spec import Declaration
from batchsql.errors import Mistake, SpecError, SystemicError
from batchsql.types import ModelRef, RouteChoice, Runner


def place(declaration: Declaration) -> Declaration:
    """Return the declaration with the model that is to answer it.

    That is the alternative engine where rows may not leave, or where ``route`` is ``engine``, and
    the declared model would be asked outside.

    Raises:
        SpecError: the declared model may not be asked, or cannot be asked the declared way.
    """
    mistakes: list[Mistake] = []
    if _needs_engine(declaration):
        alternative = declaration.alternatives.get("engine")
        if alternative is None:
            mistakes.append(_no_engine(declaration))
        else:
            # Declared prices are those of the declared model.
            model, engine = alternative.model, alternative.engine
            declaration = replace(declaration, model=model, engine=engine, prices=None)
            mistakes += registry.check_model(model, declaration.params, engine)
            mistakes += _not_inside(declaration)
    route, model = declaration.route, declaration.model
    runs_here = registry.is_engine(model)
    if runs_here and route in (RouteChoice.BATCH, RouteChoice.ONLINE):
        mistakes.append(
            Mistake("route", f"got {route.value!r}, but {model} runs here; write engine or auto")
        )
    elif route is RouteChoice.BATCH and not registry.has_batches(model, declaration.engine):
        mistakes.append(
            Mistake("route", f"got 'batch', but {model.provider} offers none; write online or auto")
        )
    # A batch is detached already, and which of both is meant should not hang on the job's size.
    may_be_batch = route is RouteChoice.BATCH or (
        route is RouteChoice.AUTO and registry.has_batches(model, declaration.engine)
    )
    if declaration.runner is Runner.DETACHED and may_be_batch:
        mistakes.append(
            Mistake(
                "runner",
                "got 'detached', but no worker is needed for batches; write route: online, or "
                "leave runner out",
            )
        )
    if mistakes:
        raise SpecError(declaration.subject, mistakes)
    return declaration


def check_egress(declaration: Declaration) -> None:
    """Refuse to send rows that may not leave. The last look before a backend is opened.

    Raises:
        SystemicError: the model is asked outside.
    """
    if not may_ask(declaration.model, declaration.engine, egress=declaration.egress):
        raise SystemicError(
            f"{declaration.subject}: egress is false, but {declaration.model} is asked outside; "
            "nothing was sent"
        )


def may_ask(model: ModelRef, engine: Mapping[str, Any], *, egress: bool) -> bool:
    """Return whether rows may go to a model, which ``egress`` says of the rows."""
    return egress or registry.stays_inside(model, engine)


def _needs_engine(declaration: Declaration) -> bool:
    if declaration.route is RouteChoice.ENGINE:
        return not registry.is_engine(declaration.model)
    inside = registry.stays_inside(declaration.model, declaration.engine)
    return not declaration.egress and not inside


def _not_inside(declaration: Declaration) -> list[Mistake]:
    """Return what keeps the alternative from being asked in the declared model's place."""
    model = declaration.model
    if registry.is_engine(model):
        return []
    if declaration.route is RouteChoice.ENGINE:
        said = "which does not run in this process, as route: engine wants it"
    elif not registry.stays_inside(model, declaration.engine):
        said = (
            "which is asked outside; accepted: local/..., vllm/..., or an openai_compatible server "
            "of yours with engine: {internal: true}"
        )
    else:
        return []
    return [Mistake("alternatives.engine", f"got {str(model)!r}, {said}")]


def _no_engine(declaration: Declaration) -> Mistake:
    model = declaration.model
    if declaration.route is RouteChoice.ENGINE:
        return Mistake(
            "route",
            f"got 'engine', but {model} does not run here; declare local/... or vllm/... as the "
            "model, or as alternatives: {engine: ...}",
        )
    return Mistake(
        "egress",
        f"is false, but {model} is asked outside; declare an engine (local/... or vllm/...) as the "
        "model or as alternatives: {engine: ...}, or an openai_compatible server of yours with "
        "engine: {internal: true}",
    )
