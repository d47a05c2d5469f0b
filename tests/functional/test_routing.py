"""Where requests go: by size, urgency, deadline and permission, and what a run does meanwhile."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from batchsql import cli, dispatch
from batchsql.backends import bedrock_batch, local, registry
from batchsql.emulate import Rule
from batchsql.errors import SystemicError
from tests.support import fake
from tests.support.project import Project, Target, duckdb_target
from tests.support.rehearsal import (
    ANTHROPIC,
    BEDROCK,
    GOOGLE,
    INSTANT,
    KEY,
    KEY_ENV,
    OPENAI,
    PRICES,
    Nights,
    Provider,
    age,
    billed_usd,
    declare,
    rehearsal,
    rule,
    shards,
    statuses,
)
from tests.support.tables import rows_sql, tickets

pytest.importorskip("openai")
pytest.importorskip("anthropic")

Begin = Callable[..., Nights]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "FIRST_POLL_SECONDS", 0.02)
    monkeypatch.setenv(KEY_ENV, KEY)


@pytest.fixture
def duck(tmp_path: Path) -> Project:
    return Project(tmp_path / "project", duckdb_target(tmp_path / "warehouse.duckdb"))


@pytest.fixture(params=[OPENAI, ANTHROPIC], ids=lambda provider: provider.name)
def provider(request: pytest.FixtureRequest) -> Provider:
    wanted: Provider = request.param
    return wanted


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Start a rehearsal server with rules, and a model of so many rows whose requests go there."""
    with ExitStack() as stack:

        def start(
            *rules: Rule, rows: int = 6, provider: Provider = OPENAI,
            target: Target | None = None, **options: Any,
        ) -> Nights:  # fmt: skip
            emulator = stack.enter_context(rehearsal(provider, *rules))
            target = target or duckdb_target(tmp_path / "warehouse.duckdb")
            bodies = [f"ticket {number}." for number in range(1, rows + 1)]
            return Nights(target, provider, emulator, bodies, options)

        yield start


def routes(nights: Nights) -> dict[str, int]:
    """Return how many answers were billed by which route."""
    billed: dict[str, int] = {}
    for charge in nights.emulator.bill.charges:
        billed[charge.route] = billed.get(charge.route, 0) + 1
    return billed


def assert_billed_once(nights: Nights) -> None:
    assert nights.times_billed == {1: len(nights.bodies)}
    assert nights.claims == 0
    recorded = nights.target.one("select sum(cost_usd) from {ledger}.attempts")
    assert recorded == pytest.approx(billed_usd(nights.emulator))


def call(project: Project, *args: str) -> Result:
    """Run a command on a project in this process."""
    command, *rest = args
    place = ["--project-dir", str(project.root), "--profiles-dir", str(project.root)]
    return CliRunner().invoke(cli.main, [command, *place, *rest])


# --- the choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "batch", "reason"),
    [
        ({"online_up_to": 6}, 0, "not more than online_up_to (6) requests"),
        ({"online_up_to": 5}, 6, "batches cost half"),
        ({"deadline": "59m"}, 0, "the deadline is within an hour"),
        ({"deadline": "2h"}, 6, "batches cost half"),
        ({"route": "online"}, 0, "route: online"),
        ({"route": "batch", "online_up_to": 100}, 6, "route: batch"),
        # Batches of less than the whole do not make the job a small one.
        ({"online_up_to": 5, "max_batch_requests": 2}, 6, "batches cost half"),
    ],
)
def test_the_first_rule_that_fits_decides_and_is_said(
    begin: Begin, options: dict[str, Any], batch: int, reason: str
) -> None:
    nights = begin(**options)
    counts = nights.run()
    assert counts.requests_in_batches == batch
    assert (counts.ok, counts.pending) == (6 - batch, batch)
    assert nights.heard(f"since {reason}")
    reasons = nights.target.query("select distinct route_reason from {ledger}.shards")
    assert reasons == [(reason,)]
    nights.emulator.finish()
    assert nights.run().ok == 6
    assert routes(nights) == {"batch" if batch else "online": 6}
    assert_billed_once(nights)


