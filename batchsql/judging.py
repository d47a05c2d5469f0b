"""Turn what a backend says of a request into the try that the ledger records."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from batchsql.declare.returns import Returns
from batchsql.types import Completion, Outcome, Route, Usage
from batchsql.validate.structure import AnswerValidator, safe_text
from batchsql.warehouse.shards import Attempt, Tries

MAX_TRANSIENT_FAILURES = 10
"""A request whose every try fails for no fault of its own ends somewhere too."""

_MAX_MODEL_CHARS = 200

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

    def attempt(self, completion: Completion, shard_id: str, before: Tries) -> Attempt:
        """Return the try that a completion is, after those before it. Never raises, whatever its
        text holds.
        """
        verdict = self._validator.check(completion)
        outcome, answer = verdict.outcome, verdict.answer
        model = completion.model_reported
        if model is not None:
            model = safe_text(model, _MAX_MODEL_CHARS)
        return Attempt(
            shard_id=shard_id,
            request_key=completion.request_key,
            attempt_number=before.attempt_number + 1,
            outcome=outcome,
            is_final=self._is_final(outcome, before),
            answer=answer,
            checksum=None if answer is None else hashlib.sha256(answer.encode()).hexdigest()[:32],
            error=verdict.error,
            raw_output=verdict.raw,
            finish_reason=completion.finish_reason,
            usage=completion.usage,
            cost_usd=self.price_of(self._route, completion.usage, model),
            model_reported=model,
            engine_version=self._version,
            started_at=completion.started_at,
            finished_at=completion.finished_at,
            route=self._route,
        )

    def _is_final(self, outcome: Outcome, before: Tries) -> bool:
        """Whether this try was the last that the request's budget allows."""
        if outcome is Outcome.OK:
            return False
        if before.is_dead:
            return True
        if outcome is Outcome.TRANSIENT:
            return before.transient_failures + 1 >= MAX_TRANSIENT_FAILURES
        return not outcome.is_retryable or before.item_failures + 1 >= self._max_attempts
