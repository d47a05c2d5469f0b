"""Batches at providers that misbehave: for each trouble, what becomes of rows, ledger and bill."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchsql import dispatch, judging
from batchsql.backends import anthropic_batch, online, openai_batch
from batchsql.emulate import AnthropicLimits, GoogleLimits, OpenAILimits, Rule
from batchsql.errors import SystemicError
from batchsql.warehouse.ledger import Ledger
from batchsql.warehouse.report import LedgerReport
from tests.support import lean
from tests.support.project import duckdb_target
from tests.support.rehearsal import (
    ANTHROPIC,
    GOOGLE,
    INSTANT,
    KEY,
    KEY_ENV,
    OPENAI,
    Nights,
    Provider,
    age,
    billed_usd,
    rehearsal,
    rule,
    shards,
)

pytest.importorskip("openai")
pytest.importorskip("anthropic")

Begin = Callable[..., Nights]

BAD_ROW = "ticket 3."
"""The row that rules about answers are about."""


def bodies(count: int) -> list[str]:
    return [f"ticket {number}." for number in range(1, count + 1)]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_CREATE_BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(openai_batch, "_DOWNLOAD_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(online, "FIRST_BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.01)
    monkeypatch.setenv(KEY_ENV, KEY)


@pytest.fixture(params=[OPENAI, ANTHROPIC], ids=lambda provider: provider.name)
def provider(request: pytest.FixtureRequest) -> Provider:
    wanted: Provider = request.param
    return wanted


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Start a rehearsal server with rules, and a model of so many rows whose batches go there."""
    with ExitStack() as stack:

        def start(
            provider: Provider, *rules: Rule, rows: int = 6, server: dict[str, Any] | None = None,
            **options: Any,
        ) -> Nights:  # fmt: skip
            emulator = stack.enter_context(rehearsal(provider, *rules, **(server or {})))
            target = duckdb_target(tmp_path / "warehouse.duckdb")
            return Nights(target, provider, emulator, bodies(rows), options)

        yield start


def assert_settled(nights: Nights) -> None:
    """Nothing is claimed, no batch is open, and the ledger's costs are the bill's."""
    assert nights.claims == 0
    assert not set(nights.shards) & {"planned", "submitting", "submitted", "ended"}
    recorded = nights.target.one("select sum(cost_usd) from {ledger}.attempts")
    assert recorded == pytest.approx(billed_usd(nights.emulator))
    assert not any(KEY in said for said in nights.said)


# --- batches that end badly -----------------------------------------------------------------------


def test_what_an_expired_batch_finished_is_kept_and_only_the_rest_is_sent_again(
    begin: Begin, provider: Provider
) -> None:
    nights = begin(provider, rule("expire", fraction=0.5, count=1))
    nights.night()
    assert nights.rows == {"ok": 3, "pending": 3}
    assert nights.shards == ["expired", "submitted"]
    assert nights.outcomes == {"ok": 3, "transient": 3}
    assert nights.billed == 3
    nights.emulator.finish()
    nights.run()
    assert nights.rows == {"ok": 6}
    assert shards(nights.target, "state, requests") == [("expired", 6), ("collected", 3)]
    assert nights.times_billed == {1: 6}
    assert_settled(nights)


def test_a_batch_that_expired_before_any_answer_costs_nothing(
    begin: Begin, provider: Provider
) -> None:
    nights = begin(provider, rule("expire", fraction=0, count=1))
    nights.night()
    assert nights.rows == {"pending": 6}
    assert nights.outcomes == {"transient": 6}
    assert nights.billed == 0
    nights.emulator.finish()
    nights.run()
    assert nights.rows == {"ok": 6}
    assert nights.times_billed == {1: 6}
    assert_settled(nights)


