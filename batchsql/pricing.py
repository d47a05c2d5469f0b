"""Opens the prices of a model as they are today."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone

from batchsql.judging import PriceOf
from batchsql.plan.cost import price_book
from batchsql.types import ModelRef


def open_prices(
    model: ModelRef, declared: Mapping[str, float] | None, service_tier: str | None = None
) -> PriceOf:
    """Return what a try costs, by the prices of today or those declared."""
    return price_book(
        model, declared, at=datetime.now(timezone.utc), service_tier=service_tier
    ).cost_usd
