"""Batches at Gemini and Bedrock that go wrong: what becomes of rows, ledger and bill.

``test_batch_misbehaviour`` has the same for OpenAI and Anthropic, and what concerns every provider.
"""

from __future__ import annotations

import importlib.util
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchsql import dispatch
from batchsql.backends import bedrock_batch
from batchsql.emulate import Rule
from batchsql.errors import SystemicError
from tests.support.project import duckdb_target
from tests.support.rehearsal import (
    ANTHROPIC,
    BEDROCK,
    GOOGLE,
    KEY,
    KEY_ENV,
    OPENAI,
    Nights,
    Provider,
    billed_usd,
    rehearsal,
    rule,
    shards,
)

Begin = Callable[..., Nights]

FEW_AT_BEDROCK = replace(BEDROCK, least=1)
"""Bedrock, as if it took batches of any size."""

BAD_ROW = "ticket 3."
"""The row that rules about answers are about."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dispatch, "_CREATE_BACKOFF_SECONDS", 0.01)
    limits = replace(bedrock_batch.LIMITS, min_requests=FEW_AT_BEDROCK.least)
    monkeypatch.setattr(bedrock_batch, "LIMITS", limits)
    monkeypatch.setenv(KEY_ENV, KEY)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDOFTHETEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))


@pytest.fixture(params=[GOOGLE, FEW_AT_BEDROCK], ids=lambda provider: provider.name)
def provider(request: pytest.FixtureRequest) -> Provider:
    wanted: Provider = request.param
    return wanted


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Start a rehearsal server with rules, and a model of six rows whose batches go there."""
    with ExitStack() as stack:

        def start(provider: Provider, *rules: Rule, **options: Any) -> Nights:
            for module in (provider.extra, "moto" if provider is FEW_AT_BEDROCK else "batchsql"):
                if importlib.util.find_spec(module) is None:
                    pytest.skip(f"{module} is not installed")
            emulator = stack.enter_context(rehearsal(provider, *rules))
            target = duckdb_target(tmp_path / "warehouse.duckdb")
            bodies = [f"ticket {number}." for number in range(1, 7)]
            return Nights(target, provider, emulator, bodies, options)

        yield start


def assert_settled(nights: Nights) -> None:
    """Nothing is claimed or open, and the ledger's costs are the bill's."""
    assert nights.claims == 0
    assert not set(nights.shards) & {"planned", "submitting", "submitted", "ended"}
    recorded = nights.target.one("select sum(cost_usd) from {ledger}.attempts")
    assert recorded == pytest.approx(billed_usd(nights.emulator))


# --- batches that end badly -----------------------------------------------------------------------


def test_nothing_is_left_of_a_gemini_batch_that_expired_and_each_row_is_sent_once_more(
    begin: Begin,
) -> None:
    nights = begin(GOOGLE, rule("expire", fraction=0.5, count=1))
    nights.night()
    assert nights.rows == {"pending": 6}
    assert nights.outcomes == {"transient": 6}
    assert shards(nights.target, "state, requests") == [("expired", 6), ("submitted", 6)]
    assert nights.target.query("select distinct error from {ledger}.attempts") == [
        ("the batch is expired, and its provider keeps nothing of it",)
    ]
    assert nights.billed == 0
    nights.emulator.finish()
    nights.run()
    assert nights.rows == {"ok": 6}
    assert nights.outcomes == {"ok": 6, "transient": 6}
    assert nights.calls[GOOGLE.create] == 2
    assert nights.times_billed == {1: 6}
    assert_settled(nights)


@pytest.mark.parametrize(("fraction", "finished"), [(0, 0), (0.5, 3)])
def test_what_a_bedrock_job_that_expired_finished_is_kept_and_only_the_rest_is_sent_again(
    begin: Begin, fraction: float, finished: int
) -> None:
    nights = begin(FEW_AT_BEDROCK, rule("expire", fraction=fraction, count=1))
    nights.night()
    left = 6 - finished
    kept = {"ok": finished} if finished else {}
    assert nights.rows == {**kept, "pending": left}
    assert nights.outcomes == {**kept, "transient": left}
    assert shards(nights.target, "state, requests") == [("expired", 6), ("submitted", left)]
    assert nights.billed == finished
    nights.emulator.finish()
    nights.run()
    assert nights.rows == {"ok": 6}
    assert nights.times_billed == {1: 6}
    assert_settled(nights)


def cancel_elsewhere(nights: Nights) -> None:
    """Cancel the only batch, as its provider does or somebody in its console."""
    (batch_id,) = shards(nights.target, "provider_batch_id")
    emulator = nights.emulator
    address, headers = {
        "openai": (
            f"{emulator.openai_base_url}/batches/{batch_id}/cancel",
            {"authorization": "Bearer of-the-console"},
        ),
        "anthropic": (
            f"{emulator.anthropic_base_url}/v1/messages/batches/{batch_id}/cancel",
            {"x-api-key": "of-the-console", "anthropic-version": "2023-06-01"},
        ),
        "google": (
            f"{emulator.google_base_url}/v1beta/{batch_id}:cancel",
            {"x-goog-api-key": "of-the-console"},
        ),
        "bedrock": (
            f"{emulator.bedrock_base_url}/model-invocation-job/{batch_id.rpartition('/')[2]}/stop",
            {"authorization": "Bearer of-the-console"},
        ),
    }[nights.provider.name]
    asked = urllib.request.Request(address, data=b"", headers=headers, method="POST")
    with urllib.request.urlopen(asked, timeout=30) as reply:
        assert reply.status == 200