def test_requests_whose_batches_expire_for_ever_are_given_up(
    begin: Begin, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "MAX_TRANSIENT_FAILURES", 3)
    nights = begin(provider, rule("expire", fraction=0), rows=2)
    for _ in range(3):
        nights.run()
        nights.emulator.finish()
    assert nights.rows == {"pending": 2}
    counts = nights.run()
    assert (counts.requests_failed, counts.requests_sent) == (2, 0)
    assert nights.rows == {"failed": 2}
    assert nights.dead == {"transient": 2}
    assert nights.outcomes == {"transient": 6}
    assert nights.shards == ["expired"] * 3
    assert nights.billed == 0
    assert nights.claims == 0


def test_a_batch_whose_input_is_refused_stops_the_run_before_the_next_shard(begin: Begin) -> None:
    nights = begin(OPENAI, rule("fail_validation"), max_batch_requests=2)
    with pytest.raises(SystemicError, match="invalid_json_line") as error:
        nights.run()
    assert KEY not in str(error.value)
    assert nights.calls[OPENAI.create] == 1
    assert shards(nights.target, "state, fault, requests") == [("failed", "systemic", 2)]
    assert nights.outcomes == {}  # no row is at fault
    assert nights.dead == {}
    assert nights.billed == 0
    nights.emulator.behave()
    nights.said.clear()
    nights.run()
    assert nights.rows == {"pending": 6}
    nights.emulator.finish()
    nights.run()
    assert nights.rows == {"ok": 6}
    assert nights.times_billed == {1: 6}
    assert_settled(nights)


def test_a_queue_that_is_full_of_others_makes_batches_smaller_and_fails_no_row(
    begin: Begin, provider: Provider
) -> None:
    nights = begin(provider, rule("queue_full", count=2), rows=16, max_batch_requests=16)
    for _ in range(3):
        nights.run()  # refused at once, or when it is looked at
        nights.collect()
    # Half and half again where nothing of ours is in the queue, and double after what is taken.
    assert shards(nights.target, "state, requests, fault") == [
        ("failed", 16, "queue_full"), ("failed", 8, "queue_full"),
        ("submitted", 4, None), ("submitted", 8, None), ("submitted", 4, None),
    ]  # fmt: skip
    assert nights.rows == {"pending": 16}
    assert nights.outcomes == {}
    assert nights.heard("queue") or nights.heard("Enqueued token limit")
    nights.emulator.finish()
    nights.run()
    assert nights.rows == {"ok": 16}
    assert nights.times_billed == {1: 16}
    assert_settled(nights)


def test_a_queue_that_is_full_of_ours_is_waited_for_at_full_size(begin: Begin) -> None:
    nights = begin(
        GOOGLE, rows=40, max_batch_requests=8, server={"google": GoogleLimits(concurrent_batches=2)}
    )
    for _ in range(4):
        nights.run()
    assert shards(nights.target, "state, requests") == [
        ("submitted", 8), ("submitted", 8), *[("failed", 8)] * 4,
    ]  # fmt: skip
    for answered in (16, 32, 40):
        nights.emulator.finish()
        nights.run()
        pending = {"pending": 40 - answered} if answered < 40 else {}
        assert nights.rows == {"ok": answered, **pending}
    assert nights.times_billed == {1: 40}
    assert_settled(nights)


@pytest.mark.parametrize(("blocked_seconds", "batches"), [(0.01, 3), (3600, 1)])
def test_a_run_that_waits_tries_again_after_a_while_when_a_batch_was_refused(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, blocked_seconds: float, batches: int
) -> None:
    monkeypatch.setattr(dispatch, "_BLOCKED_SECONDS", blocked_seconds)
    monkeypatch.setattr(dispatch, "FIRST_POLL_SECONDS", 0.02)
    nights = begin(
        OPENAI, rule("fail_validation", code="internal_error", count=2), wait="2s",
        server={"durations": INSTANT},
    )  # fmt: skip
    counts = nights.run()
    assert nights.calls[OPENAI.create] == batches
    assert set(shards(nights.target, "fault")) - {None} == {"transient"}
    assert counts.ok == (6 if batches == 3 else 0)
    assert nights.claims == 0


