"""Dead letters asked again at once, with another model or prompt, and what that leaves alone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from batchsql import cli
from batchsql.backends import local, online, registry
from batchsql.cli import replay
from batchsql.emulate import Behaviour, Emulator, Rule
from batchsql.errors import SystemicError
from batchsql.types import Call, Completion, ModelRef, Request
from tests.support.fake import FakeBackend
from tests.support.project import Project, duckdb_target
from tests.support.tables import rows_sql

ALL_TICKETS = "select * from {{ ref('tickets') }}"
ROWS = [
    {"id": 1, "body": "fine"},
    {"id": 2, "body": "@truncate a"},
    {"id": 3, "body": "@truncate b"},
    {"id": 4, "body": "@filter"},
    {"id": 5, "body": "@invalid"},
    {"id": 6, "body": "@truncate a"},
]
CLEAN = "system:\nBe brief.\nuser:\n{{ id }}: {{ body | replace('@', '') }}\n"


class Wise(FakeBackend):
    """Answers what the other fake does not, and remembers what it was asked."""

    asked: dict[str, list[str]]
    trouble: str | None = None

    def _answer(self, request: Request, call: Call) -> Completion:
        self.asked[request.request_key] = [message.content for message in request.messages]
        if self.trouble == "invalid":
            return super()._answer(_saying(request, "@invalid"), call)
        if self.trouble == "systemic" and len(self.asked) > 1:
            raise SystemicError("no credit is left")
        if self.trouble == "stop":
            os.kill(os.getpid(), signal.SIGINT)
        return super()._answer(_saying(request, "please"), call)


def _saying(request: Request, text: str) -> Request:
    message = request.messages[-1]
    return Request(request.request_key, (type(message)(message.role, text),))


@pytest.fixture
def wise(monkeypatch: pytest.MonkeyPatch) -> type[Wise]:
    """The provider ``wise``, and what it was asked by request key."""
    monkeypatch.setattr(registry, "_PROVIDERS", dict(registry._PROVIDERS))
    monkeypatch.setattr(Wise, "asked", {}, raising=False)
    monkeypatch.setattr(Wise, "trouble", None)

    def opener(model: ModelRef, engine: Mapping[str, Any], root: Path) -> Wise:
        return Wise(engine)

    registry.register("wise", opener, local.PARAMS)
    return Wise


@pytest.fixture
def duck(tmp_path: Path) -> Project:
    return Project(tmp_path / "project", duckdb_target(tmp_path / "warehouse.duckdb"))


def call(project: Project, *args: str, typed: str | None = None) -> Result:
    place = ["--project-dir", str(project.root), "--profiles-dir", str(project.root)]
    return CliRunner().invoke(cli.main, ["replay", *place, *args], input=typed)


def document(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def dead_letters(project: Project, rows: list[dict[str, Any]] = ROWS, **llm: Any) -> None:
    project.model("tickets", rows_sql(rows))
    project.model("labels", ALL_TICKETS, llm=llm)
    result = project.run("run")
    assert result.ok, result.output
    project.forget_sent()


def dead(project: Project) -> int:
    return int(project.target.one("select count(*) from {ledger}.dead_letters"))


def keys_of(project: Project, *ids: int) -> set[str]:
    listed = ", ".join(map(str, ids))
    sql = f"select llm_request_id from {{schema}}.labels where id in ({listed})"
    return {key for (key,) in project.target.query(sql)}


# --- another model --------------------------------------------------------------------------------


def test_dead_letters_of_one_cause_are_answered_by_another_model(
    project: Project, wise: type[Wise]
) -> None:
    dead_letters(project)
    target = project.target
    wanted, all_keys = keys_of(project, 2, 3), keys_of(project, 1, 2, 3, 4, 5, 6)
    # A request that waits: recorded, and not sent yet.
    project.model("tickets", rows_sql([*ROWS, {"id": 7, "body": "new"}]))
    assert project.run("run", "--select", "tickets").ok
    place = ["--project-dir", str(project.root), "--profiles-dir", str(project.root)]
    assert CliRunner().invoke(cli.main, ["plan", *place]).exit_code == 0
    found = document(
        call(project, "labels", "--cause", "truncated", "--model", "wise/old", "--yes", "--json")
    )
    assert found == {
        "replayed": 2, "by_cause": {"truncated": 2}, "answered": 2, "failed": 0, "left": 0,
        "cost_usd": 0, "estimated_usd": None,
    }  # fmt: skip
    assert set(wise.asked) == wanted
    assert project.sent() == []
    assert sorted(texts[-1] for texts in wise.asked.values()) == ["@truncate a", "@truncate b"]
    assert {texts[0] for texts in wise.asked.values()} == {"You label tickets."}
    assert dead(project) == 2
    recorded = target.query(
        "select replace(r.request_key::text, '-', ''), s.model, s.backend, s.route_reason, "
        "s.route, a.model_reported, a.outcome from {ledger}.results r "
        "join {ledger}.attempts a on a.attempt_id = r.attempt_id "
        "join {ledger}.shards s on s.shard_id = a.shard_id where s.model = 'wise/old'"
    )
    expected = ("wise/old", "wise", "replay with model wise/old", "online", "wise/old", "ok")
    assert sorted(recorded) == sorted((key, *expected) for key in wanted)
    assert target.one("select count(*) from {ledger}.claims") == 0
    # The next run builds them in, and asks only for the row that waited.
    result = project.run("run")
    assert result.ok, result.output
    assert len(wise.asked) == 2
    assert len(project.sent()) == 1
    assert set(project.sent()).isdisjoint(all_keys)
    built = target.query(
        "select id, llm_status, category is not null and urgency is not null from {schema}.labels"
    )
    assert sorted(built) == [
        (1, "ok", True), (2, "ok", True), (3, "ok", True), (4, "failed", False),
        (5, "failed", False), (6, "ok", True), (7, "ok", True),
    ]  # fmt: skip
    assert keys_of(project, 2, 3, 6) == wanted


def test_what_fails_again_is_dead_again(project: Project, wise: type[Wise]) -> None:
    dead_letters(project, max_attempts=2)
    wise.trouble = "invalid"
    result = call(project, "--model", "wise/old", "--yes")
    assert result.exit_code == 0, result.stderr
    assert "0 dead letters answered, 4 failed again" in result.stdout
    assert dead(project) == 4
    tries = "select count(*) from {ledger}.attempts a join {ledger}.shards s on "
    tries += "s.shard_id = a.shard_id where s.model = 'wise/old'"
    assert project.target.one(tries) == 4 * 2  # max_attempts, as declared
    assert project.run("run").ok
    assert project.sent() == []


@pytest.mark.parametrize("trouble", ["systemic", "stop"])
def test_what_could_not_be_asked_stays_dead(
    project: Project, wise: type[Wise], trouble: str
) -> None:
    dead_letters(project)
    wise.trouble = trouble
    result = call(project, "--model", "wise/old", "--yes")
    assert result.exit_code == 1
    assert "1 answers are kept, 3 dead letters stay dead" in result.stderr
    assert ("no credit is left" in result.stderr) == (trouble == "systemic")
    assert dead(project) == 3
    assert project.run("run").ok
    assert project.sent() == []
    wise.trouble = None
    assert document(call(project, "--model", "wise/old", "--yes", "--json"))["answered"] == 3
    assert dead(project) == 0


def test_models_with_one_declaration_share_a_replay(duck: Project, wise: type[Wise]) -> None:
    duck.model("others", ALL_TICKETS, llm={})
    dead_letters(duck)
    for how in (["--model", "wise/old"], ["--prompt", str(duck.root / "clean.md")]):
        duck.write("clean.md", CLEAN)
        cause = "filtered" if how[0] == "--model" else "truncated"
        found = document(call(duck, *how, "--cause", cause, "--yes", "--json"))
        count = {"filtered": 1, "truncated": 2}[cause]
        assert (found["by_cause"], found["left"]) == ({cause: count}, 0)
        assert found["replayed"] == found["answered"] == count


def test_dead_letters_of_models_that_are_gone_are_left(duck: Project, wise: type[Wise]) -> None:
    dead_letters(duck)
    (duck.root / "models" / "labels.sql").unlink()
    assert duck.run("parse").ok
    result = call(duck, "--model", "wise/old", "--yes")
    assert (result.exit_code, wise.asked) == (0, {})
    assert "4 dead letters cannot be asked" in result.stdout
    (duck.root / "target" / "manifest.json").unlink()
    result = call(duck, "--model", "wise/old", "--yes")
    assert result.exit_code == 1
    assert "run dbt parse" in result.stderr


def test_nothing_dead_is_no_error(duck: Project, wise: type[Wise]) -> None:
    duck.write("clean.md", CLEAN)
    ways = (["--model", "wise/old"], ["--prompt", str(duck.root / "clean.md")])
    for how in ways:
        assert call(duck, *how).stdout == "no ledger yet; dbt run makes one\n"
    dead_letters(duck, [{"id": 1, "body": "fine"}])
    for how in ways:
        assert call(duck, *how).stdout == "no dead letters\n"


# --- whether rows may leave -----------------------------------------------------------------------


def test_rows_that_may_not_leave_are_sent_to_no_outside_model(
    duck: Project, wise: type[Wise]
) -> None:
    dead_letters(duck, egress=False, engine={"internal": True})
    duck.write("clean.md", CLEAN)
    for more in ([], ["--prompt", str(duck.root / "clean.md")]):
        result = call(duck, "--model", "wise/old", "--yes", *more)
        assert result.exit_code == 1
        assert "egress is false, but wise/old is asked outside; nothing was sent" in result.stderr
    assert (dead(duck), wise.asked) == (4, {})
    inside = ["--engine", "{internal: true}", "--yes", "--json"]
    assert document(call(duck, "--model", "wise/old", *inside))["answered"] == 4


def test_a_model_that_shares_the_requests_can_forbid_it_too(
    duck: Project, wise: type[Wise]
) -> None:
    duck.model("others", ALL_TICKETS, llm={"egress": False, "engine": {"internal": True}})
    dead_letters(duck)
    result = call(duck, "labels", "--model", "wise/old", "--yes")
    assert result.exit_code == 1
    assert "others: egress is false" in result.stderr
    assert wise.asked == {}


# --- mistakes -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broken_prompts(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Dead letters, beside prompts that cannot be asked; nothing is ever sent for them."""
    folder = tmp_path_factory.mktemp("mistakes")
    made = Project(folder / "project", duckdb_target(folder / "warehouse.duckdb"))
    made.write("constant.md", "Say yes.\n")
    made.write("broken.md", "{{ body\n")
    made.write("unknown.md", "{{ subject }}\n")
    made.write("failing.md", "{{ body.nothing.at_all }}\n")
    (made.root / "latin.md").write_bytes(b"\xe9 {{ body }}")
    dead_letters(made)
    return made


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--model", "gpt-5"], 2, "got 'gpt-5'; write provider/name"),
        (["--model", "nobody/x"], 1, "the provider 'nobody' is not known"),
        (["--model", "wise/old", "--params", "{heat: 1}"], 1, "params.heat"),
        (["--model", "wise/old", "--params", "{temperature: -1}"], 1, "params.temperature"),
        (["--model", "wise/old", "--params", "hot"], 2, "give a mapping"),
        (["--model", "openai/gpt-5-mini", "--engine", "{slots: 3}"], 1, "engine.slots"),
        (["--params", "{temperature: 0}"], 2, "go with --model or --prompt"),
        (["--prompt", "nowhere.md"], 2, "nowhere.md"),
        (["--prompt", "{root}/constant.md"], 1, "refers to no column"),
        (["--prompt", "{root}/broken.md"], 1, "line 1 of the prompt"),
        (["--prompt", "{root}/unknown.md"], 1, "the prompt refers to 'subject'"),
        (["--prompt", "{root}/failing.md"], 1, "cannot be rendered for the row of the request"),
        (["--prompt", "{root}/latin.md"], 1, "is not UTF-8 text"),
    ],
)
def test_mistakes_are_told_and_nothing_is_sent(
    broken_prompts: Project, wise: type[Wise], args: list[str], code: int, message: str
) -> None:
    duck = broken_prompts
    before = duck.target.one("select count(*) from {ledger}.attempts")
    result = call(duck, *[each.replace("{root}", str(duck.root)) for each in args], "--yes")
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert duck.target.one("select count(*) from {ledger}.attempts") == before
    assert (dead(duck), wise.asked, duck.sent()) == (4, {}, [])


