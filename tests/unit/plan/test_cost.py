"""Prices: worked out by hand from declared ones, and against genai-prices asked directly."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime, timedelta, timezone

import pytest
from genai_prices import Usage as Tokens
from genai_prices import calc_price

from batchsql.plan.cost import Prices, check_prices, estimate_tokens, price_book
from batchsql.types import ModelRef, Route, Usage

AT = datetime(2026, 11, 1, tzinfo=timezone.utc)
BATCH_CONTEXT = {"processing": "batch"}
# Of 1,000 input tokens 300 plain, 500 from a cache, 50 written for 5 minutes and 150 for an hour.
ALL_KINDS = Usage(
    input_tokens=1_000,
    output_tokens=200,
    cached_tokens=500,
    cache_write_tokens=200,
    cache_write_1h_tokens=150,
    reasoning_tokens=120,
)


def book(model: str, **options: object) -> Prices:
    provider, _, name = model.partition("/")
    return price_book(ModelRef(provider, name), at=AT, **options)  # type: ignore[arg-type]


def asked_directly(provider: str, name: str, usage: Usage, context: dict[str, str]) -> float:
    tokens = Tokens(
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cache_read_tokens=usage.cached_tokens,
        cache_write_tokens=usage.cache_write_tokens,
        cache_write_1h_tokens=usage.cache_write_1h_tokens,
    )
    found = calc_price(
        tokens, name, provider_id=provider, genai_request_timestamp=AT, price_context=context
    )
    return float(found.total_price)


DECLARED = {"input": 2.0, "output": 10.0, "cached": 0.2, "cache_write": 2.6, "cache_write_1h": 4.2}


@pytest.mark.parametrize(
    ("route", "prices", "usd_per_million"),
    [
        # (300 x 2 + 500 x 0.2 + 50 x 2.6 + 150 x 4.2 + 200 x 10)
        (Route.ONLINE, DECLARED, 600 + 100 + 130 + 630 + 2_000),
        (Route.ENGINE, DECLARED, 600 + 100 + 130 + 630 + 2_000),
        # Reads cost like input, writes 1.25 and 2 times that.
        (Route.ONLINE, {"input": 2, "output": 10}, 600 + 1_000 + 125 + 600 + 2_000),
        (Route.ONLINE, {"input": 0, "output": 0}, 0),
        # Half, but for cached input.
        (Route.BATCH, DECLARED, 300 + 100 + 65 + 315 + 1_000),
        (Route.BATCH, {"input": 2, "output": 10}, 300 + 500 + 62.5 + 300 + 1_000),
        (Route.BATCH, DECLARED | {"batch_cached": 0.1}, 300 + 50 + 65 + 315 + 1_000),
        (
            Route.BATCH,
            DECLARED
            | {"batch_input": 1.5, "batch_output": 7, "batch_cached": 0.3}
            | {"batch_cache_write": 1.6, "batch_cache_write_1h": 3},
            450 + 150 + 80 + 450 + 1_400,
        ),
        # What is said of batches leaves the other routes alone.
        (Route.ONLINE, DECLARED | {"batch_input": 9, "batch_output": 9}, 3_460),
    ],
)
def test_declared_prices_hold_for_each_kind_of_token(
    route: Route, prices: dict[str, float], usd_per_million: float
) -> None:
    cost = book("openai_compatible/mine", overrides=prices).cost_usd(route, ALL_KINDS, "whatever")
    assert cost == pytest.approx(usd_per_million / 1e6)


def test_declared_prices_of_anthropic_batches_halve_cached_input_too() -> None:
    cost = book("anthropic/claude-x", overrides=DECLARED).cost_usd(Route.BATCH, ALL_KINDS)
    assert cost == pytest.approx((300 + 50 + 65 + 315 + 1_000) / 1e6)


def test_declared_prices_win_over_listed_ones() -> None:
    prices = book("openai/gpt-5-mini", overrides={"input": 7, "output": 0})
    assert prices.cost_usd(
        Route.ONLINE, Usage(input_tokens=1_000_000), "gpt-5-mini"
    ) == pytest.approx(7)


def test_a_batch_price_is_an_estimate_unless_declared() -> None:
    whole = DECLARED | {"batch_input": 1, "batch_output": 5}
    assert book("vllm/x", overrides=DECLARED).is_estimate(Route.BATCH)
    assert not book("vllm/x", overrides=whole).is_estimate(Route.BATCH)
    assert not book("vllm/x", overrides=DECLARED).is_estimate(Route.ONLINE)


# Kinds that a provider does not bill apart are left out: it reports none of them.
READS = Usage(input_tokens=1_000, output_tokens=200, cached_tokens=500, reasoning_tokens=120)
HUGE = Usage(input_tokens=400_000, output_tokens=200, cached_tokens=500)


@pytest.mark.parametrize(
    ("model", "usage"),
    [
        ("openai/gpt-5-mini", READS),
        ("openai/gpt-5-mini-2025-08-07", READS),
        ("openai/gpt-4.1-mini", READS),
        ("openai/gpt-6-sol", ALL_KINDS),
        ("openai/gpt-6-sol", HUGE),
        ("anthropic/claude-sonnet-5", ALL_KINDS),
        ("anthropic/claude-haiku-5-5", ALL_KINDS),
        ("anthropic/claude-haiku-5-5", HUGE),
        ("google/gemini-2.5-flash", READS),
        ("google/gemini-2.5-pro", READS),
        ("google/gemini-2.5-pro", HUGE),
    ],
)
def test_listed_prices_agree_with_the_package_asked_directly(model: str, usage: Usage) -> None:
    provider, _, name = model.partition("/")
    prices = book(model)
    online, batch = (asked_directly(provider, name, usage, c) for c in ({}, BATCH_CONTEXT))
    assert batch < online, "the case is one of a model with batch prices"
    assert prices.cost_usd(Route.ONLINE, usage) == pytest.approx(online, rel=1e-12)
    assert prices.cost_usd(Route.BATCH, usage) == pytest.approx(batch, rel=1e-12)
    assert not prices.is_estimate(Route.BATCH)


def test_anthropic_cache_writes_for_an_hour_cost_more_than_for_five_minutes() -> None:
    # https://platform.claude.com/docs/en/build-with-claude/prompt-caching: 1.25 and 2 times input.
    def cost(**tokens: int) -> float:
        usage = Usage(input_tokens=1_000, **tokens)
        return prices.cost_usd(Route.BATCH, usage) or 0

    prices = book("anthropic/claude-sonnet-5")
    plain = cost()
    assert cost(cache_write_tokens=1_000) == pytest.approx(1.25 * plain)
    assert cost(cache_write_tokens=1_000, cache_write_1h_tokens=1_000) == pytest.approx(2 * plain)


@pytest.mark.parametrize("threshold", [200_000, 200_001])
def test_a_tier_begins_above_its_threshold_for_the_whole_prompt(threshold: int) -> None:
    usage = Usage(input_tokens=threshold, output_tokens=1)
    expected = asked_directly("google", "gemini-2.5-pro", usage, {})
    assert book("google/gemini-2.5-pro").cost_usd(Route.ONLINE, usage) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("model", "catalogue"),
    [
        # Not in the provider's batch table.
        ("anthropic/claude-3-haiku", "anthropic"),
        ("openai/gpt-3.5-turbo-instruct", "openai"),
        # Another provider's model, whose batch price does not hold here.
        ("google/claude-sonnet-5", "google"),
        # No batch price at all in the data.
        ("bedrock/global.anthropic.claude-sonnet-4-5-20250929-v1:0", "aws"),
    ],
)
def test_a_batch_price_that_is_not_listed_is_half_and_an_estimate(
    model: str, catalogue: str
) -> None:
    usage = Usage(input_tokens=1_000, output_tokens=200)
    prices = book(model)
    name = model.partition("/")[2]
    full = asked_directly(catalogue, name, usage, {})
    assert asked_directly(catalogue, name, usage, BATCH_CONTEXT) == full, "the trap is still there"
    assert prices.cost_usd(Route.BATCH, usage) == pytest.approx(full / 2)
    assert prices.is_estimate(Route.BATCH)
    assert not prices.is_estimate(Route.ONLINE)


def test_a_batch_before_its_price_is_listed_is_half_and_an_estimate() -> None:
    early = price_book(ModelRef("openai", "gpt-5-mini"), at=datetime(2026, 10, 13))
    usage = Usage(input_tokens=1_000_000)
    assert early.cost_usd(Route.BATCH, usage) == pytest.approx(0.125)
    assert early.is_estimate(Route.BATCH)
    later = price_book(ModelRef("openai", "gpt-5-mini"), at=datetime(2026, 10, 14))
    assert not later.is_estimate(Route.BATCH)


def test_an_estimated_batch_price_leaves_cached_input_whole() -> None:
    # Half of 0.40 and of 1.60; 0.10 for what was cached, which OpenAI leaves as it is.
    early = price_book(ModelRef("openai", "gpt-4.1-mini"), at=AT - timedelta(days=60))
    assert early.is_estimate(Route.BATCH)
    assert early.cost_usd(Route.BATCH, READS) == pytest.approx(
        (500 * 0.2 + 500 * 0.1 + 200 * 0.8) / 1e6
    )


def test_a_batch_price_listed_at_the_standard_price_is_believed() -> None:
    prices = book("openai/gpt-3.5-turbo-1106")
    usage = Usage(input_tokens=1_000, output_tokens=200)
    assert prices.cost_usd(Route.BATCH, usage) == prices.cost_usd(Route.ONLINE, usage)
    assert not prices.is_estimate(Route.BATCH)


@pytest.mark.parametrize("tier", [None, "auto", "default"])
def test_the_usual_service_tier_has_the_standard_price(tier: str | None) -> None:
    prices = book("openai/gpt-5-mini", service_tier=tier)
    expected = asked_directly("openai", "gpt-5-mini", READS, {})
    assert prices.cost_usd(Route.ONLINE, READS) == pytest.approx(expected)
    assert not prices.is_estimate(Route.ONLINE)


@pytest.mark.parametrize("tier", ["flex", "priority"])
def test_another_service_tier_has_its_own_price_online(tier: str) -> None:
    prices = book("openai/gpt-5-mini", service_tier=tier)
    expected = asked_directly("openai", "gpt-5-mini", READS, {"service_tier": tier})
    assert expected != asked_directly("openai", "gpt-5-mini", READS, {})
    assert prices.cost_usd(Route.ONLINE, READS) == pytest.approx(expected)
    usual = book("openai/gpt-5-mini")
    assert prices.cost_usd(Route.BATCH, READS) == usual.cost_usd(Route.BATCH, READS)


def test_a_service_tier_without_a_price_is_an_estimate() -> None:
    prices = book("openai/gpt-5-mini", service_tier="unheard_of")
    usual = book("openai/gpt-5-mini")
    assert prices.cost_usd(Route.ONLINE, READS) == usual.cost_usd(Route.ONLINE, READS)
    assert prices.is_estimate(Route.ONLINE)


@pytest.mark.parametrize(
    "model",
    [
        "openai/gpt-99",
        "openai/ft:gpt-4.1-mini-2025-04-14:acme::abc",
        "openai/text-embedding-3-small",  # no price of output
        "google/gemma-3",  # an entry without prices
        "openai_compatible/gpt-5-mini",
        "vllm/gpt-5-mini",
        "local/default",
        "fake/gpt-5-mini",
    ],
)
@pytest.mark.parametrize("route", list(Route))
def test_a_model_without_a_known_price_has_no_cost(model: str, route: Route) -> None:
    prices = book(model)
    assert prices.cost_usd(route, READS) is None
    assert prices.estimate_usd(route, 10, 1_000, 100) is None
    assert not prices.is_estimate(route)
    assert prices.describe() == "no price known"


@pytest.mark.parametrize(
    ("asked", "reported", "paid"),
    [
        ("openai/gpt-5-mini", "gpt-5-mini-2025-08-07", "gpt-5-mini"),
        ("openai/gpt-5-mini", "gpt-5-mini-2099-01-01", "gpt-5-mini"),  # a snapshot not listed yet
        ("openai/gpt-5-mini", "", "gpt-5-mini"),
        ("openai/gpt-5-mini", None, "gpt-5-mini"),
        ("openai/gpt-99-alias", "gpt-4.1-mini-2025-04-14", "gpt-4.1-mini"),
        ("openai/gpt-5-mini", "gpt-4.1-mini", "gpt-4.1-mini"),
    ],
)
@pytest.mark.parametrize(("route", "context"), [(Route.ONLINE, {}), (Route.BATCH, BATCH_CONTEXT)])
def test_the_model_reported_decides_where_it_is_listed(
    asked: str, reported: str | None, paid: str, route: Route, context: dict[str, str]
) -> None:
    expected = asked_directly("openai", paid, READS, context)
    assert book(asked).cost_usd(route, READS, reported) == pytest.approx(expected)


def test_bedrock_is_priced_by_the_id_asked_for() -> None:
    # The model reports no region, and genai-prices takes that for the dearer regional price.
    name, reported = (
        "global.anthropic.claude-sonnet-4-5-20250929-v1:0",
        "claude-sonnet-4-5-20250929",
    )
    usage = Usage(input_tokens=1_000, output_tokens=200)
    expected = asked_directly("aws", name, usage, {})
    assert asked_directly("aws", reported, usage, {}) > expected
    prices = book(f"bedrock/{name}")
    assert prices.cost_usd(Route.ONLINE, usage, reported) == pytest.approx(expected)


def test_one_book_keeps_routes_and_models_apart() -> None:
    prices = book("openai/gpt-5-mini")
    costs = [
        prices.cost_usd(route, READS, name)
        for _ in range(2)
        for route in (Route.ONLINE, Route.BATCH)
        for name in ("gpt-5-mini", "gpt-4.1-mini")
    ]
    assert costs[:4] == costs[4:]
    assert len(set(costs)) == 4


@pytest.mark.parametrize(
    ("usage", "usd_per_million"),
    [
        (Usage(), 0),
        (Usage(input_tokens=10, cached_tokens=50), 50 * 0.2),
        (Usage(input_tokens=10, cache_write_tokens=5, cache_write_1h_tokens=50), 5 * 2 + 50 * 4.2),
    ],
)
def test_counts_that_do_not_add_up_take_nothing_off(usage: Usage, usd_per_million: float) -> None:
    cost = book("anthropic/claude-sonnet-5", overrides=DECLARED).cost_usd(Route.ONLINE, usage)
    assert cost == pytest.approx(usd_per_million / 1e6)


def test_an_estimate_of_requests_is_their_tokens_at_the_rate_of_the_average_prompt() -> None:
    prices = book("google/gemini-2.5-pro")
    small = asked_directly("google", "gemini-2.5-pro", Usage(1_000, 100), BATCH_CONTEXT)
    large = asked_directly("google", "gemini-2.5-pro", Usage(300_000, 100), BATCH_CONTEXT)
    assert prices.estimate_usd(Route.BATCH, 1_000, 1_000_000, 100_000) == pytest.approx(
        1_000 * small
    )
    assert prices.estimate_usd(Route.BATCH, 10, 3_000_000, 1_000) == pytest.approx(10 * large)
    assert prices.estimate_usd(Route.BATCH, 0, 0, 0) == 0


def test_prices_say_where_they_come_from() -> None:
    import genai_prices

    listed = book("openai/gpt-5-mini").describe()
    assert listed == f"genai-prices {genai_prices.__version__}"
    assert book("openai/gpt-5-mini", overrides=DECLARED).describe() == "declared prices"


@pytest.mark.parametrize(
    ("value", "mistakes"),
    [
        ({"input": 0.25, "output": 2}, []),
        (DECLARED | {"batch_input": 0, "batch_cache_write_1h": 1.5}, []),
        ({}, ["prices.input", "prices.output"]),
        ({"input": 1}, ["prices.output"]),
        ({"input": -1, "output": float("nan")}, ["prices.input", "prices.output"]),
        ({"input": "1", "output": True}, ["prices.input", "prices.output"]),
        ({"input": float("inf"), "output": None}, ["prices.input", "prices.output"]),
        ({"input": 1, "output": 1, "cache": 1, 3: 1}, ["prices.cache", "prices.3"]),
        (0.25, ["prices"]),
        ([0.25], ["prices"]),
    ],
)
def test_check_prices_reports_every_mistake(value: object, mistakes: list[str]) -> None:
    assert [mistake.where for mistake in check_prices(value)] == mistakes


def test_check_prices_says_what_is_accepted() -> None:
    unknown, negative = check_prices({"input": 1, "output": -2, "prompt": 1})[::-1]
    assert "batch_cached" in unknown.message
    assert "cache_write_1h" in unknown.message
    assert "-2" in negative.message


@pytest.mark.parametrize(("text_bytes", "tokens"), [(0, 0), (1, 1), (4, 1), (5, 2), (4_000, 1_000)])
def test_tokens_are_estimated_from_bytes(text_bytes: int, tokens: int) -> None:
    assert estimate_tokens(text_bytes) == tokens


def test_prices_are_loaded_when_needed_and_nothing_is_fetched() -> None:
    code = (
        "import sys, socket, datetime\n"
        "from batchsql.plan.cost import price_book\n"
        "from batchsql.types import ModelRef, Route, Usage\n"
        "assert 'genai_prices' not in sys.modules\n"
        "def refuse(*_): raise AssertionError('a connection')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "book = price_book(ModelRef('openai', 'gpt-5-mini'), at=datetime.datetime(2026, 11, 1))\n"
        "assert book.cost_usd(Route.BATCH, Usage(1000, 10))\n"
        "import threading; assert threading.active_count() == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
