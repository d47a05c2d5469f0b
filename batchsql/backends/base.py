"""The protocols that backends satisfy, and their abilities as data."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from batchsql.types import Call, Completion, Request


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do and how it wants to be fed.

    ``slots`` is how many requests it works on at once; ``shard_requests`` how many requests one
    lease should cover; ``stays_inside`` whether rows never leave machines the user runs;
    ``is_engine`` whether the model is loaded by this process.
    """

    slots: int
    shard_requests: int
    stays_inside: bool
    is_engine: bool = False


class StreamBackend(Protocol):
    """A backend that answers requests one by one while more arrive: an engine or an endpoint."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def version(self) -> str:
        """Name and version of the software that answers, for the ledger."""
        ...

    def identity(self) -> Mapping[str, Any]:
        """Return what, beside the model's name, makes its answers: weights digest, template."""
        ...

    def complete(
        self, requests: Iterator[Request], call: Call, stop: threading.Event
    ) -> Iterator[Completion | None]:
        """Yield one completion for each request taken, in the order in which they finish.

        Loads whatever it needs before it takes the first request. Yields None about once a second
        while nothing finishes, so that the caller can flush what it has and renew its leases.
        Takes from ``requests`` only what its slots can hold, so a source that claims work lazily
        never claims more than is being worked on. Once ``stop`` is set it takes nothing more and
        ends within a second, dropping what is unfinished.

        Raises:
            SystemicError: every further request would fail too.
        """
        ...


@runtime_checkable
class HasFigures(Protocol):
    """A backend whose engine counts what it does."""

    def figures(self) -> Mapping[str, float]:
        """Return totals since the engine was loaded and gauges of now; nothing until then."""
        ...


def figures_of(backend: StreamBackend) -> Mapping[str, float]:
    """Return a backend's figures; nothing where it keeps none."""
    return backend.figures() if isinstance(backend, HasFigures) else {}
