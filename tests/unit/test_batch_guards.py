"""What guards a batch on its way: warnings, leases, accounts, ceilings, sizes and odd lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from batchsql import batches
from batchsql.backends import anthropic_wire, bedrock_wire, google_wire, openai_batch
from batchsql.backends.batch import (
    BatchGoneError,
    BatchState,
    BatchStatus,
    CreatedBatch,
    ProviderBusyError,
)
from batchsql.warehouse.shards import ShardState
from tests.support.desk import CALL, DAY, HOUR, LIMITS, ORDER, Desk, line
from tests.support.project import ROOT

GONE = BatchGoneError("no such batch")
LIMITS_OF = {
    "openai": openai_batch._LIMITS,
    "anthropic": anthropic_wire.LIMITS,
    "google": google_wire.LIMITS,
    "bedrock": bedrock_wire.LIMITS,
}


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.database.close()


def running(provider_state: str = "in_progress") -> BatchStatus:
    return BatchStatus(BatchState.RUNNING, provider_state)


# --- results that are about to vanish -------------------------------------------------------------


@pytest.mark.parametrize(
    ("provider", "warned_days"),
    # Results are kept for 30 days, 29 days, 48 hours after a window of 48, and in one's own bucket.
    [("openai", 3), ("anthropic", 3), ("google", 1), ("bedrock", 3)],
)
def test_results_that_vanish_soon_are_warned_of_in_time(provider: str, warned_days: int) -> None:
    desk = Desk(LIMITS_OF[provider])
    with closing(desk.database):
        until = datetime.now(timezone.utc) + timedelta(days=warned_days, hours=2)
        desk.provider.does["create"] = CreatedBatch("b", until)
        shard_id = desk.bring_to(ShardState.SUBMITTED)
        for status in (running(), BatchStatus(BatchState.COMPLETED, "completed")):
            desk.provider.does.update(poll=status, fetch=ProviderBusyError("not now"))
            desk.step(shard_id)
            assert not [said for said in desk.warned if "deletes its results" in said]
            desk.database.execute(
                "update ledger.shards set results_until = results_until - interval '4 hours'"
            )
            desk.step(shard_id)
            (told,) = (said for said in desk.warned if "deletes its results" in said)
            left = "2 d 21 h|2 d 22 h" if warned_days == 3 else "21 h|22 h"
            assert re.search(rf"batch b\b.* in ({left}).*not collected", told), told
            desk.warned.clear()
            desk.database.execute(
                "update ledger.shards set results_until = results_until + interval '4 hours'"
            )
        assert desk.state(shard_id) is ShardState.ENDED


def test_results_that_are_kept_for_long_or_of_which_nothing_is_told_are_not_warned_of(
    desk: Desk,
) -> None:
    desk.provider.does["poll"] = running()
    desk.step(desk.bring_to(ShardState.SUBMITTED))
    assert desk.warned == []


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("provider", "least", "most"),
    [
        # https://platform.openai.com/docs/guides/batch: up to 50,000 requests
        ("openai", 1, 50_000),
        # https://platform.claude.com/docs/en/build-with-claude/batch-processing: 100,000 requests
        ("anthropic", 1, 100_000),
        # Our own: of one that has expired Google gives nothing, so a batch must be small enough.
        ("google", 1, 2_000),
        # https://docs.aws.amazon.com/bedrock/latest/userguide/quotas.html: 100 to 50,000 records
        ("bedrock", 100, 50_000),
    ],
)
def test_a_batch_holds_what_its_provider_takes_and_the_documentation_says(
    provider: str, least: int, most: int
) -> None:
    limits = LIMITS_OF[provider]
    assert (limits.min_requests, limits.max_requests) == (least, most)
    page = (ROOT / "docs" / "providers.md").read_text(encoding="utf-8")
    head, row = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith(("| | `openai/`", "| a batch takes |"))
    )
    told = row[head.index(f"`{provider}/`")]
    assert told.startswith(
        f"{most:,} requests" if least == 1 else f"{least:,} to {most:,} requests"
    )


@pytest.mark.parametrize(("most", "sizes"), [(1, [1] * 5), (2, [2, 2, 1]), (6, [5])])
def test_a_job_is_cut_into_shards_no_larger_than_its_provider_takes(
    most: int, sizes: list[int]
) -> None:
    desk = Desk(replace(LIMITS, max_requests=most), requests=5)
    with closing(desk.database):
        found, last = [], 0
        while True:
            done = desk.batches.submit(ORDER, CALL, (), desk.judge, after=last, size=100)
            if done.shard is None:
                break
            found.append(done.shard.requests)
            last = done.last
        assert found == sizes
        assert desk.query("select count(distinct request_key) from ledger.claims") == [5]


# --- the lease ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds_a_block", "renewed"),
    [(0.0, []), (batches.RENEW_SECONDS / 2, [2, 4]), (batches.RENEW_SECONDS, [1, 2, 3, 4])],
)
def test_a_lease_is_renewed_while_results_are_written(
    monkeypatch: pytest.MonkeyPatch, seconds_a_block: float, renewed: list[int]
) -> None:
    monkeypatch.setattr(batches, "INGEST_ROWS", 1)
    now = 1000.0
    desk = Desk(requests=5, clock=lambda: now)
    with closing(desk.database):
        shard_id = desk.submit()
        desk.provider.lines = [line(key, shard_id) for key in desk.keys]
        left = "extract(epoch from lease_expires_at - now()) from ledger.shards"
        seen: list[float] = []
        flush = desk.ledger.flush

        def watch(*args: Any, **more: Any) -> set[str]:
            """Write a block, after which the lease is about to end and the clock has moved."""
            nonlocal now
            seen.extend(desk.query(f"select {left}"))
            lost = flush(*args, **more)
            desk.database.execute(
                "update ledger.shards set lease_expires_at = now() + interval '9 seconds'"
            )
            now += seconds_a_block
            return lost

        monkeypatch.setattr(desk.ledger, "flush", watch)
        desk.step(shard_id)
        assert desk.outcomes == ["ok"] * 5
        assert [number for number, seconds in enumerate(seen[1:], 1) if seconds > 10] == renewed
        whole = [seconds for seconds in seen if seconds > 10]
        assert all(abs(seconds - batches.LEASE_SECONDS) < 60 for seconds in whole)


# --- lines that should not be there ---------------------------------------------------------------


def test_a_line_of_another_batch_is_counted_and_said(desk: Desk) -> None:
    shard_id = desk.submit()
    own = [line(key, shard_id) for key in desk.keys]
    stranger = line("f" * 32, shard_id)
    nameless = replace(own[0], custom_id="row-1")
    nameless.completion = replace(own[0].completion, request_key="")
    desk.provider.lines = [stranger, own[0], nameless, own[1]]
    desk.step(shard_id)
    assert desk.state(shard_id) is ShardState.COLLECTED
    assert desk.outcomes == ["ok", "ok"]
    assert desk.query("select count(distinct request_key) from ledger.attempts") == [2]
    assert desk.warned == [
        "the batch b is collected: 2 answers, 2 lines that are not of this batch"
    ]


def test_a_line_that_comes_twice_is_counted_and_the_first_is_kept(desk: Desk) -> None:
    shard_id = desk.submit()
    first, second = desk.keys
    desk.provider.lines = [
        line(first, shard_id),
        line(first, shard_id, '{"label":"other"}'),
        line(second, shard_id),
        line(second, shard_id, '{"label":"other"}'),
    ]
    desk.step(shard_id)
    assert desk.outcomes == ["ok", "ok"]
    assert desk.query("select output from ledger.results") == ['{"label":"a"}'] * 2
    assert desk.warned == ["the batch b is collected: 2 answers, 2 lines that came twice"]


def test_lines_are_not_counted_again_when_a_download_is_repeated(desk: Desk) -> None:
    shard_id = desk.submit()
    desk.provider.lines = [line(desk.keys[0], shard_id)] * 2 + [line("f" * 32, shard_id)]
    desk.step(shard_id)
    assert desk.provider.calls["fetch"] == 3  # for the other line, which is missing
    assert desk.outcomes == ["ok", "transient"]
    assert desk.warned == [
        "the batch b is collected: 1 answers, 1 requests without a result, "
        "1 lines that came twice, 1 lines that are not of this batch"
    ]


def test_what_a_collection_that_broke_off_has_written_is_no_news(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "INGEST_ROWS", 1)
    shard_id = desk.submit()

    def break_off() -> Iterator[Any]:
        yield line(desk.keys[0], shard_id)
        raise ProviderBusyError("it broke")

    monkeypatch.setattr(desk.provider, "lines", break_off())
    desk.step(shard_id)
    assert (desk.state(shard_id), desk.outcomes) == (ShardState.ENDED, ["ok"])
    desk.warned.clear()
    desk.provider.lines = [line(key, shard_id) for key in desk.keys]
    desk.step(shard_id)
    assert desk.outcomes == ["ok", "ok"]
    assert desk.warned == []
    assert desk.said[-1] == "the batch b is collected: 1 answers"


# --- another account ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "call"),
    [
        (ShardState.SUBMITTING, "find"), (ShardState.SUBMITTED, "poll"),
        (ShardState.ENDED, "fetch"),
    ],
)  # fmt: skip
def test_a_batch_that_another_account_does_not_know_is_kept(
    desk: Desk, state: ShardState, call: str
) -> None:
    shard_id = desk.bring_to(state)
    desk.age(2 * HOUR)
    if state is not ShardState.SUBMITTING:
        desk.provider.does[call] = GONE
    desk.provider.account = "another"
    desk.warned.clear()
    desk.step(shard_id)
    assert desk.state(shard_id) is state
    assert (desk.claims, desk.outcomes, desk.provider.discarded) == (2, [], [])
    assert any("set the key that it was submitted with" in said for said in desk.warned)
    # Under its own account the same reply is an end.
    desk.provider.account = "a"
    desk.step(shard_id)
    assert not desk.state(shard_id).is_open
    assert desk.claims == 0


def test_a_batch_that_another_account_cannot_cancel_is_kept(desk: Desk) -> None:
    shard_id = desk.bring_to(ShardState.SUBMITTED)
    desk.age(2 * HOUR)
    desk.provider.account = "another"
    desk.provider.does.update(cancel=GONE, poll=GONE)
    desk.batches.cancel(shard_id)
    assert desk.state(shard_id) is ShardState.SUBMITTED
    assert (desk.claims, desk.outcomes) == (2, [])


# --- a batch that does not end --------------------------------------------------------------------


def test_a_batch_that_does_not_end_is_cancelled_a_day_after_its_window(desk: Desk) -> None:
    shard_id = desk.bring_to(ShardState.SUBMITTED)
    desk.provider.does["poll"] = running()
    desk.age(47 * HOUR)  # of a window of 24 hours
    desk.step(shard_id)
    assert desk.provider.calls["cancel"] == 0
    assert not desk.ledger.read_batch(shard_id).is_cancel_requested
    desk.age(2 * HOUR)
    desk.provider.does["cancel"] = ProviderBusyError("not now")
    desk.step(shard_id)
    assert desk.provider.calls["cancel"] == 1
    desk.provider.does["cancel"] = None
    desk.step(shard_id)  # since that call was lost
    assert desk.provider.calls["cancel"] == 2
    assert desk.ledger.read_batch(shard_id).is_cancel_requested
    assert desk.state(shard_id) is ShardState.SUBMITTED
    assert (desk.claims, desk.outcomes) == (2, [])
    assert any("batch b is cancelled" in said and "not ended" in said for said in desk.said)
    desk.provider.does["poll"] = BatchStatus(BatchState.CANCELLING, "cancelling")
    desk.step(shard_id)
    assert desk.provider.calls["cancel"] == 2
    desk.provider.does["poll"] = BatchStatus(BatchState.CANCELLED, "cancelled")
    desk.provider.lines = [line(desk.keys[0], shard_id)]
    desk.step(shard_id)
    assert desk.state(shard_id) is ShardState.CANCELLED
    assert desk.outcomes == ["ok", "transient"]  # what was finished is kept
    assert desk.claims == 0


def test_a_batch_is_given_the_window_of_its_provider() -> None:
    desk = Desk(replace(LIMITS, window_seconds=2 * DAY))
    with closing(desk.database):
        shard_id = desk.bring_to(ShardState.SUBMITTED)
        desk.provider.does["poll"] = running()
        for hours, cancels in ((71, 0), (2, 1)):
            desk.age(hours * HOUR)
            desk.step(shard_id)
            assert desk.provider.calls["cancel"] == cancels