def test_fifty_requests_are_few_enough_for_online_unless_declared(begin: Begin) -> None:
    nights = begin(rows=51)
    declared = {"prices": PRICES}
    assert nights.run(bodies=nights.bodies[:50], options=declared).ok == 50
    nights.bodies = [f"other {number}." for number in range(51)]
    assert nights.run(options=declared).requests_in_batches == 51


@pytest.fixture
def at_least_four(monkeypatch: pytest.MonkeyPatch) -> Provider:
    """Bedrock, as if it took batches of four requests and more."""
    pytest.importorskip("boto3")
    pytest.importorskip("moto")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDOFTHETEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")
    monkeypatch.setattr(bedrock_batch, "LIMITS", replace(bedrock_batch.LIMITS, min_requests=4))
    return replace(BEDROCK, least=4)


def test_the_rest_that_is_too_little_for_a_batch_goes_online(
    begin: Begin, at_least_four: Provider
) -> None:
    nights = begin(provider=at_least_four, max_batch_requests=4)
    counts = nights.run()
    assert (counts.ok, counts.pending, counts.requests_in_batches) == (2, 4, 4)
    assert shards(nights.target, "state, requests") == [("submitted", 4)]
    nights.emulator.finish()
    assert nights.run().ok == 6
    assert routes(nights) == {"batch": 4, "online": 2}
    assert nights.times_billed == {1: 6}


def test_what_last_tries_leave_too_little_of_goes_online_with_them(
    begin: Begin, at_least_four: Provider
) -> None:
    cut = rule("length", text="ticket 1.", count=1), rule("length", text="ticket 2.", count=1)
    nights = begin(*cut, provider=at_least_four, rows=5, max_attempts=2)
    nights.run()
    nights.emulator.finish()
    nights.collect()
    nights.bodies = [*nights.bodies, "ticket 6.", "ticket 7.", "ticket 8."]
    assert nights.run().ok == 8
    assert routes(nights) == {"batch": 5, "online": 5}


@pytest.mark.parametrize(("options", "rows"), [({"route": "batch"}, 3), ({"limit": 3}, 6)])
def test_what_is_too_little_for_a_batch_and_may_go_no_other_way_stays_pending(
    begin: Begin, at_least_four: Provider, options: dict[str, Any], rows: int
) -> None:
    nights = begin(provider=at_least_four, rows=rows, wait="forever", **options)
    counts = nights.run()
    assert (counts.pending, counts.requests_sent) == (rows, 0)
    assert shards(nights.target) == []
    said = "3 requests are fewer than the provider takes in a batch (4)"
    assert [said in each for each in nights.said].count(True) == 1


def test_urgent_rows_are_answered_now_and_the_others_in_a_batch(
    begin: Begin, target: Target
) -> None:
    # NULL, as for the row 3, is not urgent.
    nights = begin(target=target, urgent_when="nullif(id, 3) < 4 and body like 'ticket%'")
    counts = nights.run()
    assert (counts.ok, counts.pending) == (2, 4)
    assert nights.heard("2 urgent ones go online")
    urgent = "select id from {schema}.labels where llm_status = 'ok' order by id"
    assert target.query(urgent) == [(1,), (2,)]
    assert routes(nights) == {"online": 2}
    nights.emulator.finish()
    assert nights.run().ok == 6
    assert routes(nights) == {"online": 2, "batch": 4}
    assert_billed_once(nights)


def test_rows_that_are_few_beside_the_urgent_ones_go_online_too(begin: Begin) -> None:
    nights = begin(urgent_when="id <= 4", online_up_to=2)
    assert nights.run().ok == 6
    assert routes(nights) == {"online": 6}


def test_a_limit_holds_for_batches_too(begin: Begin) -> None:
    nights = begin(rows=10, limit=4, max_batch_requests=3)
    for sent, total in ((4, 4), (4, 8), (2, 10), (0, 10)):
        counts = nights.run()
        assert (counts.requests_in_batches, counts.pending) == (sent, 10)
        assert sum(shards(nights.target, "requests")) == total
    assert max(shards(nights.target, "requests")) <= 3
    nights.emulator.finish()
    assert nights.run().ok == 10
    assert_billed_once(nights)


