"""Which way requests travel: in a provider's batch, to its online endpoint, or to an engine."""

from __future__ import annotations

from dataclasses import dataclass

from batchsql.types import Route, RouteChoice

ONLINE_BELOW_SECONDS = 3600.0
"""No batch is promised within an hour, so a deadline that near wants the online endpoint."""


@dataclass(frozen=True, slots=True)
class RouteFacts:
    """What the choice depends on. Counts are of requests that could be sent now.

    ``batch_min`` is the fewest that the provider takes in a batch, 0 where it offers no batches.
    ``deadline_seconds`` is how long is left, if there is a deadline.
    """

    choice: RouteChoice
    is_engine: bool
    batch_min: int
    requests: int
    urgent: int
    online_up_to: int
    deadline_seconds: float | None
    retry_last_online: bool


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """How requests travel: urgent ones, those with their last try before them, and the rest."""

    lane: Route
    urgent: Route
    last_try: Route
    reason: str


def plan_route(facts: RouteFacts) -> RoutePlan:
    """Return how requests travel, and why; the first rule that holds decides."""

    def all_by(route: Route, reason: str) -> RoutePlan:
        return RoutePlan(route, route, route, reason)

    if facts.is_engine:
        return all_by(Route.ENGINE, "the model runs on machines of yours")
    if facts.choice is RouteChoice.ONLINE:
        return all_by(Route.ONLINE, "route: online")
    if facts.choice is RouteChoice.BATCH:
        return all_by(Route.BATCH, "route: batch")
    if not facts.batch_min:
        return all_by(Route.ONLINE, "the provider offers no batches")
    if facts.deadline_seconds is not None and facts.deadline_seconds <= ONLINE_BELOW_SECONDS:
        return all_by(Route.ONLINE, "the deadline is within an hour")
    rest = facts.requests - facts.urgent
    if rest <= facts.online_up_to:
        return all_by(Route.ONLINE, f"not more than online_up_to ({facts.online_up_to:,}) requests")
    if rest < facts.batch_min:
        return all_by(
            Route.ONLINE, f"fewer requests than the provider takes in a batch ({facts.batch_min:,})"
        )
    last_try = Route.ONLINE if facts.retry_last_online else Route.BATCH
    reason = "batches cost half"
    if facts.urgent:
        reason += f"; {facts.urgent:,} urgent ones go online"
    return RoutePlan(Route.BATCH, Route.ONLINE, last_try, reason)