def test_a_batch_that_is_too_large_is_split_in_the_same_run(
    begin: Begin, provider: Provider
) -> None:
    limits = {
        "openai": OpenAILimits(batch_requests=2), "anthropic": AnthropicLimits(batch_requests=2),
    }  # fmt: skip
    nights = begin(provider, rows=10, server=limits, max_batch_requests=9)
    nights.run()
    assert shards(nights.target, "state, requests, fault") == [
        ("failed", 9, "too_large"),
        ("failed", 4, "too_large"),
        *[("submitted", 2, None)] * 5,
    ]
    nights.emulator.finish()
    nights.run()
    assert nights.rows == {"ok": 10}
    assert nights.times_billed == {1: 10}
    assert_settled(nights)


def test_a_batch_that_is_too_large_at_its_smallest_is_given_up_for_now(
    begin: Begin, provider: Provider
) -> None:
    limits = {
        "openai": OpenAILimits(batch_requests=0), "anthropic": AnthropicLimits(batch_requests=0),
    }  # fmt: skip
    nights = begin(provider, rows=3, server=limits, max_batch_requests=2)
    counts = nights.run()
    assert counts.pending == 3
    assert shards(nights.target, "state, requests, fault") == [
        ("failed", 2, "too_large"), ("failed", 1, "too_large"),
    ]  # fmt: skip
    assert nights.claims == 0


def test_a_batch_of_which_every_line_is_rejected_fails_its_rows_and_costs_nothing(
    begin: Begin, provider: Provider
) -> None:
    nights = begin(provider, rule("errors_only"))
    nights.night()
    assert nights.rows == {"failed": 6}
    assert nights.dead == {"rejected": 6}
    assert nights.outcomes == {"rejected": 6}
    assert nights.shards == ["collected"]
    assert nights.billed == 0
    assert nights.claims == 0


# --- lines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("provider", "behaviour", "outcome"),
    [
        (OPENAI, "refusal", "refused"), (ANTHROPIC, "refusal", "refused"),
        (OPENAI, "length", "truncated"), (ANTHROPIC, "length", "truncated"),
        (OPENAI, "empty", "invalid"), (ANTHROPIC, "empty", "invalid"),
        (OPENAI, "invalid_json", "invalid"), (OPENAI, "wrong_shape", "invalid"),
    ],
    ids=lambda each: getattr(each, "name", None),
)  # fmt: skip
def test_a_bad_answer_is_asked_again_alone_at_last_online_and_then_given_up(
    begin: Begin, provider: Provider, behaviour: str, outcome: str
) -> None:
    nights = begin(provider, rule(behaviour, text=BAD_ROW))
    nights.night()
    assert nights.rows == {"ok": 5, "pending": 1}
    assert shards(nights.target, "state, requests") == [("collected", 6), ("submitted", 1)]
    nights.emulator.finish()
    assert nights.calls[provider.ask] == 0
    counts = nights.run()  # collects the second failure, and has the last try online at once
    assert nights.calls[provider.ask] == 1
    assert counts.requests_failed == 1
    assert nights.rows == {"ok": 5, "failed": 1}
    assert nights.dead == {outcome: 1}
    assert nights.outcomes == {"ok": 5, outcome: 3}
    tries = "select attempt_number, route, is_final from {ledger}.attempts where outcome <> 'ok'"
    assert sorted(nights.target.query(tries)) == [
        (1, "batch", False), (2, "batch", False), (3, "online", True),
    ]  # fmt: skip
    assert nights.times_billed == {1: 5, 3: 1}
    assert_settled(nights)
    asked = len(nights.emulator.calls)
    nights.run()
    assert len(nights.emulator.calls) == asked  # the dead stay dead