# --- what is asked once ---------------------------------------------------------------------------


def test_equal_rows_and_equal_models_share_one_request(begin: Begin, target: Target) -> None:
    nights = begin(target=target)
    nights.bodies = ["equal.", "equal.", "other.", "equal."]
    assert nights.run().requests_in_batches == 2
    others = Nights(target, OPENAI, nights.emulator, ["equal.", "third."], {}, "others")
    counts = others.run()  # while the first batch is open
    assert (counts.requests_in_batches, counts.pending) == (1, 2)
    nights.emulator.finish()
    nights.collect()
    assert nights.run().ok == 4
    assert others.run().ok == 2
    assert nights.times_billed == {1: 3}


def test_a_run_collects_what_it_wants_from_a_batch_of_another_model(begin: Begin) -> None:
    nights = begin()
    nights.run()
    nights.emulator.finish()
    others = Nights(nights.target, OPENAI, nights.emulator, nights.bodies, {}, "others")
    counts = others.run()
    assert (counts.ok, counts.requests_sent) == (6, 0)
    assert nights.times_billed == {1: 6}


def test_a_run_waits_for_what_it_wants_in_a_batch_of_another_model(begin: Begin) -> None:
    nights = begin()
    nights.run()
    waits = {"wait": "30s"}
    others = Nights(nights.target, OPENAI, nights.emulator, nights.bodies, waits, "others")
    others.said = Told({"waiting for 1 batches": nights.emulator.finish})
    counts = others.run()
    assert (counts.ok, counts.requests_sent) == (6, 0)
    assert nights.times_billed == {1: 6}


class Told(list[str]):
    """What was told, and what happens, once each, when something is."""

    def __init__(self, acts: Mapping[str, Callable[[], object]]) -> None:
        self._acts = dict(acts)
        super().__init__()

    def append(self, message: str) -> None:
        super().append(message)
        for text in [text for text in self._acts if text in message]:
            self._acts.pop(text)()


# --- the deadline ---------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["collect", "run"])
def test_near_the_deadline_the_unfinished_tail_goes_online(
    begin: Begin, provider: Provider, target: Target, by: str
) -> None:
    nights = begin(provider=provider, target=target, deadline="6h")

    def look() -> None:
        nights.collect() if by == "collect" else nights.run()

    nights.run()
    nights.emulator.advance(stage="in_progress", fraction=0.5)
    age(target, hours=4.9)
    look()
    assert nights.calls[f"{provider.name}.batches.cancel"] == 0
    age(target, hours=0.2)  # an hour before
    look()  # asks for the cancelling
    assert nights.calls[f"{provider.name}.batches.cancel"] == 1
    assert nights.heard("is cancelled: its deadline is in 5")  # 54 minutes, less what this took
    look()  # it is final, so what it leaves is sent
    assert nights.shards == ["cancelled"]
    assert routes(nights) == {"batch": 3, "online": 3}
    counts = nights.run()
    assert (counts.ok, counts.requests_sent) == (6, 0)
    assert nights.outcomes == {"ok": 6, "transient": 3}
    assert_billed_once(nights)


def test_without_a_deadline_no_batch_is_cancelled(begin: Begin) -> None:
    nights = begin()
    nights.run()
    age(nights.target, hours=23)
    nights.collect()
    assert nights.calls["openai.batches.cancel"] == 0


def test_a_batch_that_was_asked_for_is_not_cancelled_for_a_deadline(begin: Begin) -> None:
    nights = begin(route="batch", deadline="30m")
    assert nights.run().requests_in_batches == 6
    age(nights.target, hours=2)
    nights.collect()
    assert nights.run().pending == 6
    nights.emulator.finish()
    assert nights.run().ok == 6
    assert routes(nights) == {"batch": 6}


def hang(nights: Nights) -> None:
    """Bring a batch near its deadline, half of it done, in a cancelling that does not end."""
    nights.run()
    nights.emulator.advance(stage="in_progress", fraction=0.5)
    age(nights.target, hours=5.25)
    nights.collect()
    nights.collect()
    age(nights.target, hours=0.5)


