import math
from collections.abc import Mapping
from datetime import time, timezone
from pathlib import Path
from typing import Any

import pytest

from batchsql.declare.durations import Deadline
from batchsql.declare.keys import RequestKeyer, spec_version
from batchsql.declare.routing import OnComplete
from batchsql.declare.spec import Alternative, Declaration, parse_declaration
from batchsql.errors import Mistake, SpecError
from batchsql.types import ModelRef, OnPending, RouteChoice

BASE = {
    "model": "openai/gpt-5-mini",
    "prompt": "Label {{ body }}",
    "returns": {"label": {"enum": ["a", "b"]}},
}


def parse(options: Mapping[str, Any], **more: Any) -> Declaration:
    return parse_declaration(
        "labels",
        {**BASE, **options},
        project_root=Path(),
        check_model=lambda model, params, engine: [],
        **more,
    )


def mistakes_of(options: Mapping[str, Any], **more: Any) -> list[Mistake]:
    with pytest.raises(SpecError) as caught:
        parse(options, **more)
    return list(caught.value.mistakes)


DEFAULTS = {
    "route": RouteChoice.AUTO,
    "egress": True,
    "alternatives": {},
    "urgent_when": None,
    "online_up_to": 50,
    "max_batch_requests": None,
    "retry_last_online": True,
    "deadline": None,
    "rescue_before_seconds": 3600,
    "rescue_max_usd": 0,
    "wait_seconds": 0,
    "on_pending": OnPending.BUILD,
    "on_complete": None,
    "prices": None,
    "allow_fresh_ledger": False,
}


def test_declaration_without_routing_keys_has_defaults() -> None:
    declaration = parse({})
    assert {name: getattr(declaration, name) for name in DEFAULTS} == DEFAULTS


CASES: list[tuple[str, object, str, object]] = [
    ("route", "auto", "route", RouteChoice.AUTO),
    ("route", "batch", "route", RouteChoice.BATCH),
    ("route", "online", "route", RouteChoice.ONLINE),
    ("route", "engine", "route", RouteChoice.ENGINE),
    ("egress", False, "egress", False),
    (
        "alternatives",
        {"engine": "vllm/Qwen/Qwen3-8B"},
        "alternatives",
        {"engine": Alternative(ModelRef("vllm", "Qwen/Qwen3-8B"), {})},
    ),
    (
        "alternatives",
        {"engine": {"model": "vllm/m", "engine": {"max_model_len": 4096}}},
        "alternatives",
        {"engine": Alternative(ModelRef("vllm", "m"), {"max_model_len": 4096})},
    ),
    ("urgent_when", " priority = 'high'\n", "urgent_when", "priority = 'high'"),
    ("online_up_to", 0, "online_up_to", 0),
    ("max_batch_requests", 1, "max_batch_requests", 1),
    ("retry_last_online", False, "retry_last_online", False),
    ("deadline", "90m", "deadline", Deadline(after_seconds=5400)),
    ("deadline", "06:30", "deadline", Deadline(time_of_day=time(6, 30))),
    ("deadline", "16:30Z", "deadline", Deadline(time_of_day=time(16, 30, tzinfo=timezone.utc))),
    ("rescue_before", "30m", "rescue_before_seconds", 1800),
    ("rescue_before", 0, "rescue_before_seconds", 0),
    ("wait", "6h", "wait_seconds", 21_600),
    ("wait", 30, "wait_seconds", 30),
    ("wait", "forever", "wait_seconds", math.inf),
    ("on_pending", "hold", "on_pending", OnPending.HOLD),
    ("on_pending", "fail", "on_pending", OnPending.FAIL),
    ("on_complete", {"command": "make next"}, "on_complete", OnComplete(command="make next")),
    (
        "on_complete",
        {"webhook": "https://hooks.example:8443/T0/abc?x=1"},
        "on_complete",
        OnComplete(webhook="https://hooks.example:8443/T0/abc?x=1"),
    ),
    ("prices", {"input": 1, "output": 2.5}, "prices", {"input": 1, "output": 2.5}),
    ("allow_fresh_ledger", True, "allow_fresh_ledger", True),
]


