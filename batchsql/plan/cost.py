"""What tries cost in USD: published prices from the package genai-prices, or the user's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import TYPE_CHECKING

from batchsql.errors import Mistake, show_value
from batchsql.types import ModelRef, Route, Usage

if TYPE_CHECKING:
    from genai_prices.types import PriceCalculation

# Our provider's name to that of genai-prices. What is not here has no published price: the model of
# a compatible server has the name that its operator chose.
_CATALOGUE = {"openai": "openai", "anthropic": "anthropic", "google": "google", "bedrock": "aws"}
_STANDARD_TIERS = frozenset({"auto", "default", "standard", "standard_only"})


@dataclass(frozen=True, slots=True)
class Rates:
    """USD per million tokens, by kind. ``input`` is for what no cache has to do with."""

    input: float
    output: float
    cached: float
    cache_write: float
    cache_write_1h: float

    def cost_usd(self, usage: Usage) -> float:
        """Return what the tokens cost; never less than zero, whatever a provider reports."""
        written = usage.cache_write_tokens
        written_1h = usage.cache_write_1h_tokens
        plain = usage.input_tokens - usage.cached_tokens - written
        return (
            max(plain, 0) * self.input
            + usage.cached_tokens * self.cached
            + max(written - written_1h, 0) * self.cache_write
            + written_1h * self.cache_write_1h
            + usage.output_tokens * self.output
        ) / 1e6


_KINDS = tuple(each.name for each in fields(Rates))
_ACCEPTED = _KINDS + tuple(f"batch_{kind}" for kind in _KINDS)


@dataclass(frozen=True, slots=True)
class _Quote:
    """The rates by size of the prompt: each from so many input tokens on, the largest first.

    The whole prompt is paid at the rate of its size, not only what lies above.
    """

    tiers: tuple[tuple[int, Rates], ...]
    is_estimate: bool = False

    def at(self, input_tokens: float) -> Rates:
        for from_tokens, rates in self.tiers:
            if input_tokens >= from_tokens:
                return rates
        return self.tiers[-1][1]


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of one model at one time. Made by ``price_book``."""

    model: ModelRef
    at: datetime
    declared: Mapping[str, float]
    service_tier: str | None = None
    # A lookup takes 0.2 ms, a try must take a microsecond, and a run sees two or three names.
    _quotes: dict[tuple[Route, str | None], _Quote | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def cost_usd(
        self, route: Route, usage: Usage, model_reported: str | None = None
    ) -> float | None:
        """Return what one try cost, or None where no price is known.

        The price is that of the model as reported, where it is listed, or else of the one that was
        asked for. The user's own prices hold for both.
        """
        quote = self._quote(route, model_reported)
        return None if quote is None else quote.at(usage.input_tokens).cost_usd(usage)

    def estimate_usd(
        self, route: Route, requests: int, input_tokens: int, output_tokens: int
    ) -> float | None:
        """Return what requests would cost with so many tokens in all, or None where unknown.

        Counts on no cache. Where the price depends on the size of the prompt, takes the average.
        """
        quote = self._quote(route, None)
        if quote is None:
            return None
        rates = quote.at(input_tokens / max(requests, 1))
        return rates.cost_usd(Usage(input_tokens=input_tokens, output_tokens=output_tokens))

    def is_estimate(self, route: Route, model_reported: str | None = None) -> bool:
        """Return whether the price on this route is derived by rule rather than listed."""
        quote = self._quote(route, model_reported)
        return quote is not None and quote.is_estimate

    def describe(self) -> str:
        """Return in a few words where the prices come from."""
        if self.declared:
            return "declared prices"
        if self._quote(Route.ONLINE, None) is None:
            return "no price known"
        import genai_prices

        return f"genai-prices {genai_prices.__version__}"

    def _quote(self, route: Route, model_reported: str | None) -> _Quote | None:
        key = (route, model_reported)
        try:
            return self._quotes[key]
        except KeyError:
            return self._quotes.setdefault(key, self._find_quote(route, model_reported))

    def _find_quote(self, route: Route, model_reported: str | None) -> _Quote | None:
        if self.declared:
            return _declared_quote(self.model.provider, route, self.declared)
        provider = self.model.provider
        if provider not in _CATALOGUE:
            return None
        names = [model_reported, self.model.name] if model_reported else [self.model.name]
        if provider == "bedrock":
            # Its ids say more than its models report: `global.` costs less than one region.
            names.reverse()
        quotes = (_listed_quote(provider, n, route, self.service_tier, self.at) for n in names)
        return next((quote for quote in quotes if quote is not None), None)


def price_book(
    model: ModelRef,
    overrides: Mapping[str, float] | None = None,
    *,
    at: datetime,
    service_tier: str | None = None,
) -> Prices:
    """Return the prices of a model: the user's own where there are any, or else the listed ones.

    Reads only data bundled with genai-prices; nothing is fetched.

    Args:
        overrides: USD per million tokens, as ``check_prices`` accepts them. ``input`` and
            ``output`` are always there. Not given, ``cached`` is the price of input, and cache
            writes are 1.25 times it (2 times for an hour), as Anthropic and OpenAI publish; what
            is not given for batches follows ``_half``.
        at: When the tries are made; prices change. Without a time zone it is UTC.
        service_tier: The parameter of that name, where the user set it, such as ``flex``. It
            changes online prices only.
    """
    return Prices(model, at, dict(overrides or {}), service_tier)


def check_prices(value: object) -> list[Mistake]:
    """Return a mistake for each wrong entry of the prices that a user declares."""
    accepted = ", ".join(_ACCEPTED)
    if not isinstance(value, Mapping):
        message = f"got {show_value('prices', value)}; write USD per million tokens by kind"
        return [Mistake("prices", f"{message}: {accepted}")]
    mistakes = []
    for name, price in value.items():
        where = f"prices.{name}"
        if name not in _ACCEPTED:
            mistakes.append(Mistake(where, f"no price has that name; accepted: {accepted}"))
        elif not _is_price(price):
            message = (
                f"got {show_value('price', price)}; accepted: USD per million tokens, 0 or more"
            )
            mistakes.append(Mistake(where, message))
    missing = [name for name in ("input", "output") if name not in value]
    return mistakes + [
        Mistake(f"prices.{name}", "is missing; declared prices need input and output")
        for name in missing
    ]


def estimate_tokens(text_bytes: int) -> int:
    """Return roughly how many tokens a text in UTF-8 has: one for four bytes, rounded up.

    Good for plans, not for bills: English prose has a little fewer, code and numbers have more.
    """
    return -(-text_bytes // 4)


def _is_price(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 <= value < math.inf


def _half(rates: Rates, provider: str) -> Rates:
    """Return what a batch costs where no batch price is listed: half, save for cached input.

    OpenAI, Anthropic, Google and Bedrock publish half the price for their batches. Anthropic halves
    what is read from a cache too; for several models of the others it stays as it is, so it is
    left, up to the price of other input in a batch.
    """
    halved = Rates(**{kind: getattr(rates, kind) / 2 for kind in _KINDS})
    if provider == "anthropic":
        return halved
    return replace(halved, cached=min(rates.cached, halved.input))


def _declared_quote(provider: str, route: Route, declared: Mapping[str, float]) -> _Quote:
    plain = declared["input"]
    writes = {"cache_write": 1.25 * plain, "cache_write_1h": 2 * plain}
    given = {kind: declared[kind] for kind in _KINDS if kind in declared}
    rates = Rates(**{"cached": plain, **writes, **given})
    if route is not Route.BATCH:
        return _Quote(((0, rates),))
    batch = {kind: declared[f"batch_{kind}"] for kind in _KINDS if f"batch_{kind}" in declared}
    is_estimate = not {"input", "output"} <= batch.keys()
    return _Quote(((0, replace(_half(rates, provider), **batch)),), is_estimate)


def _listed_quote(
    provider: str, name: str, route: Route, service_tier: str | None, at: datetime
) -> _Quote | None:
    """Return the price that genai-prices lists for a model, or None where it does not know it."""
    # Importing it takes 0.2 s.
    from genai_prices import Usage as Tokens
    from genai_prices import calc_price

    if route is Route.BATCH:
        context = {"processing": "batch"}
    elif service_tier is None or service_tier in _STANDARD_TIERS:
        context = {}
    else:
        context = {"service_tier": service_tier}

    def price(**tokens: int) -> PriceCalculation:
        return calc_price(
            Tokens(**tokens),
            name,
            provider_id=_CATALOGUE[provider],
            genai_request_timestamp=at,
            price_context=context,
        )

    try:
        found = price()
    except LookupError:
        return None
    if found.model_price.input_mtok is None or found.model_price.output_mtok is None:
        return None
    tiers = [(start, _listed_rates(price, max(start, 1))) for start in _tier_starts(found)]
    is_estimate = bool(context) and not _is_listed(found, context, at)
    if is_estimate and route is Route.BATCH:
        tiers = [(start, _half(rates, provider)) for start, rates in tiers]
    return _Quote(tuple(tiers), is_estimate)


def _listed_rates(price: Callable[..., PriceCalculation], tokens: int) -> Rates:
    """Return the rates of a prompt of so many tokens.

    They come from prompts that are all of one kind, since the package's own arithmetic knows best
    which of its prices holds for a kind that has none of its own.
    """

    def input_rate(**kinds: int) -> float:
        return float(price(input_tokens=tokens, **kinds).input_price * 1_000_000 / tokens)

    output = price(input_tokens=tokens, output_tokens=tokens).output_price
    return Rates(
        input=input_rate(),
        output=float(output * 1_000_000 / tokens),
        cached=input_rate(cache_read_tokens=tokens),
        cache_write=input_rate(cache_write_tokens=tokens),
        cache_write_1h=input_rate(cache_write_tokens=tokens, cache_write_1h_tokens=tokens),
    )


def _tier_starts(found: PriceCalculation) -> list[int]:
    """Return from how many input tokens on each rate holds, the largest first, zero the last."""
    from genai_prices.types import TieredPrices

    tiered = [
        price for price in vars(found.model_price).values() if isinstance(price, TieredPrices)
    ]
    # A tier holds above its start.
    return sorted({0, *(tier.start + 1 for price in tiered for tier in price.tiers)}, reverse=True)


def _is_listed(found: PriceCalculation, context: Mapping[str, str], at: datetime) -> bool:
    """Return whether the price found is the one for this context.

    genai-prices answers with the standard price, without a word, where it lists none for the
    context, where the time is before the listing begins, and for a model of another provider.
    """
    is_own = any(model is found.model for model in found.provider.models)
    return is_own and any(
        variant.when == context and (variant.constraint is None or variant.constraint.active(at))
        for variant in found.model.price_variants or ()
    )