def test_declared_parameters_that_the_other_model_refuses_can_be_replaced(duck: Project) -> None:
    dead_letters(duck, params={"temperature": 0.5, "seed": 7})
    asked = ["--model", "anthropic/claude-haiku-4-5", "--yes"]
    result = call(duck, *asked)
    assert result.exit_code == 1
    assert "labels, replayed with anthropic/claude-haiku-4-5: 1 mistake" in result.stderr
    assert "params.seed" in result.stderr
    assert "params" not in call(duck, *asked, "--params", "{temperature: 0}").stderr
    assert dead(duck) == 4


# --- another prompt -------------------------------------------------------------------------------


def test_another_prompt_is_rendered_from_the_rows_as_they_are(
    project: Project, wise: type[Wise]
) -> None:
    dead_letters(project)
    cut, filtered = keys_of(project, 2, 3), keys_of(project, 4)
    project.model("tickets", rows_sql([row for row in ROWS if row["id"] != 3]))
    assert project.run("run", "--select", "tickets").ok
    project.write("clean.md", CLEAN)
    file = str(project.root / "clean.md")
    found = document(
        call(project, "--prompt", file, "--model", "wise/old", "--cause", "truncated", "--yes",
             "--json")
    )  # fmt: skip
    assert (found["replayed"], found["answered"], found["left"]) == (1, 1, 1)
    # One row stands for all that share a request; both say the same but for their ids.
    ((key, texts),) = wise.asked.items()
    assert key in cut
    assert texts in (["Be brief.", "2: truncate a"], ["Be brief.", "6: truncate a"])
    reason, settings = project.target.query(
        "select route_reason, settings from {ledger}.shards where model = 'wise/old'"
    )[0]
    digits = reason.rpartition("sha256 ")[2].rstrip(")")
    assert reason.startswith(f"replay with model wise/old and prompt {file} (sha256 ")
    assert (len(digits), json.loads(settings)["prompt"]) == (12, CLEAN)
    # Without --model the declared one is asked, with the new text: it fails no more.
    found = document(call(project, "--prompt", file, "--cause", "filtered", "--yes", "--json"))
    assert (found["answered"], found["left"]) == (1, 0)
    assert set(project.sent()) == filtered
    project.forget_sent()
    assert project.run("run").ok
    assert project.sent() == []
    built = project.target.query("select id, llm_status from {schema}.labels")
    assert sorted(built) == [(1, "ok"), (2, "ok"), (4, "ok"), (5, "failed"), (6, "ok")]