@pytest.mark.parametrize(
    ("options", "routes"),
    [
        ({"retry_last_online": False}, ["batch", "batch", "batch"]),
        ({"route": "batch", "max_attempts": 2}, ["batch", "batch"]),
        ({"max_attempts": 2}, ["batch", "online"]),
        ({"max_attempts": 1}, ["batch"]),
    ],
)
def test_tries_go_the_way_that_is_declared(
    begin: Begin, options: dict[str, Any], routes: list[str]
) -> None:
    nights = begin(OPENAI, rule("refusal", text=BAD_ROW), **options)
    for _ in routes:
        nights.night()
    assert nights.rows == {"ok": 5, "failed": 1}
    tries = "select route from {ledger}.attempts where outcome <> 'ok' order by attempt_number"
    assert [route for (route,) in nights.target.query(tries)] == routes
    assert_settled(nights)


def test_an_answer_that_is_good_at_the_second_try_is_taken(
    begin: Begin, provider: Provider
) -> None:
    nights = begin(provider, rule("length", text=BAD_ROW, count=1))
    nights.night()
    nights.night()
    assert nights.rows == {"ok": 6}
    assert nights.outcomes == {"ok": 6, "truncated": 1}
    assert nights.times_billed == {1: 5, 2: 1}
    assert_settled(nights)


@pytest.mark.parametrize(
    ("provider", "behaviour", "outcome", "billed"),
    [
        (OPENAI, "content_filter", "filtered", 6),
        (OPENAI, "rejected", "rejected", 5),
        (OPENAI, "too_long", "too_long", 5),
        (OPENAI, "error_in_output", "rejected", 5),
        (ANTHROPIC, "rejected", "rejected", 5),
        (ANTHROPIC, "too_long", "too_long", 5),
        (ANTHROPIC, "error_in_output", "rejected", 5),
    ],
    ids=lambda each: getattr(each, "name", None),
)
def test_a_line_that_no_other_try_mends_is_given_up_at_once(
    begin: Begin, provider: Provider, behaviour: str, outcome: str, billed: int
) -> None:
    nights = begin(provider, rule(behaviour, text=BAD_ROW))
    nights.night()
    assert nights.rows == {"ok": 5, "failed": 1}
    assert nights.dead == {outcome: 1}
    assert nights.outcomes == {"ok": 5, outcome: 1}
    assert nights.billed == billed
    assert nights.shards == ["collected"]
    assert_settled(nights)


@pytest.mark.parametrize(
    ("provider", "behaviour", "status"),
    [
        (OPENAI, "error_in_output", 429), (OPENAI, "rejected", 500),
        (ANTHROPIC, "rejected", 429), (ANTHROPIC, "rejected", 500),
    ],
    ids=lambda each: getattr(each, "name", None),
)  # fmt: skip
def test_a_line_that_failed_for_no_fault_of_its_own_is_sent_again(
    begin: Begin, provider: Provider, behaviour: str, status: int
) -> None:
    nights = begin(provider, rule(behaviour, text=BAD_ROW, status=status, count=1))
    nights.night()
    assert nights.rows == {"ok": 5, "pending": 1}
    assert nights.outcomes == {"ok": 5, "transient": 1}
    nights.emulator.finish()
    nights.run()
    assert nights.rows == {"ok": 6}
    assert nights.dead == {}
    assert_settled(nights)


def test_a_missing_line_is_asked_again_and_said(begin: Begin, provider: Provider) -> None:
    nights = begin(provider, rule("missing", text=BAD_ROW, count=1))
    nights.night()
    assert nights.rows == {"ok": 5, "pending": 1}
    assert nights.outcomes == {"ok": 5, "transient": 1}
    assert nights.heard("5 answers, 1 requests without a result")
    nights.emulator.finish()
    nights.run()
    assert nights.rows == {"ok": 6}
    # It was billed though it never arrived, so this row alone is paid twice.
    assert nights.times_billed == {1: 5, 2: 1}
    assert nights.claims == 0


def test_a_line_that_comes_twice_counts_once_and_is_said(begin: Begin, provider: Provider) -> None:
    nights = begin(provider, rule("duplicate", text=BAD_ROW))
    nights.night()
    assert nights.rows == {"ok": 6}
    assert nights.outcomes == {"ok": 6}
    assert nights.heard("6 answers, 1 lines that came twice")
    assert nights.times_billed == {1: 6}
    assert_settled(nights)