def test_a_tail_that_hangs_is_asked_online_too_and_its_late_answers_are_recorded(
    begin: Begin, provider: Provider
) -> None:
    nights = begin(rule("cancel_hangs"), provider=provider, deadline="6h", rescue_max_usd=10)
    hang(nights)
    assert routes(nights) == {"batch": 3}
    nights.collect()
    assert nights.heard("6 of its requests may be asked online too, for at most 10 USD")
    assert routes(nights) == {"batch": 3, "online": 6}
    assert nights.run().ok == 6
    answers = "select id, category, urgency from {schema}.labels order by id"
    kept = nights.target.query(answers)

    nights.emulator.advance(25 * 3600)  # the window ends, and so does the batch
    made = nights.collect()
    assert [shard.state.value for shard in made.moved] == ["expired"]
    # Three were billed by both ways, and each of those by the batch is known to be a copy.
    assert nights.times_billed == {1: 3, 2: 3}
    late = (
        "select count(*) from {ledger}.attempts a join {ledger}.results r "
        "on r.request_key = a.request_key and r.attempt_id = a.copy_of "
        "where a.outcome = 'ok' and a.route = 'batch'"
    )
    assert nights.target.one(late) == 3
    first = (
        "select count(*) from {ledger}.results r join {ledger}.attempts a "
        "on a.attempt_id = r.attempt_id where a.route = 'online' and a.copy_of is null"
    )
    assert nights.target.one(first) == 6
    recorded = nights.target.one("select sum(cost_usd) from {ledger}.attempts")
    assert recorded == pytest.approx(billed_usd(nights.emulator))
    assert nights.claims == 0
    counts = nights.run()  # its counts must still add up
    assert (counts.ok, counts.requests_sent) == (6, 0)
    assert nights.target.query(answers) == kept


def test_a_run_that_waits_asks_the_tail_online_while_the_batch_hangs(begin: Begin) -> None:
    nights = begin(rule("cancel_hangs"), deadline="6h", rescue_max_usd=10, wait="30s")
    nights.said = Told(
        {
            "waiting for 1 batches": lambda: age(nights.target, hours=5.25),
            "is cancelled: its deadline": lambda: age(nights.target, hours=0.5),
        }
    )
    assert nights.run().ok == 6
    assert routes(nights) == {"online": 6}
    assert nights.shards == ["submitted"]
    nights.emulator.advance(25 * 3600)
    nights.collect()
    assert nights.shards == ["expired"]
    assert routes(nights) == {"online": 6}


@pytest.mark.parametrize(("max_usd", "copies"), [(0.0185, 2), (0.007, 0), (0, 0)])
def test_no_more_is_asked_twice_than_the_money_allows(
    begin: Begin, max_usd: float, copies: int
) -> None:
    # By the prices declared, a thousand tokens of output cost 0.008 USD online.
    nights = begin(
        rule("cancel_hangs"), deadline="6h", rescue_max_usd=max_usd,
        params={"max_tokens": 1000},
    )  # fmt: skip
    hang(nights)
    for _ in range(2):
        nights.collect()
    assert routes(nights) == {"batch": 3, **({"online": copies} if copies else {})}
    assert nights.outcomes == ({"copied": copies, "ok": copies} if copies else {})
    assert nights.claims == 6 - copies
    nights.emulator.advance(25 * 3600)
    nights.collect()  # what the batch leaves is overdue, and goes online
    assert nights.run().ok == 6
    assert nights.claims == 0


def test_answers_that_a_cancelling_would_throw_away_are_waited_for(begin: Begin) -> None:
    pytest.importorskip("google.genai")
    nights = begin(provider=GOOGLE, deadline="6h")
    nights.run()
    nights.emulator.advance(stage="in_progress", fraction=0.5)
    age(nights.target, hours=5.1)
    for _ in range(3):
        nights.collect()
    assert nights.calls["google.batches.cancel"] == 0
    assert len([said for said in nights.said if "set rescue_max_usd to ask" in said]) == 1
    nights.emulator.finish()
    assert nights.run().ok == 6
    assert routes(nights) == {"batch": 6}
    assert_billed_once(nights)


