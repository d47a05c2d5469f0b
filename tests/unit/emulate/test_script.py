"""Rules meet the requests that they name, as often as they say; options are read or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchsql.emulate.bill import hash_content
from batchsql.emulate.limits import read_limits
from batchsql.emulate.script import (
    Behaviour,
    Moment,
    Rule,
    Script,
    check_endpoints,
    read_rules,
)
from batchsql.emulate.timeline import Clock, Durations, Phase, Timeline
from batchsql.errors import SpecError


@pytest.mark.parametrize(
    ("conditions", "met"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"skip": 2}, [2, 3, 4, 5]),
        ({"count": 2}, [0, 1]),
        ({"skip": 3, "count": 1}, [3]),
        ({"every": 2}, [0, 2, 4]),
        ({"skip": 1, "every": 3, "count": 1}, [1]),
    ],
)
def test_rule_meets_as_often_as_it_says(conditions: dict[str, int], met: list[int]) -> None:
    script = Script([Rule(behaviour="refusal", **conditions)])
    found = [script.meet(Moment.ANSWER, "openai.chat") for _ in range(6)]
    assert [number for number, rule in enumerate(found) if rule] == met


def test_first_rule_that_meets_decides_and_moments_are_apart() -> None:
    script = Script([Rule(behaviour="refusal", count=1), Rule(behaviour="empty")])
    met = [script.meet(Moment.ANSWER, "openai.chat") for _ in range(2)]
    assert [rule and rule.behaviour for rule in met] == [Behaviour.REFUSAL, Behaviour.EMPTY]
    assert script.meet(Moment.REQUEST, "openai.chat") is None


def test_short_form_is_read() -> None:
    [rule] = read_rules("rate_limit endpoint=openai.* text='two words' count=3 retry_after=1.5")
    assert rule == Rule(
        behaviour="rate_limit", endpoint="openai.*", text="two words", count=3, retry_after=1.5
    )


def test_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "night.yml"
    path.write_text("- behaviour: refusal\n  every: 10\n- {behaviour: drop, count: 1}\n")
    assert [rule.behaviour.value for rule in read_rules(str(path))] == ["refusal", "drop"]


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("explode", "1 mistake in the rules\n  - rule 1, behaviour: got 'explode'; the behaviours"),
        ("drop when=now", "rule 1, when: a rule has nothing of that name; it takes: behaviour"),
        ("drop count", "condition=value"),
        ("drop count=0", "rule 1, count: got '0'"),
        ("drop text='open", "cannot be read"),
        ("missing.yml", "cannot be read"),
    ],
)
def test_wrong_rule_is_refused(option: str, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        read_rules(option)


@pytest.mark.parametrize(
    ("endpoint", "is_known"),
    [(None, True), ("openai.chat", True), ("*.batches.*", True), ("openai.chatt", False)],
)
def test_rule_whose_endpoint_fits_no_operation_is_refused(
    endpoint: str | None, is_known: bool
) -> None:
    rules = [Rule(behaviour="drop", endpoint=endpoint)]
    operations = ["openai.chat", "google.batches.create"]
    if is_known:
        check_endpoints(rules, operations)
        return
    with pytest.raises(SpecError, match=r"'openai\.chatt'; the operations are: google"):
        check_endpoints(rules, operations)


def test_limits_are_read_and_all_mistakes_told() -> None:
    limits = read_limits(["openai.batch_requests=10", "anthropic.batch_bytes=99"])
    openai, anthropic = limits["openai"], limits["anthropic"]
    assert (openai.batch_requests, anthropic.batch_bytes) == (10, 99)
    with pytest.raises(SpecError) as raised:
        read_limits(["mistral.x=1", "openai.nope=1", "openai.batch_bytes=many"])
    assert len(raised.value.mistakes) == 3


def test_batch_spends_its_time_in_the_order_of_its_phases() -> None:
    clock = Clock(lambda: 1_000.0)
    life = Timeline(clock, Durations(validating=10, processing=100, finalizing=10))
    seen = []
    for seconds in (0, 10, 50, 50, 10):
        clock.advance(seconds)
        seen.append((life.phase, life.share))
    assert seen == [
        (Phase.VALIDATING, 0.0), (Phase.PROCESSING, 0.0), (Phase.PROCESSING, 0.5),
        (Phase.FINALIZING, 1.0), (Phase.DONE, 1.0),
    ]  # fmt: skip
    assert [life.at(phase) for phase in (Phase.PROCESSING, Phase.DONE)] == [1_010.0, 1_120.0]


def test_clock_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="forward"):
        Clock().advance(-1)


def test_content_hash_ignores_the_order_of_keys_only() -> None:
    assert hash_content({"a": 1, "b": [1, 2]}) == hash_content({"b": [1, 2], "a": 1})
    assert hash_content({"a": 1, "b": [1, 2]}) != hash_content({"a": 1, "b": [2, 1]})