@pytest.mark.parametrize(
    ("provider", "kept"),
    [(OPENAI, 3), (ANTHROPIC, 3), (GOOGLE, 0), (FEW_AT_BEDROCK, 3)],
    ids=lambda each: getattr(each, "name", None),
)
def test_a_batch_that_is_cancelled_elsewhere_gives_what_its_provider_keeps(
    begin: Begin, provider: Provider, kept: int
) -> None:
    nights = begin(provider)
    nights.run()
    nights.emulator.advance(stage="in_progress", fraction=0.5)
    cancel_elsewhere(nights)
    made = nights.collect()
    assert [shard.state.value for shard in made.moved] == ["cancelled"]
    assert (made.counts.ok, made.counts.tries, made.errors) == (kept, 6, ())
    counts = nights.run()
    assert (counts.ok, counts.pending, counts.requests_sent) == (kept, 6 - kept, 6 - kept)
    nights.emulator.finish()
    nights.run()
    assert nights.rows == {"ok": 6}
    assert shards(nights.target, "state, requests") == [("cancelled", 6), ("collected", 6 - kept)]
    assert nights.dead == {}
    assert nights.claims == 0
    # Of Gemini's batch the finished half is billed and lost.
    assert nights.times_billed == ({1: 6} if kept else {1: 3, 2: 3})


@pytest.mark.parametrize(
    ("provider", "said"),
    [
        (GOOGLE, "The batch failed, as the rehearsal asked for"),
        (FEW_AT_BEDROCK, "The input did not pass validation"),
    ],
    ids=lambda each: getattr(each, "name", None),
)
def test_a_batch_that_fails_validation_stops_the_run_and_fails_no_row(
    begin: Begin, provider: Provider, said: str
) -> None:
    nights = begin(provider, rule("fail_validation"), max_batch_requests=3)
    with pytest.raises(SystemicError, match=said):
        nights.run()
    assert nights.calls[provider.create] == 1  # before the next shard
    assert shards(nights.target, "state, fault, requests") == [("failed", "systemic", 3)]
    assert (nights.outcomes, nights.dead, nights.billed, nights.claims) == ({}, {}, 0, 0)
    nights.emulator.behave()
    nights.night()
    assert nights.rows == {"ok": 6}
    assert nights.times_billed == {1: 6}
    assert_settled(nights)


def test_a_gemini_batch_that_fails_for_no_fault_of_its_own_is_sent_again(begin: Begin) -> None:
    nights = begin(GOOGLE, rule("fail_validation", code="INTERNAL", count=1))
    nights.run()
    made = nights.collect()
    assert ([shard.state.value for shard in made.moved], made.errors) == (["failed"], ())
    assert shards(nights.target, "state, fault") == [("failed", "transient")]
    assert (nights.outcomes, nights.dead, nights.claims) == ({}, {}, 0)
    assert nights.rows == {"pending": 6}
    nights.night()
    assert nights.rows == {"ok": 6}
    assert nights.times_billed == {1: 6}
    assert_settled(nights)


def test_a_full_queue_fails_no_row(begin: Begin, provider: Provider) -> None:
    nights = begin(provider, rule("queue_full"))
    counts = nights.run()
    assert (counts.pending, counts.requests_failed) == (6, 0)
    assert set(shards(nights.target, "state, fault")) == {("failed", "queue_full")}
    assert nights.rows == {"pending": 6}
    assert (nights.outcomes, nights.dead, nights.billed, nights.claims) == ({}, {}, 0, 0)
    assert nights.heard("no more batches now")
    nights.emulator.behave()
    for _ in range(4):  # the next batches may be smaller
        nights.night()
    assert nights.rows == {"ok": 6}
    assert nights.outcomes == {"ok": 6}
    assert nights.times_billed == {1: 6}
    assert_settled(nights)


# --- lines ----------------------------------------------------------------------------------------


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
    assert shards(nights.target, "state, requests") == [("collected", 6), ("collected", 1)]
    assert nights.claims == 0


def test_a_line_that_comes_twice_counts_once_and_is_said(begin: Begin, provider: Provider) -> None:
    nights = begin(provider, rule("duplicate", text=BAD_ROW))
    nights.night()
    assert nights.rows == {"ok": 6}
    assert nights.outcomes == {"ok": 6}
    assert nights.heard("6 answers, 1 lines that came twice")
    assert nights.times_billed == {1: 6}
    assert_settled(nights)
