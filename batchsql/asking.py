"""What a shard or a queue asks, read back from the ledger where no declaration is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from batchsql.declare.keys import parse_asked
from batchsql.declare.returns import Returns
from batchsql.judging import Judge, PriceOf
from batchsql.types import Call, ModelRef, Route
from batchsql.warehouse.ledger import Ledger, SpecRow
from batchsql.warehouse.shards import parse_messages

OpenPrices = Callable[[ModelRef, "Mapping[str, float] | None", "str | None"], PriceOf]
"""Opens what a try costs, from the model, the declared prices and the service tier."""

_MAX_ATTEMPTS = 3  # the default of a declaration


@dataclass(frozen=True, slots=True)
class Asked:
    """A spec as it is asked: by which model, with what call, under which settings."""

    model: ModelRef
    engine: Mapping[str, Any]
    returns: Returns
    call: Call
    spec: SpecRow
    settings: Mapping[str, Any]

    def judge(self, route: Route, version: str, open_prices: OpenPrices) -> Judge:
        """Return what judges the answers that come by a route from some version of an engine."""
        # Batches have one price, whatever tier the others ask for.
        tier = None if route is Route.BATCH else self.call.params.get("service_tier")
        return Judge(
            self.returns,
            int(self.settings.get("max_attempts", _MAX_ATTEMPTS)),
            route,
            version,
            open_prices(self.model, self.settings.get("prices"), tier),
        )


def read_asked(ledger: Ledger, spec_version: str, model: str, settings: Mapping[str, Any]) -> Asked:
    """Read what a spec asks; ``settings`` is what ``shard_settings`` made of its declaration."""
    spec = ledger.read_spec(spec_version)
    returns = parse_asked(orjson.loads(spec.returns))
    ref = parse_model(model)
    call = Call(
        model=ref,
        params=orjson.loads(spec.params),
        schema=returns.object_schema(),
        max_tokens=int(settings.get("max_tokens") or returns.default_max_tokens()),
        prefix_messages=len(parse_messages(spec.prefix)),
    )
    return Asked(ref, settings.get("engine", {}), returns, call, spec, settings)


def parse_model(text: str) -> ModelRef:
    """Return a model from its text ``provider/name``, as the ledger keeps it."""
    provider, _, name = text.partition("/")
    return ModelRef(provider, name)