def test_prompt_finds_pending_rows_of_an_incremental_table(duck: Project, wise: type[Wise]) -> None:
    duck.model("tickets", rows_sql(ROWS))
    only_new = ALL_TICKETS + (
        "{% if batchsql.is_incremental() %} where id > (select max(id) from {{ this }}){% endif %}"
    )
    duck.model("labels", only_new, llm={"incremental": True})
    assert duck.run("run").ok
    duck.forget_sent()
    duck.write("clean.md", CLEAN)
    found = document(call(duck, "--prompt", str(duck.root / "clean.md"), "--yes", "--json"))
    assert (found["answered"], found["left"]) == (4, 0)
    duck.forget_sent()
    assert duck.run("run").ok
    assert duck.sent() == []
    assert duck.target.one("select count(*) from {schema}.labels where llm_status <> 'ok'") == 0


def test_a_declaration_changed_since_leaves_its_dead_letters(
    duck: Project, wise: type[Wise]
) -> None:
    dead_letters(duck)
    duck.write("clean.md", CLEAN)
    duck.write("prompts/label.md", "Label this: {{ body }}\n")
    result = call(duck, "--prompt", str(duck.root / "clean.md"), "--yes")
    assert result.exit_code == 0, result.stderr
    assert "4 dead letters cannot be asked" in result.stdout
    assert duck.sent() == []