def test_the_order_of_the_results_does_not_matter(begin: Begin, provider: Provider) -> None:
    nights = begin(provider, rule("shuffle"), rows=20)
    counts = nights.night()
    assert counts.ok == 20
    # Each row has the answer of its own request: another order gives the same table.
    table = "select id, category, urgency from {schema}.labels order by id"
    shuffled = nights.target.query(table)
    nights.emulator.behave()
    nights.target.query("drop schema {ledger} cascade")
    nights.night()
    assert nights.target.query(table) == shuffled
    assert len({row[1:] for row in shuffled}) > 3


# --- downloads ------------------------------------------------------------------------------------


def test_a_download_that_breaks_is_begun_again(begin: Begin, provider: Provider) -> None:
    nights = begin(provider, rule("truncate", endpoint=provider.fetch, count=1, fraction=0.6))
    nights.night()
    assert nights.rows == {"ok": 6}
    assert nights.outcomes == {"ok": 6}
    assert nights.calls[provider.fetch] == 2
    assert nights.times_billed == {1: 6}
    assert_settled(nights)


def test_a_download_that_always_breaks_leaves_the_batch_to_be_collected_later(
    begin: Begin, provider: Provider
) -> None:
    nights = begin(provider, rule("truncate", endpoint=provider.fetch, fraction=0.6))
    counts = nights.night()
    assert (counts.pending, counts.requests_sent) == (6, 0)
    assert nights.shards == ["ended"]
    assert nights.claims == 6
    assert nights.outcomes == {}  # nothing of a broken download is taken
    assert nights.heard("it is asked again later")
    nights.emulator.behave()
    nights.run()
    assert nights.rows == {"ok": 6}
    assert nights.times_billed == {1: 6}
    assert_settled(nights)


def test_results_at_another_origin_are_fetched_without_the_key(begin: Begin) -> None:
    nights = begin(ANTHROPIC, rule("foreign_url"))
    nights.night()
    assert nights.rows == {"ok": 6}
    keys = {
        call.authorization
        for call in nights.emulator.calls
        if call.operation == ANTHROPIC.fetch
    }  # fmt: skip
    assert keys == {None}
    assert_settled(nights)


# --- creating -------------------------------------------------------------------------------------


