"""What the provider would have charged for, request by request."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import orjson


def hash_content(content: object) -> str:
    """Return a digest of a JSON value that does not depend on the order of its keys."""
    encoded = orjson.dumps(content, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Charge:
    """One answer that was billed.

    ``body_hash`` is of the whole request body, ``prompt_hash`` of the model and the text alone, so
    that the same question by another route (with other cache marks, say) is recognised.
    ``input_tokens`` includes the cached ones.
    """

    provider: str
    route: str  # "online" or "batch"
    model: str
    body_hash: str
    prompt_hash: str
    custom_id: str | None
    batch_id: str | None
    finish: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int


class Bill:
    """Every charge in the order in which it arose. Only answers are billed, also useless ones."""

    def __init__(self) -> None:
        self.charges: list[Charge] = []

    def add(self, charge: Charge) -> None:
        """Bill an answer."""
        self.charges.append(charge)

    @property
    def by_body(self) -> Counter[str]:
        """How often each request body was billed."""
        return Counter(each.body_hash for each in self.charges)

    @property
    def by_prompt(self) -> Counter[str]:
        """How often each question to a model was billed, whatever the route."""
        return Counter(each.prompt_hash for each in self.charges)

    @property
    def by_custom_id(self) -> Counter[str]:
        """How often each custom id was billed."""
        return Counter(each.custom_id for each in self.charges if each.custom_id is not None)

    @property
    def paid_twice(self) -> Mapping[str, int]:
        """The questions that were billed more than once, with how often."""
        return {key: count for key, count in self.by_prompt.items() if count > 1}

    def document(self, *, with_charges: bool = False) -> dict[str, Any]:
        """Return the bill as a JSON value."""
        done = self.charges
        content: dict[str, Any] = {
            "billed": len(done),
            "distinct_bodies": len(self.by_body),
            "distinct_prompts": len(self.by_prompt),
            "paid_twice": self.paid_twice,
            "by_provider": Counter(f"{each.provider}/{each.route}" for each in done),
            "by_finish": Counter(each.finish for each in done),
            "input_tokens": sum(each.input_tokens for each in done),
            "cached_tokens": sum(each.cached_tokens for each in done),
            "output_tokens": sum(each.output_tokens for each in done),
        }
        if with_charges:
            content["by_custom_id"] = self.by_custom_id
            content["charges"] = [asdict(each) for each in done]
        return content
