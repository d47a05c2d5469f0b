"""Which providers there are, what they accept, and how their backends are opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchsql.backends import (
    anthropic,
    anthropic_batch,
    aws,
    bedrock,
    bedrock_batch,
    google,
    google_batch,
    local,
    openai,
    openai_batch,
    vllm,
    vllm_ray,
)
from batchsql.backends.base import StreamBackend
from batchsql.backends.batch import BatchBackend
from batchsql.backends.endpoint import ONLINE_OPTIONS
from batchsql.backends.params import Params, check_values
from batchsql.errors import Mistake, SpecError
from batchsql.types import ModelRef

Opener = Callable[[ModelRef, Mapping[str, Any], Path], StreamBackend]
BatchOpener = Callable[[ModelRef, Mapping[str, Any], Path], BatchBackend | None]
"""Returns None where these options name a server that offers no batches."""

CheckOptions = Callable[[Mapping[str, Any]], list[Mistake]]
"""Looks at the engine options together, once each is known and of its type."""


@dataclass(frozen=True, slots=True)
class _Provider:
    opener: Opener
    params: Params
    options: Params | None
    check_options: CheckOptions = lambda engine: []
    batch_opener: BatchOpener | None = None
    is_engine: bool = False
    batch_option: str | None = None
    """The engine option without which there are no batches."""


# A provider's module imports its SDK or engine only inside its functions, so naming it is cheap.
_PROVIDERS: dict[str, _Provider] = {
    "local": _Provider(local.open_local, local.PARAMS, local.ENGINE_OPTIONS, is_engine=True),
    "openai": _Provider(
        openai.open_openai,
        openai.PARAMS,
        ONLINE_OPTIONS,
        openai.check_openai,
        openai_batch.open_openai_batch,
    ),
    "openai_compatible": _Provider(
        openai.open_compatible,
        openai.COMPATIBLE_PARAMS,
        openai.COMPATIBLE_OPTIONS,
        openai.check_compatible,
        openai_batch.open_compatible_batch,
        batch_option="batches",
    ),
    "google": _Provider(
        google.open_google,
        google.PARAMS,
        ONLINE_OPTIONS,
        google.check_google,
        google_batch.open_google_batch,
    ),
    "anthropic": _Provider(
        anthropic.open_anthropic,
        anthropic.PARAMS,
        ONLINE_OPTIONS,
        anthropic.check_anthropic,
        anthropic_batch.open_anthropic_batch,
    ),
    "bedrock": _Provider(
        bedrock.open_bedrock,
        bedrock.PARAMS,
        aws.OPTIONS,
        aws.check_aws,
        bedrock_batch.open_bedrock_batch,
    ),
    "vllm": _Provider(vllm_ray.open_engine, vllm.PARAMS, None, vllm.check_vllm, is_engine=True),
}


def register(
    provider: str,
    opener: Opener,
    params: Params,
    options: Params | None = None,
    batch_opener: BatchOpener | None = None,
    *,
    is_engine: bool = False,
) -> None:
    """Make a provider known, or replace it. For plugins and tests.

    ``options`` are the accepted keys of ``engine``; without them the opener checks for itself.
    """
    _PROVIDERS[provider] = _Provider(
        opener, params, options, batch_opener=batch_opener, is_engine=is_engine
    )


def known_providers() -> tuple[str, ...]:
    """Return the names that may stand before the slash of a model, sorted."""
    return tuple(sorted(_PROVIDERS))


def check_model(
    model: ModelRef, params: Mapping[str, Any], engine: Mapping[str, Any]
) -> list[Mistake]:
    """Return a mistake for an unknown provider, and for each parameter or option it refuses."""
    provider = _PROVIDERS.get(model.provider)
    if provider is None:
        return [_unknown(model.provider)]
    mistakes = check_values(params, provider.params, "params")
    if provider.options is not None:
        mistakes += check_values(engine, provider.options, "engine")
    return mistakes + provider.check_options(engine)


def is_engine(model: ModelRef) -> bool:
    """Return whether a model is loaded by the process that asks it."""
    provider = _PROVIDERS.get(model.provider)
    return provider is not None and provider.is_engine


def stays_inside(model: ModelRef, engine: Mapping[str, Any]) -> bool:
    """Return whether rows sent to a model stay on machines that the user runs."""
    return is_engine(model) or engine.get("internal") is True


def has_batches(model: ModelRef, engine: Mapping[str, Any]) -> bool:
    """Return whether a model's provider offers batches under these options."""
    provider = _PROVIDERS.get(model.provider)
    if provider is None or provider.batch_opener is None:
        return False
    return provider.batch_option is None or bool(engine.get(provider.batch_option))


def open_backend(model: ModelRef, engine: Mapping[str, Any], project_root: Path) -> StreamBackend:
    """Return the backend that answers for a model.

    Raises:
        SpecError: the provider is unknown, or an engine option is.
        MissingExtraError: a package that the provider needs is not installed.
        SystemicError: the model cannot be found.
    """
    if model.provider not in _PROVIDERS:
        raise SpecError(f"model {model}", [_unknown(model.provider)])
    return _PROVIDERS[model.provider].opener(model, engine, project_root)


def open_batch_backend(
    model: ModelRef, engine: Mapping[str, Any], project_root: Path
) -> BatchBackend | None:
    """Return what brings many requests of a model to its provider at once, or None.

    Raises:
        SpecError: the provider is unknown, or an engine option is.
        MissingExtraError: a package that the provider needs is not installed.
    """
    if model.provider not in _PROVIDERS:
        raise SpecError(f"model {model}", [_unknown(model.provider)])
    opener = _PROVIDERS[model.provider].batch_opener
    return None if opener is None else opener(model, engine, project_root)


def _unknown(provider: str) -> Mistake:
    known = ", ".join(known_providers())
    message = (
        f"the provider {provider!r} is not known; known: {known}. Write the model as provider/name"
    )
    return Mistake("model", message)