@pytest.mark.parametrize("behaviour", ["lost_reply", "slow"])
def test_a_batch_whose_creation_got_no_reply_is_adopted_later(
    begin: Begin, provider: Provider, behaviour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if behaviour == "slow":  # the reply comes when nobody waits for it any more
        for module, name in ((openai_batch, "_LIMITS"), (anthropic_batch, "LIMITS")):
            limits = replace(getattr(module, name), create_seconds=1.0)
            monkeypatch.setattr(module, name, limits)
    nights = begin(provider, rule(behaviour, endpoint=provider.create, count=1))
    counts = nights.run()
    assert (counts.pending, counts.requests_in_batches) == (6, 6)
    assert nights.shards == ["submitting"]
    assert nights.heard("it is looked for later and not sent again before")
    nights.run()  # too early to tell: nothing is sent twice
    nights.collect()
    assert nights.shards == ["submitting"]
    assert nights.calls[provider.create] <= 1  # one that is held is not listed yet
    nights.emulator.finish()
    age(nights.target, hours=0.25)
    nights.run()
    assert nights.rows == {"ok": 6}
    assert nights.heard("which a run that ended too early had created")
    assert len(nights.shards) == 1
    assert nights.times_billed == {1: 6}
    assert_settled(nights)


def test_a_creation_whose_reply_is_late_is_waited_for(begin: Begin, provider: Provider) -> None:
    nights = begin(provider, rule("slow", endpoint=provider.create, seconds=0.2))
    nights.run()
    assert nights.shards == ["submitted"]
    nights.emulator.finish()
    nights.run()
    assert nights.rows == {"ok": 6}
    assert_settled(nights)


def test_a_batch_that_was_never_created_is_sent_again_once_that_is_sure(
    begin: Begin, provider: Provider
) -> None:
    # For want of a reply it cannot be told at first whether the provider has it.
    nights = begin(provider, rule("bad_gateway", endpoint=provider.create, count=1))
    nights.run()
    assert nights.shards == ["submitting"]
    assert nights.claims == 6
    age(nights.target, hours=0.25)
    nights.night()
    assert nights.rows == {"ok": 6}
    assert nights.shards == ["abandoned", "collected"]
    assert nights.heard("was never created; they wait again")
    assert nights.calls[provider.create] == 2
    assert nights.times_billed == {1: 6}
    assert_settled(nights)


# Of OpenAI's 5xx it is not known whether there is a batch.
@pytest.mark.parametrize(
    ("provider", "behaviour"),
    [(OPENAI, "rate_limit"), (ANTHROPIC, "rate_limit"), (ANTHROPIC, "overloaded")],
    ids=lambda each: getattr(each, "name", None),
)
def test_a_creation_that_is_surely_refused_is_tried_again_at_once(
    begin: Begin, provider: Provider, behaviour: str
) -> None:
    nights = begin(provider, rule(behaviour, endpoint=provider.create, count=2, retry_after=0))
    nights.night()
    assert nights.rows == {"ok": 6}
    assert nights.calls[provider.create] == 3
    assert shards(nights.target, "state, fault") == [
        ("failed", "transient"), ("failed", "transient"), ("collected", None),
    ]  # fmt: skip
    assert nights.outcomes == {"ok": 6}
    assert nights.times_billed == {1: 6}
    assert_settled(nights)


def test_a_creation_that_is_always_put_off_leaves_the_rows_pending(
    begin: Begin, provider: Provider
) -> None:
    nights = begin(provider, rule("rate_limit", endpoint=provider.create, retry_after=0))
    counts = nights.run()
    assert (counts.pending, counts.requests_sent) == (6, 0)
    assert nights.heard("no more batches now")
    assert set(nights.shards) == {"failed"}
    assert nights.claims == 0
    nights.emulator.behave()
    nights.night()
    assert nights.rows == {"ok": 6}
    assert nights.times_billed == {1: 6}


@pytest.mark.parametrize("behaviour", ["server_error", "drop"])
def test_a_creation_of_which_nothing_is_known_is_never_repeated_blindly(
    begin: Begin, provider: Provider, behaviour: str
) -> None:
    nights = begin(provider, rule(behaviour, endpoint=provider.create, count=1))
    for _ in range(2):
        nights.run()
    assert nights.shards == ["submitting"]
    assert nights.calls[provider.create] == 1
    age(nights.target, hours=0.25)
    nights.night()
    assert nights.rows == {"ok": 6}
    assert nights.calls[provider.create] == 2
    assert nights.times_billed == {1: 6}
    assert_settled(nights)


# --- looking and fetching -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "behaviour"),
    [
        ("poll", "rate_limit"), ("poll", "drop"), ("fetch", "overloaded"), ("fetch", "bad_gateway"),
    ],
)  # fmt: skip
def test_trouble_while_looking_is_waited_out(
    begin: Begin, provider: Provider, what: str, behaviour: str
) -> None:
    more = {} if behaviour in ("drop", "bad_gateway") else {"retry_after": 30}
    endpoint = getattr(provider, what)
    nights = begin(provider)
    nights.run()
    nights.emulator.finish()
    nights.emulator.misbehave(rule(behaviour, endpoint=endpoint, **more))
    counts = nights.run()
    assert (counts.pending, counts.requests_sent) == (6, 0)
    assert nights.claims == 6
    assert nights.outcomes == {}
    made = nights.collect()
    assert [shard.error is not None for shard in made.open] == [True]
    nights.emulator.behave()
    nights.run()
    assert nights.rows == {"ok": 6}
    assert nights.times_billed == {1: 6}
    assert nights.calls[provider.create] == 1
    assert_settled(nights)