def test_what_may_be_asked_twice_is_where_a_cancelling_would_throw_answers_away(
    begin: Begin,
) -> None:
    pytest.importorskip("google.genai")
    nights = begin(
        provider=GOOGLE, deadline="6h", rescue_max_usd=0.0185, params={"max_tokens": 1000}
    )
    nights.run()
    nights.emulator.advance(stage="in_progress", fraction=0.5)
    age(nights.target, hours=5.1)
    for _ in range(2):
        nights.collect()
    assert nights.calls["google.batches.cancel"] == 0
    assert nights.outcomes == {"copied": 2, "ok": 2}
    nights.emulator.finish()
    assert nights.run().ok == 6
    assert nights.times_billed == {1: 4, 2: 2}
    copies = nights.target.one("select count(copy_of) from {ledger}.attempts")
    assert copies == 2
    recorded = nights.target.one("select sum(cost_usd) from {ledger}.attempts")
    assert recorded == pytest.approx(billed_usd(nights.emulator))
    assert nights.claims == 0


def test_near_the_deadline_what_was_in_a_refused_batch_goes_online(
    begin: Begin, target: Target
) -> None:
    nights = begin(rule("queue_full", count=50), rows=8, target=target, deadline="6h", limit=5)
    nights.run()
    assert set(nights.shards) == {"failed"}
    age(target, hours=4.9)
    nights.collect()
    assert routes(nights) == {}
    age(target, hours=0.2)
    for _ in range(2):
        nights.collect()
    # No more than were in the batch, though others are pending too.
    assert routes(nights) == {"online": 5}
    assert nights.times_billed == {1: 5}
    [reason] = target.query(
        "select distinct route_reason from {ledger}.shards where route = 'online'"
    )
    assert reason == ("the deadline of its batch has come",)
    assert nights.claims == 0


# --- rows still pending ---------------------------------------------------------------------------


def test_hold_keeps_the_table_until_every_row_has_its_answer(project: Project) -> None:
    with rehearsal(OPENAI) as emulator:
        project.model("tickets", rows_sql(tickets(3)))
        declare(project, OPENAI, emulator, on_pending="hold")
        project.model("report", "select count(*) as labelled from {{ ref('labels') }}")
        first = project.run("run")  # there is no table to keep
        assert first.ok, first.output
        assert statuses(project.target) == {"pending": 3}
        emulator.finish()
        assert project.run("run").ok
        assert statuses(project.target) == {"ok": 3}

        project.model("tickets", rows_sql(tickets(5)))
        held = project.run("run")
        assert held.ok, held.output
        assert "2 rows are pending; the table stays as it was (on_pending: hold)" in held.output
        assert held.response("labels")["pending"] == 2
        assert statuses(project.target) == {"ok": 3}
        assert project.target.one("select labelled from {schema}.report") == 3
        emulator.finish()
        assert project.run("run").ok
        assert statuses(project.target) == {"ok": 5}
        assert project.target.one("select labelled from {schema}.report") == 5
        assert emulator.bill.paid_twice == {}


def test_fail_fails_the_model_and_what_depends_on_it_is_skipped(project: Project) -> None:
    with rehearsal(OPENAI) as emulator:
        project.model("tickets", rows_sql(tickets(3)))
        declare(project, OPENAI, emulator, on_pending="fail")
        project.model("report", "select count(*) as labelled from {{ ref('labels') }}")
        result = project.run("run")
        assert not result.ok
        assert "3 rows are pending, and on_pending is fail" in result.output
        status = {name.split(".")[-1]: node["status"] for name, node in result.nodes.items()}
        assert status == {"tickets": "success", "labels": "error", "report": "skipped"}
        emulator.finish()
        result = project.run("run")
        assert result.ok, result.output
        assert project.target.one("select labelled from {schema}.report") == 3
        assert len(emulator.bill.charges) == 3


# --- being told -----------------------------------------------------------------------------------

