"""Batches whose key is not the one that is set now: another account does not know them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from batchsql.emulate import Emulator
from tests.support.project import duckdb_target
from tests.support.rehearsal import (
    ANTHROPIC,
    GOOGLE,
    KEY,
    KEY_ENV,
    OPENAI,
    PATIENT,
    Nights,
    Provider,
    age,
    rehearsal,
)

OTHER_KEY = "sk-of-another-account"


@contextmanager
def another_account(own: Emulator, patch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    """Set another key, of an account at the same address that has none of our batches."""
    own.stop()
    try:
        with patch.context() as key:
            key.setenv(KEY_ENV, OTHER_KEY)
            with Emulator(port=urlsplit(own.url).port or 0, durations=PATIENT) as other:
                yield other
    finally:
        own.start()


@pytest.mark.parametrize("is_over", [False, True])
@pytest.mark.parametrize("provider", [OPENAI, ANTHROPIC, GOOGLE], ids=lambda each: each.name)
def test_a_batch_of_another_account_is_not_given_up_and_not_asked_again(
    provider: Provider, is_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(provider.extra) is None:
        pytest.skip(f"{provider.extra} is not installed")
    monkeypatch.setenv(KEY_ENV, KEY)
    with rehearsal(provider) as own:
        bodies = [f"ticket {number}." for number in range(6)]
        nights = Nights(duckdb_target(tmp_path / "warehouse.duckdb"), provider, own, bodies)
        assert nights.run().requests_in_batches == 6
        if is_over:
            own.finish()
        age(nights.target, hours=2)  # so that it cannot be just not listed yet
        with another_account(own, monkeypatch) as other:
            made = nights.collect()
            assert ([each.state.value for each in made.open], made.moved) == (["submitted"], ())
            assert nights.heard("set the key that it was submitted with")
            counts = nights.run()
            assert (counts.pending, counts.requests_sent) == (6, 0)
            assert nights.collect(is_cancel=True).moved == ()
            assert (nights.shards, nights.claims, nights.outcomes) == (["submitted"], 6, {})
            asked = {each.operation for each in other.calls}
            assert provider.poll in asked  # and it said 404
            assert {each.status for each in other.calls} == {404}
            assert {provider.create, provider.ask} & asked == set()
            assert other.bill.charges == []
        assert not [said for said in nights.said if KEY in said or OTHER_KEY in said]
        own.finish()
        assert nights.run().ok == 6
        assert nights.times_billed == {1: 6}
        assert nights.calls[provider.create] == 1