@pytest.mark.parametrize(
    ("what", "behaviour"),
    [("create", "bad_key"), ("create", "no_credit"), ("poll", "bad_key"), ("fetch", "bad_key")],
)
def test_a_refused_key_or_an_empty_account_stops_the_run_and_loses_nothing(
    begin: Begin, provider: Provider, what: str, behaviour: str
) -> None:
    nights = begin(provider)
    if what != "create":
        nights.run()
        nights.emulator.finish()
    nights.emulator.misbehave(rule(behaviour, endpoint=getattr(provider, what)))
    with pytest.raises(SystemicError) as error:
        nights.run()
    assert KEY not in str(error.value)
    expected = "key" if behaviour == "bad_key" else "credit|quota|billing"
    assert error.match(f"(?i){expected}")
    assert nights.outcomes == {}
    assert nights.claims == (0 if what == "create" else 6)
    if what != "create":
        made = nights.collect()
        assert [type(each) for each in made.errors] == [SystemicError]
        assert made.moved == ()
    nights.emulator.behave()
    nights.night()
    assert nights.rows == {"ok": 6}
    assert nights.times_billed == {1: 6}
    assert_settled(nights)


# --- cancelling -----------------------------------------------------------------------------------


def test_what_a_cancelled_batch_finished_is_kept_and_the_rest_is_sent_by_the_next_run(
    begin: Begin, provider: Provider
) -> None:
    nights = begin(provider)
    nights.run()
    nights.emulator.advance(stage="in_progress", fraction=0.5)
    asked = nights.collect(is_cancel=True)
    assert [shard.requests for shard in asked.moved] == [6]
    nights.emulator.finish()
    made = nights.collect()
    assert [shard.state.value for shard in made.moved] == ["cancelled"]
    assert made.counts.ok == 3
    assert nights.rows == {"pending": 6}
    assert nights.claims == 0
    counts = nights.run()
    assert (counts.ok, counts.requests_sent) == (3, 3)
    nights.emulator.finish()
    nights.run()
    assert nights.rows == {"ok": 6}
    assert nights.shards == ["cancelled", "collected"]
    assert nights.times_billed == {1: 6}
    assert_settled(nights)


def test_a_batch_whose_cancelling_hangs_is_waited_for(begin: Begin, provider: Provider) -> None:
    nights = begin(provider, rule("cancel_hangs"))
    nights.run()
    nights.emulator.advance(stage="in_progress", fraction=0.5)
    nights.collect(is_cancel=True)
    counts = nights.run()
    assert (counts.pending, counts.requests_sent) == (6, 0)
    assert nights.shards == ["submitted"]
    assert nights.claims == 6
    nights.emulator.advance(25 * 3600)  # its window ends
    nights.run()
    assert nights.rows == {"ok": 3, "pending": 3}
    nights.emulator.finish()
    nights.run()
    assert nights.rows == {"ok": 6}
    assert nights.times_billed == {1: 6}
    assert_settled(nights)


def test_a_row_longer_than_a_whole_batch_is_given_up_also_after_a_replay(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights = begin(OPENAI, rows=3)
    small = replace(openai_batch._LIMITS, max_bytes=4_000)
    monkeypatch.setattr(openai_batch, "_LIMITS", small)
    nights.bodies = [*bodies(2), "long " * 1_000]
    nights.night()
    assert nights.rows == {"ok": 2, "failed": 1}
    with lean.connect(nights.job) as (_, warehouse, _, _):
        report = LedgerReport(Ledger(warehouse, nights.target.ledger))
        assert report.replay(str(uuid.uuid4()), None, None) == 1
    nights.night()
    assert nights.rows == {"ok": 2, "failed": 1}
    assert nights.outcomes == {"ok": 2, "too_long": 2, "replayed": 1}
