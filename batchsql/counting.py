"""What was sent and what came of it, as numbers that add up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from batchsql.types import Outcome
from batchsql.warehouse.shards import Attempt


@dataclass(frozen=True, slots=True)
class ShipCounts:
    """What was sent and what came of it.

    ``tries`` counts what is written in the ledger, whichever run sent it; ``submitted`` the
    requests put into batches. ``cost_usd`` is of the tries whose price is known.
    """

    tries: int = 0
    ok: int = 0
    given_up: int = 0
    borrowed: int = 0
    submitted: int = 0
    batches: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cost_usd: float = 0.0

    def __add__(self, other: ShipCounts) -> ShipCounts:
        return ShipCounts(
            *(getattr(self, each.name) + getattr(other, each.name) for each in fields(self))
        )


def count_attempts(attempts: Iterable[Attempt]) -> ShipCounts:
    """Return the counts of tries that have been written."""
    tries = ok = given_up = input_tokens = output_tokens = cached_tokens = 0
    cost_usd = 0.0
    for attempt in attempts:
        tries += 1
        ok += attempt.outcome is Outcome.OK
        given_up += attempt.is_final
        input_tokens += attempt.usage.input_tokens
        output_tokens += attempt.usage.output_tokens
        cached_tokens += attempt.usage.cached_tokens
        cost_usd += attempt.cost_usd or 0.0
    return ShipCounts(
        tries=tries,
        ok=ok,
        given_up=given_up,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=cached_tokens,
        cost_usd=cost_usd,
    )