TELL = "echo $BATCHSQL_MODEL $BATCHSQL_ANSWERED $BATCHSQL_GIVEN_UP >> {told}; test ! -e {broken}"


def test_a_command_is_told_once_and_again_when_it_failed(duck: Project, tmp_path: Path) -> None:
    told, broken = tmp_path / "told", tmp_path / "broken"
    command = TELL.format(told=told, broken=broken)

    def lines() -> list[str]:
        return told.read_text().splitlines() if told.exists() else []

    with rehearsal(OPENAI, rule("rejected", text="ticket 3")) as emulator:
        duck.model("tickets", rows_sql(tickets(4)))
        declare(duck, OPENAI, emulator, on_complete={"command": command})
        assert duck.run("run").ok
        assert call(duck, "collect").exit_code == 0
        assert lines() == []  # the batch is open
        emulator.finish()
        broken.touch()
        result = call(duck, "collect")
        assert (result.exit_code, lines()) == (0, ["labels 3 1"])
        assert "the command of on_complete ended with 1" in result.stderr
        broken.unlink()
        assert call(duck, "collect").exit_code == 0
        assert lines() == ["labels 3 1"] * 2
        # Told now; neither another look nor another run tells it again.
        assert call(duck, "collect").exit_code == 0
        assert duck.run("run").ok
        assert lines() == ["labels 3 1"] * 2

        # New rows are a new thing to tell of, by the run itself if it waits.
        duck.model("tickets", rows_sql(tickets(6)))
        assert duck.run("run").ok
        assert len(lines()) == 2
        emulator.finish()
        assert duck.run("run").ok
        assert lines()[2:] == ["labels 5 1"]