@pytest.mark.parametrize(("key", "value", "attribute", "expected"), CASES)
def test_key_is_read(key: str, value: object, attribute: str, expected: object) -> None:
    assert getattr(parse({key: value}), attribute) == expected


@pytest.mark.parametrize(("usd", "expected"), [(0, 0.0), (2, 2.0), (0.5, 0.5)])
def test_rescue_money_goes_with_a_deadline(usd: float, expected: float) -> None:
    assert parse({"rescue_max_usd": usd, "deadline": "6h"}).rescue_max_usd == expected


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("route", "vllm", "auto, batch, online, engine"),
        ("route", None, "auto, batch, online, engine"),
        ("route", ["batch"], "auto, batch, online, engine"),
        ("egress", "no", "true or false"),
        ("egress", 0, "true or false"),
        ("alternatives", "vllm/m", "{engine: "),
        ("alternatives", {"batch": "openai/m"}, "its only key is engine"),
        ("alternatives", {"engine": None}, "{engine: "),
        ("alternatives", {"engine": {"engine": {}}}, "{engine: "),
        ("alternatives", {"engine": {"model": "vllm/m", "params": {}}}, "{engine: "),
        ("urgent_when", "", "a SQL condition"),
        ("urgent_when", " \n", "a SQL condition"),
        ("urgent_when", True, "a SQL condition"),
        ("urgent_when", "true; drop table t", "without a semicolon"),
        ("urgent_when", "select * from tickets", "a SQL condition"),
        ("urgent_when", "with t as (select 1) select * from t", "a SQL condition"),
        ("urgent_when", "insert into t values (1)", "a SQL condition"),
        ("urgent_when", "delete from t", "a SQL condition"),
        ("urgent_when", "drop table t", "a SQL condition"),
        ("online_up_to", -1, "0 or more"),
        ("online_up_to", True, "0 or more"),
        ("online_up_to", 1.5, "0 or more"),
        ("max_batch_requests", 0, "1 or more"),
        ("retry_last_online", "yes", "true or false"),
        ("deadline", "soon", "'06:30Z'"),
        ("deadline", 990, "put it in quotes"),  # what YAML makes of 16:30
        ("deadline", "0h", "above 0"),
        ("rescue_before", "an hour", "'1h30m'"),
        ("rescue_before", -1, "'1h30m'"),
        ("rescue_before", None, "'1h30m'"),
        ("rescue_before", "forever", "'1h30m'"),
        ("wait", "always", "or 'forever'"),
        ("wait", math.inf, "or 'forever'"),
        ("wait", False, "or 'forever'"),
        ("on_pending", "skip", "build, hold, fail"),
        ("on_complete", "make next", "command or webhook"),
        ("on_complete", {}, "command or webhook"),
        ("on_complete", {"email": "x"}, "command or webhook"),
        ("on_complete", {"command": "x", "webhook": "https://h.example"}, "exactly one key"),
        ("on_complete", {"command": " "}, "command"),
        ("on_complete", {"command": ["make"]}, "command"),
        ("on_complete", {"webhook": None}, "webhook"),
        ("on_complete", {"webhook": "ftp://h.example/x"}, "https://"),
        ("on_complete", {"webhook": "https:///path"}, "https://"),
        ("on_complete", {"webhook": "https://h.example:port/"}, "https://"),
        ("on_complete", {"webhook": "https://h.example/a b"}, "https://"),
        ("on_complete", {"webhook": "https://user@h.example/"}, "user or password"),
        ("on_complete", {"webhook": "https://:pw@h.example/"}, "user or password"),
        ("prices", 3, "USD per million tokens"),
        ("allow_fresh_ledger", 1, "true or false"),
    ],
)
def test_wrong_value_is_one_mistake_that_says_what_is_accepted(
    key: str, value: object, accepted: str
) -> None:
    (mistake,) = mistakes_of({key: value})
    assert mistake.where == key
    assert accepted in mistake.message