# --- asking people, and the bill ------------------------------------------------------------------


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    pytest.importorskip("openai")
    monkeypatch.setattr(online, "FIRST_BACKOFF_SECONDS", 0.01)
    monkeypatch.setenv("REHEARSAL_API_KEY", "sk-rehearsal-0123456789")
    with Emulator(rules=[Rule(behaviour=Behaviour.REFUSAL, text="@filter")]) as server:
        yield server


def test_question_tells_what_it_may_cost_and_the_answers_cost_what_is_billed(
    duck: Project, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead_letters(duck)
    duck.write("clean.md", CLEAN)
    engine = f"{{base_url: '{emulator.openai_base_url}', api_key_env: REHEARSAL_API_KEY}}"
    how = ["--model", "openai/gpt-5-mini", "--engine", engine]
    result = call(duck, *how)
    assert result.exit_code == 2
    assert "4 dead letters of labels (" in result.stderr
    assert "would be sent to openai/gpt-5-mini now, for at most about 0." in result.stderr
    assert "give --yes" in result.stderr
    monkeypatch.setattr(replay, "_is_interactive", lambda: True)
    assert call(duck, *how, typed="n\n").exit_code == 1
    assert (dead(duck), len(emulator.bill.charges)) == (4, 0)
    result = call(duck, *how, typed="y\n")
    assert "3 dead letters answered, 1 failed again, 0." in result.stdout
    assert dead(duck) == 1
    tries = len(emulator.bill.charges)
    assert tries == 3 + 3  # the refused one has a budget of three
    sums = "select count(*), sum(a.cost_usd) from {ledger}.attempts a where cost_usd is not null"
    count, cost = duck.target.query(sums)[0]
    assert (count, cost > 0) == (tries, True)
    # With a prompt that leaves out what is refused, the last one is answered too.
    found = document(call(duck, *how, "--prompt", str(duck.root / "clean.md"), "--yes", "--json"))
    assert found["answered"] == 1
    assert 0 < found["cost_usd"] <= found["estimated_usd"]
    assert duck.run("run").ok
    assert len(emulator.bill.charges) == tries + 1