@contextmanager
def webhook(statuses: list[int]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Serve an address that replies with one status after another; give what it was told."""
    told: list[Mapping[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(statuses[len(told) - 1])
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/hooks/secret-part", told
        finally:
            server.shutdown()
            thread.join()


def test_a_webhook_is_told_by_the_run_and_again_when_it_did_not_take_it(duck: Project) -> None:
    facts = {
        "model": "labels", "enrichment": "model.shop.labels", "answered": 3, "given_up": 0,
    }  # fmt: skip
    with rehearsal(OPENAI, durations=INSTANT) as emulator, webhook([503, 200]) as (url, told):
        duck.model("tickets", rows_sql(tickets(3)))
        declare(duck, OPENAI, emulator, wait="forever", on_complete={"webhook": url})
        result = duck.run("run")
        assert result.ok, result.output
        assert told == [facts]
        assert "the webhook of on_complete did not take the call (503)" in result.output
        result = duck.run("run")
        assert told == [facts, facts]
        assert duck.run("run").ok
        assert len(told) == 2
    assert "secret-part" not in result.output


# --- who may see the rows -------------------------------------------------------------------------

INTERNAL: dict[str, Any] = {
    "model": "openai_compatible/small",
    "engine": {"base_url": "http://127.0.0.1:1/v1", "api_key_env": "none", "internal": True},
}


def test_rows_that_may_not_leave_are_refused_before_anything_runs(duck: Project) -> None:
    with rehearsal(OPENAI) as emulator:
        duck.model("tickets", rows_sql(tickets(3)))
        declare(duck, OPENAI, emulator, egress=False)
        result = duck.run("parse")
        assert not result.ok
        assert f"egress: is false, but {OPENAI.model} is asked outside" in result.output
        assert "alternatives" in result.output
        assert list(emulator.calls) == []


def test_rows_that_may_not_leave_are_asked_of_the_engine_declared(
    duck: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_PROVIDERS", dict(registry._PROVIDERS))
    registry.register("here", fake.open_fake, local.PARAMS, is_engine=True)
    with rehearsal(OPENAI) as emulator:
        duck.model("tickets", rows_sql(tickets(3)))
        other = {"model": "here/small", "engine": {"slots": 2}}
        declare(
            duck, OPENAI, emulator, egress=False, alternatives={"engine": other},
            prices={"input": 1000.0, "output": 1000.0},
        )  # fmt: skip
        result = duck.run("run")
        assert result.ok, result.output
        assert statuses(duck.target) == {"ok": 3}
        assert list(emulator.calls) == []
    ((model, settings),) = duck.target.query("select model, settings from {ledger}.shards")
    assert (model, json.loads(settings)["engine"]) == ("here/small", {"slots": 2})
    # The declared prices are those of the declared model.
    assert duck.target.one("select sum(cost_usd) from {ledger}.attempts") is None


def test_rows_that_may_not_leave_are_asked_of_the_internal_server_declared(duck: Project) -> None:
    with (
        rehearsal(OPENAI) as outside,
        rehearsal(OPENAI, models=["small"]) as inside,
    ):
        duck.model("tickets", rows_sql(tickets(3)))
        address = {"base_url": inside.openai_base_url, "api_key_env": KEY_ENV}
        other = {**INTERNAL, "engine": {**INTERNAL["engine"], **address}}
        declare(duck, OPENAI, outside, egress=False, alternatives={"engine": other})
        result = duck.run("run")
        assert result.ok, result.output
        assert statuses(duck.target) == {"ok": 3}
        assert list(outside.calls) == []
        assert len(inside.bill.charges) == 3


def test_a_server_declared_as_internal_may_see_them(begin: Begin) -> None:
    with rehearsal(OPENAI, models=["small"]) as emulator:
        inside = {"base_url": emulator.openai_base_url, "api_key_env": KEY_ENV, "internal": True}
        nights = begin(egress=False)
        counts = nights.run(model="openai_compatible/small", engine=inside)
        assert counts.ok == 6
        assert len(emulator.bill.charges) == 6


@pytest.mark.parametrize(
    ("llm", "message"),
    [
        (
            {"model": "local/smollm2-135m", "route": "batch", "engine": {}},
            "route: got 'batch', but local/smollm2-135m runs here",
        ),
        (
            {"route": "engine"},
            f"route: got 'engine', but {OPENAI.model} does not run here",
        ),
        (
            {"egress": False, "alternatives": {"engine": "anthropic/claude-haiku-4-5"}},
            "alternatives.engine: got 'anthropic/claude-haiku-4-5', which is asked outside",
        ),
        (
            {"egress": False, "route": "engine", "alternatives": {"engine": INTERNAL}},
            "alternatives.engine: got 'openai_compatible/small', which does not run in this",
        ),
    ],
)
def test_a_way_that_a_model_cannot_go_is_a_mistake(
    duck: Project, llm: dict[str, Any], message: str
) -> None:
    with rehearsal(OPENAI) as emulator:
        duck.model("tickets", rows_sql(tickets(1)))
        declare(duck, OPENAI, emulator, **llm)
        result = duck.run("parse")
        assert not result.ok
        assert message in result.output


def test_batches_of_a_server_that_offers_none_are_refused(begin: Begin) -> None:
    nights = begin(route="batch")
    engine = {"base_url": nights.emulator.openai_base_url, "api_key_env": KEY_ENV}
    with pytest.raises(SystemicError, match="offers no batches"):
        nights.run(model="openai_compatible/small", engine=engine)
    assert nights.billed == 0


# --- the ledger -----------------------------------------------------------------------------------


def test_a_fresh_ledger_beside_a_paid_table_is_refused_until_allowed(project: Project) -> None:
    with rehearsal(OPENAI, durations=INSTANT) as emulator:
        project.model("tickets", rows_sql(tickets(3)))
        declare(project, OPENAI, emulator, wait="forever")
        assert project.run("run").ok
        project.target.query("drop schema {ledger} cascade")
        asked = len(emulator.calls)
        result = project.run("run")
        assert not result.ok
        assert "holds 3 answered rows that the ledger in" in result.output
        assert "allow_fresh_ledger: true" in result.output
        assert len(emulator.calls) == asked
        assert statuses(project.target) == {"ok": 3}
        result = project.run("run", "--vars", "{batchsql: {allow_fresh_ledger: true}}")
        assert result.ok, result.output
        assert len(emulator.bill.charges) == 6
        assert project.run("run").ok  # the ledger is no fresh one any more
        assert len(emulator.bill.charges) == 6