@pytest.mark.parametrize("usd", [-0.01, math.inf, math.nan, "1", True])
def test_rescue_money_is_a_number_from_0(usd: object) -> None:
    (mistake,) = mistakes_of({"rescue_max_usd": usd, "deadline": "6h"})
    assert (mistake.where, "0 or more" in mistake.message) == ("rescue_max_usd", True)


@pytest.mark.parametrize(
    "condition",
    [
        "created_at > now() - interval '1 hour'",
        "customer in (select id from vip)",
        "case when tier = 1 then true else false end",
        "exists (select 1 from vip where vip.id = customer)",
        "comment like '%urgent%'",  # also the name of a statement
        "body ~* 'outage'",  # PostgreSQL's own
        "some future @@@ syntax",
    ],
)
def test_condition_of_any_dialect_is_accepted(condition: str) -> None:
    assert parse({"urgent_when": condition}).urgent_when == condition


@pytest.mark.parametrize("text", ["qwen", "vllm/", "/qwen", ""])
def test_alternative_is_written_as_provider_and_name(text: str) -> None:
    (mistake,) = mistakes_of({"alternatives": {"engine": text}})
    assert (mistake.where, "provider/name" in mistake.message) == ("alternatives.engine", True)


def test_rescue_money_without_a_deadline_is_a_mistake() -> None:
    (mistake,) = mistakes_of({"rescue_max_usd": 5})
    assert (mistake.where, "deadline" in mistake.message) == ("rescue_max_usd", True)


def test_prices_are_checked_by_what_knows_them() -> None:
    prices = {"inputs": 1}
    seen: list[object] = []

    def check(value: object) -> list[Mistake]:
        seen.append(value)
        return [Mistake("prices.inputs", "unknown kind")]

    assert mistakes_of({"prices": prices}, check_prices=check) == [
        Mistake("prices.inputs", "unknown kind")
    ]
    assert seen == [prices]
    assert parse({}, check_prices=check).prices is None


def test_all_mistakes_are_told_at_once() -> None:
    found = mistakes_of(
        {
            "route": "fast",
            "alternatives": {"engine": "qwen"},
            "rescue_max_usd": 1,
            "wait": "long",
            "prices": {"inputs": 1},
        },
        check_prices=lambda value: [Mistake("prices", "wrong")],
    )
    assert {mistake.where for mistake in found} == {
        "route", "alternatives.engine", "rescue_max_usd", "wait", "prices"
    }  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [
        {"webhook": "https://user:s3cret@h.example/"},
        {"webhook": "h.example/s3cret"},
        {"webhook": "https://h.example/s3cret", "command": "x"},
        "https://h.example/s3cret",
    ],
)
def test_webhook_is_shown_in_no_message(value: object) -> None:
    assert "s3cret" not in str(mistakes_of({"on_complete": value}))


def test_webhook_is_shown_in_no_repr() -> None:
    declaration = parse({"on_complete": {"webhook": "https://h.example/s3cret"}})
    assert "s3cret" not in repr(declaration)


def test_override_replaces_a_nested_key_whole() -> None:
    declaration = parse(
        {"on_complete": {"command": "make next"}, "prices": {"input": 1, "output": 2}},
        defaults={"route": "online", "online_up_to": 5},
        overrides={
            "route": "batch",
            "on_complete": {"webhook": "http://h.example"},
            "prices": {"input": 3},
        },
    )
    assert (declaration.route, declaration.online_up_to) == (RouteChoice.BATCH, 5)
    assert declaration.on_complete == OnComplete(webhook="http://h.example")
    assert declaration.prices == {"input": 3}


def keys(declaration: Declaration) -> tuple[str, str]:
    asked = {
        "model": declaration.model,
        "params": declaration.params,
        "returns": declaration.returns,
        "identity": declaration.engine,
    }
    version = spec_version(
        template=declaration.template, normalize=declaration.normalize.value, **asked
    )
    return version, RequestKeyer(**asked, prefix=()).key(b'[["user","hi"]]')


@pytest.mark.parametrize(("key", "value"), [case[:2] for case in CASES])
def test_where_requests_go_changes_no_key(key: str, value: object) -> None:
    assert keys(parse({key: value})) == keys(parse({}))
