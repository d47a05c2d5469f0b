"""Turn what a backend says of a request into the try that the ledger records."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from batchsql.declare.returns import Returns
from batchsql.types import Completion, Outcome, Route, Usage
from batchsql.validate.structure import AnswerValidator
from batchsql.warehouse.shards import Attempt, Claim

MAX_TRANSIENT_FAILURES = 10
"""A request whose every try fails for no fault of its own ends somewhere too."""

PriceOf = Callable[[Route, Usage, "str | None"], "float | None"]
"""The cost in USD of a try, from its route, tokens and the model as reported."""


class Judge:
    """Validates the answers of one spec and keeps count of each request's budget."""

    def __init__(
        self,
        returns: Returns,
        max_attempts: int,
        route: Route,
        version: str,
        price_of: PriceOf = lambda route, usage, model: None,
    ) -> None:
        self._validator = AnswerValidator(returns)
        self._max_attempts = max_attempts
        self._route = route
        self._version = version
        self.price_of = price_of

    def attempt(self, completion: Completion, shard_id: str, claim: Claim) -> Attempt:
        """Return the try that a completion is. Never raises, whatever its text holds."""
        verdict = self._validator.check(completion)
        outcome, answer = verdict.outcome, verdict.answer
        return Attempt(
            shard_id=shard_id,
            request_key=completion.request_key,
            attempt_number=claim.attempt_number + 1,
            outcome=outcome,
            is_final=self._is_final(outcome, claim),
            answer=answer,
            checksum=None if answer is None else hashlib.sha256(answer.encode()).hexdigest()[:32],
            error=verdict.error,
            raw_output=verdict.raw,
            finish_reason=completion.finish_reason.value if completion.finish_reason else None,
            usage=completion.usage,
            cost_usd=self.price_of(self._route, completion.usage, completion.model_reported),
            model_reported=completion.model_reported,
            engine_version=self._version,
            started_at=completion.started_at,
            finished_at=completion.finished_at,
            route=self._route,
        )

    def _is_final(self, outcome: Outcome, claim: Claim) -> bool:
        """Whether this try was the last that the request's budget allows."""
        if outcome is Outcome.OK:
            return False
        if outcome is Outcome.TRANSIENT:
            return claim.transient_failures + 1 >= MAX_TRANSIENT_FAILURES
        return not outcome.is_retryable or claim.item_failures + 1 >= self._max_attempts
