"""The commands that look at a project and its ledger, and what they never do: send."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from batchsql import cli
from batchsql.cli import ledger, replay, screen
from batchsql.version import __version__
from tests.support.project import ROOT, Project, Target, duckdb_target
from tests.support.tables import rows_sql, tickets

ALL_TICKETS = "select * from {{ ref('tickets') }}"
NAMES = sorted(cli.main.commands)
LEDGER_READERS = ("status", "failed", "replay")


def call(project: Project, *args: str) -> Result:
    """Run a command on a project in this process."""
    command, *rest = args
    place = ["--project-dir", str(project.root), "--profiles-dir", str(project.root)]
    return CliRunner().invoke(cli.main, [command, *place, *rest])


def document(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def plan_of(project: Project, *args: str) -> dict[str, Any]:
    (model,) = document(call(project, "plan", "--json", *args))["models"]
    return model


def numbers(plan: dict[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(plan[name] for name in names)


@pytest.fixture
def duck(tmp_path: Path) -> Project:
    return Project(tmp_path / "project", duckdb_target(tmp_path / "warehouse.duckdb"))


def dead_letters(project: Project) -> None:
    """Run a model with one good row and four dead ones of three causes."""
    rows = [
        {"id": 1, "body": "fine"},
        {"id": 2, "body": "@truncate a"},
        {"id": 3, "body": "@truncate b"},
        {"id": 4, "body": "@filter"},
        {"id": 5, "body": '@raw:"\\u001b]0;owned\\u0007[bold]\\u001b[31m\\u202eno\\u0000 json"'},
    ]
    project.model("tickets", rows_sql(rows))
    project.model("labels", ALL_TICKETS, llm={})
    result = project.run("run")
    assert result.ok, result.output
    project.forget_sent()


# --- help and usage -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_command_teaches_what_it_does_what_it_never_does_and_how(name: str) -> None:
    result = CliRunner().invoke(cli.main, [name, "--help"])
    assert result.exit_code == 0
    assert re.search(r"\bnever\b", result.stdout, re.IGNORECASE)
    assert f"Example:\n    batchsql {name}" in result.stdout
    for option in cli.main.commands[name].params:
        assert isinstance(option, click.Argument) or option.help, option.name


@pytest.mark.parametrize("name", NAMES)
def test_command_is_in_the_readme(name: str) -> None:
    assert f"batchsql {name}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_version_is_the_package_version() -> None:
    assert CliRunner().invoke(cli.main, ["--version"]).stdout.split()[-1] == __version__


@pytest.mark.parametrize(
    "args",
    [
        ["nothing"],
        ["plan", "--nothing"],
        ["status", "--vars", "[1]"],
        ["status", "--vars", "{a: "],
        ["replay", "--cause", "ok"],
        ["failed", "--limit", "0"],
        ["recover", "--select", "a", "--since", "3weeks"],
        ["status", "--project-dir", "/nowhere"],
    ],
)
def test_wrong_usage_ends_with_2(args: list[str]) -> None:
    result = CliRunner().invoke(cli.main, args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: " in result.stderr


def test_exit_codes_are_listed_and_durations_of_days_are_hinted_at() -> None:
    told = " ".join(CliRunner().invoke(cli.main, ["--help"]).stdout.split())
    assert "0 good, 1 an error, 2 wrong usage, 3 work is open" in told
    args = ["recover", "--select", "a", "--since", "3weeks"]
    assert "write a duration such as 90s, 30m, 6h or 2d" in " ".join(
        CliRunner().invoke(cli.main, args).stderr.split()
    )


@pytest.mark.parametrize(
    ("cost_usd", "shown"),
    [(0.0, "0.0000 USD"), (0.00001, "under 0.0001 USD"), (0.0001, "0.0001 USD"), (2, "2.0000 USD")],
)
def test_cost_never_looks_like_nothing_where_something_was_paid(
    cost_usd: float, shown: str
) -> None:
    assert screen.usd(cost_usd) == shown


@pytest.mark.parametrize("file", [None, "answers.csv"])
def test_import_of_a_folder_that_is_no_export_says_which_to_give(
    duck: Project, tmp_path: Path, file: str | None
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    if file is not None:
        (folder / file).touch()
    result = call(duck, "import", str(folder))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "give the folder that batchsql export wrote" in result.stderr


def test_folder_without_a_project_is_an_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.main, ["status", "--project-dir", str(tmp_path)])
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(r"Error: there is no dbt_project.yml in .*\n", result.stderr)


def test_broken_profile_is_one_message_and_debug_shows_more(duck: Project) -> None:
    (duck.root / "profiles.yml").write_text("other: {}\n")
    result = call(duck, "status")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ")
    assert "profile" in result.stderr
    assert "Traceback" not in result.stderr
    assert isinstance(result.exception, SystemExit)
    assert not isinstance(call(duck, "status", "--debug").exception, SystemExit)


def test_project_is_found_from_a_folder_inside_it(
    duck: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    duck.write("models/deep/x.md", "")
    monkeypatch.chdir(duck.root / "models" / "deep")
    result = CliRunner().invoke(cli.main, ["status", "--profiles-dir", str(duck.root)])
    assert result.stdout == f"{ledger.NO_LEDGER}\n"


# --- no ledger ------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", LEDGER_READERS)
def test_missing_ledger_is_no_error(project: Project, command: str) -> None:
    result = call(project, command)
    assert (result.exit_code, result.stdout) == (0, f"{ledger.NO_LEDGER}\n")
    assert document(call(project, command, "--json"))
    if project.target.kind == "duckdb":  # asking makes no file
        assert not Path(project.target.profile["path"]).exists()


# --- plan -----------------------------------------------------------------------------------------


def test_plan_counts_what_a_run_would_send_and_sends_nothing(project: Project) -> None:
    project.model("tickets", rows_sql([*tickets(5), {"id": 6, "body": "ticket 5"}]))
    project.model("labels", ALL_TICKETS, llm={})
    assert project.run("run", "--select", "tickets").ok
    counts = ("rows", "reused", "new", "duplicates", "failed", "requests", "to_send")
    assert numbers(plan_of(project), *counts) == (6, 0, 6, 1, 0, 5, 5)
    assert project.sent() == []
    target = project.target
    # Recorded, so that the run does not repeat it; and nothing is built.
    assert target.one("select count(*) from {ledger}.items") == 5
    assert target.one("select count(*) from {ledger}.requests") == 5
    assert target.one("select state from {ledger}.runs") == "planned"
    built = "select count(*) from information_schema.tables where table_schema = '{schema}' "
    assert target.one(built + "and table_name = 'labels'") == 0
    assert numbers(plan_of(project), *counts) == (6, 0, 6, 1, 0, 5, 5)
    assert project.run("run").ok
    assert len(project.sent()) == 5
    project.model("tickets", rows_sql([*tickets(5), {"id": 7, "body": "new"}]))
    assert project.run("run", "--select", "tickets").ok
    assert numbers(plan_of(project), *counts) == (6, 5, 1, 0, 0, 1, 1)
    assert len(project.sent()) == 5


def test_plan_sees_the_newest_files_and_leaves_dbts_artifacts_alone(duck: Project) -> None:
    duck.model("tickets", rows_sql(tickets(2)))
    duck.model("labels", ALL_TICKETS, llm={})
    assert duck.run("run").ok
    before = (duck.root / "target" / "run_results.json").read_bytes()
    assert plan_of(duck)["requests"] == 0
    duck.write("prompts/label.md", "Label this: {{ body }}\n")
    assert plan_of(duck)["requests"] == 2
    assert (duck.root / "target" / "run_results.json").read_bytes() == before


def test_plan_selects_only_llm_models(duck: Project) -> None:
    duck.model("tickets", rows_sql(tickets(2)))
    duck.model("labels", ALL_TICKETS, llm={})
    duck.model("others", ALL_TICKETS, llm={})
    assert duck.run("run", "--select", "tickets").ok

    def planned(*args: str) -> list[str]:
        models = document(call(duck, "plan", "--json", *args))["models"]
        return sorted(model["name"] for model in models)

    assert planned() == ["labels", "others"]
    assert planned("--select", "tickets+") == ["labels", "others"]
    assert planned("--select", "labels tickets") == ["labels"]
    assert planned("--select", "tickets") == []


def test_plan_shows_the_limit_and_the_interrupted_prefix(duck: Project) -> None:
    duck.model("tickets", rows_sql(tickets(5)))
    static = "The rules are the same for all. " * 40
    duck.write("prompts/label.md", f"{{{{ body }}}}\n{static}\n")
    duck.model("labels", ALL_TICKETS, llm={"limit": 2})
    assert duck.run("run", "--select", "tickets").ok
    result = call(duck, "plan")
    assert "limit 2 holds; 3 requests would stay pending" in result.stdout
    assert "the column body on line 1 of the prompt" in result.stdout
    assert "A run would send 2 requests. Nothing was sent." in result.stdout
    assert plan_of(duck)["to_send"] == 2
    without = plan_of(duck, "--vars", "{batchsql: {limit: 4}}")
    assert numbers(without, "limit", "to_send") == (4, 4)


def test_plan_counts_what_other_ledgers_would_lend(duck: Project) -> None:
    duck.model("tickets", rows_sql(tickets(3)))
    duck.model("labels", ALL_TICKETS, llm={"ledger_schema": "production"})
    assert duck.run("run").ok
    duck.model("tickets", rows_sql(tickets(5)))
    duck.model("labels", ALL_TICKETS, llm={"read_from": "production"})
    assert duck.run("run", "--select", "tickets").ok
    plan = plan_of(duck)
    assert numbers(plan, "requests", "borrowable", "to_send") == (5, 3, 2)
    duck.model("labels", ALL_TICKETS, llm={"read_from": "nowhere"})
    result = call(duck, "plan")
    assert result.exit_code == 1
    assert "no batchsql ledger in that schema" in result.stderr


def test_plan_of_an_incremental_model_counts_pending_rows_of_its_table(project: Project) -> None:
    project.model("tickets", rows_sql(tickets(4)))
    only_new = ALL_TICKETS + (
        "{% if batchsql.is_incremental() %} where id > (select max(id) from {{ this }}){% endif %}"
    )
    project.model("labels", only_new, llm={"incremental": True, "limit": 1})
    assert project.run("run").ok
    project.model("tickets", rows_sql(tickets(6)))
    assert project.run("run", "--select", "tickets").ok
    plan = plan_of(project, "--vars", "{batchsql: {limit: 100}}")
    assert numbers(plan, "rows", "requests") == (5, 5)


def test_plan_tells_mistakes_as_dbt_does(duck: Project) -> None:
    duck.model("labels", "select 1 as id, 'x' as body", llm={"model": "nobody/x", "limit": -1})
    result = call(duck, "plan")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: labels: 2 mistakes in the declaration\n")
    assert "nobody" in result.stderr
    assert "limit" in result.stderr


def test_plan_goes_on_after_a_model_that_fails(project: Project) -> None:
    project.model("tickets", rows_sql(tickets(2)))
    project.model("missing", "select 1 as id, 'x' as body")
    project.model("broken", "select * from {{ ref('missing') }}", llm={})
    project.model("labels", ALL_TICKETS, llm={})
    assert project.run("run", "--select", "tickets").ok
    result = call(project, "plan", "--json")
    assert result.exit_code == 1
    models = {model["name"]: model for model in json.loads(result.stdout)["models"]}
    assert models["labels"]["requests"] == 2
    assert "missing" in models["broken"]["error"]
    assert "dbt run --select +broken --exclude broken" in result.stderr


def test_exit_code_says_whether_something_is_open(duck: Project) -> None:
    duck.model("tickets", rows_sql(tickets(2)))
    duck.model("labels", ALL_TICKETS, llm={})
    assert duck.run("run", "--select", "tickets").ok
    assert call(duck, "plan").exit_code == 0
    assert call(duck, "plan", "--exit-code").exit_code == 3
    assert call(duck, "status", "--exit-code").exit_code == 3
    assert call(duck, "failed", "--exit-code").exit_code == 0
    assert duck.run("run").ok
    for command in ("plan", "status", "failed"):
        assert call(duck, command, "--exit-code").exit_code == 0, command
    dead_letters(duck)
    assert call(duck, "plan", "--exit-code").exit_code == 0  # the dead stay dead
    assert call(duck, "status", "--exit-code").exit_code == 3
    assert call(duck, "failed", "--exit-code").exit_code == 3
    assert call(duck, "plan", "--vars", "{batchsql: {limit: 0}}", "--exit-code").exit_code == 0


# --- status ---------------------------------------------------------------------------------------


def test_status_shows_rows_and_requests(project: Project) -> None:
    dead_letters(project)
    (labels,) = document(call(project, "status", "--json"))["enrichments"]
    assert labels["name"] == "labels"
    assert labels["model"] == "fake/labeller"
    assert labels["last_run"]["state"] == "finished"
    assert 0 <= labels["last_run"]["age_seconds"] < 300
    assert labels["last_run"]["started_at"].endswith("+00:00")
    assert labels["rows"] == {"total": 5, "ok": 1, "pending": 0, "failed": 4}
    assert labels["requests"] == {
        "total": 5, "answered": 1, "dead": 4, "in_progress": 0, "waiting": 0,
    }  # fmt: skip
    text = call(project, "status").stdout
    assert re.search(r"^labels +\d+ s ago +finished +1 +0 +4 +1 +4 +0 +0$", text, re.MULTILINE)


def test_status_keeps_the_rows_of_the_last_good_run_beside_the_error_of_a_failed_one(
    duck: Project,
) -> None:
    duck.model("tickets", rows_sql(tickets(2)))
    duck.model("labels", ALL_TICKETS, llm={})
    assert duck.run("run").ok
    duck.model("tickets", rows_sql([*tickets(1), {"id": 9, "body": "@systemic"}]))
    assert not duck.run("run").ok
    (labels,) = document(call(duck, "status", "--json"))["enrichments"]
    assert labels["last_run"]["state"] == "failed"
    assert labels["rows"]["ok"] == 2
    assert labels["requests"]["waiting"] == 1
    assert "the last run said: the fake backend refuses everything" in call(duck, "status").stdout
    duck.model("tickets", "select * from (values (null, 'x')) as t(id, body)")
    assert not duck.run("run").ok
    assert "labels: the last run said: the unique key id is NULL" in call(duck, "status").stdout


def test_status_shows_open_shards(project: Project) -> None:
    project.model("tickets", rows_sql(tickets(3)))
    project.model("labels", ALL_TICKETS, llm={})
    assert project.run("run").ok
    project.target.query("update {ledger}.shards set state = 'running'")
    (shard,) = document(call(project, "status", "--json"))["shards"]
    assert (shard["requests"], shard["ok"], shard["failed"]) == (3, 3, 0)
    assert 0 < shard["lease_seconds"] <= 60
    assert shard["age_seconds"] >= 0
    assert "left" in call(project, "status", "labels").stdout
    past = "update {ledger}.shards set lease_expires_at = lease_expires_at - interval '1 hour'"
    project.target.query(past)
    assert "ran out 5" in call(project, "status").stdout
    assert call(project, "status", "--exit-code").exit_code == 3


def test_names_choose_models_and_an_unknown_one_is_an_error(duck: Project) -> None:
    duck.model("tickets", rows_sql(tickets(1)))
    duck.model("labels", ALL_TICKETS, llm={})
    duck.model("others", ALL_TICKETS, llm={"ledger_schema": "elsewhere"})
    assert duck.run("run").ok

    def named(*names: str) -> list[tuple[str, str]]:
        found = document(call(duck, "status", "--json", *names))["enrichments"]
        return [(each["name"], each["ledger_schema"]) for each in found]

    both = [("labels", duck.target.ledger), ("others", "elsewhere")]
    assert named() == both
    assert named("others") == both[1:]
    assert named("model.shop.labels") == both[:1]
    result = call(duck, "status", "lables")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "named lables; it knows: labels, others" in result.stderr


def test_newer_ledger_is_refused(duck: Project) -> None:
    dead_letters(duck)
    duck.target.query("insert into {ledger}.meta values (99, '9.9', now())")
    result = call(duck, "status")
    assert result.exit_code == 1
    assert "written by a newer batchsql" in result.stderr


def test_another_process_with_the_file_is_named(duck: Project) -> None:
    duck.model("tickets", rows_sql(tickets(1)))
    path = str(duck.target.profile["path"])
    code = "import duckdb, sys; c = duckdb.connect(sys.argv[1]); print(flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        holder.stdout.readline()
        duck.model("labels", ALL_TICKETS, llm={})
        for command in ("status", "plan"):
            result = call(duck, command)
            assert (result.exit_code, result.stdout) == (1, ""), command
            assert f"{path} is open in the process {holder.pid} (" in result.stderr
            assert "Traceback" not in result.stderr
    finally:
        holder.communicate("\n")


# --- failed and replay ----------------------------------------------------------------------------


def test_failed_groups_dead_letters_by_cause(project: Project) -> None:
    dead_letters(project)
    found = document(call(project, "failed", "--json"))
    assert found["dead_letters"] == 4
    causes = {cause["outcome"]: cause for cause in found["causes"]}
    assert {name: cause["requests"] for name, cause in causes.items()} == {
        "truncated": 2, "filtered": 1, "invalid": 1,
    }  # fmt: skip
    assert found["causes"][0]["outcome"] == "truncated"
    example = causes["filtered"]["example"]
    assert (example["unique_key"], example["tries"]) == ("4", 1)
    assert re.fullmatch("[0-9a-f]{32}", example["request_key"])
    assert "output" not in example
    assert causes["filtered"]["names"] == ["labels"]
    # The example's key, output and row belong together.
    row = project.target.query(
        "select body from {schema}.labels "
        f"where llm_request_id = '{causes['truncated']['example']['request_key']}'"
    )
    assert row == [
        ("@truncate a" if causes["truncated"]["example"]["unique_key"] == "2" else "@truncate b",)
    ]
    few = document(call(project, "failed", "--json", "--limit", "1"))
    assert [cause["outcome"] for cause in few["causes"]] == ["truncated"]
    assert call(project, "failed").stdout.endswith("batchsql replay --model PROVIDER/NAME\n")
    assert "2 more dead letters of rarer causes" in call(project, "failed", "--limit", "1").stdout


def test_failed_shows_outputs_only_when_asked_and_disarmed(duck: Project) -> None:
    dead_letters(duck)
    control = "[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]"
    hidden = call(duck, "failed").stdout
    assert "its output" not in hidden
    assert not re.search(control, hidden)
    shown = call(duck, "failed", "--show-output").stdout
    assert "its output" in shown
    assert "[bold]no json" in shown
    assert not re.search(control, shown)
    raw = call(duck, "failed", "--show-output", "--json").stdout
    assert not re.search("[^\n\x20-\x7e]", raw)
    outputs = [cause["example"]["output"] for cause in json.loads(raw)["causes"]]
    assert any("[bold]" in output for output in outputs)


def test_failed_leaves_out_what_an_older_declaration_asked(duck: Project) -> None:
    dead_letters(duck)
    duck.write("prompts/label.md", "Only the length: {{ body | length }}\n")
    assert duck.run("run").ok
    assert "no dead letters" in call(duck, "failed").stdout


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("plain", "plain"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x07", "link"),
        ("\x1b]0;title", ""),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\x9b31mx\x07\x00\x7f", "31mx"),
        ("\u202eright\u2066", "right"),
        ("half \ud800 pair", "half  pair"),
        ("[red]markup[/red] ❤️ 👩‍👩‍👧", "[red]markup[/red] ❤️ 👩‍👩‍👧"),
    ],
)
def test_clean_text_cannot_move_a_terminal(text: str, kept: str) -> None:
    assert screen.clean(text) == kept


def test_replay_gives_dead_letters_a_new_budget(project: Project) -> None:
    dead_letters(project)
    first = document(call(project, "replay", "--yes", "--json", "--cause", "filtered"))
    assert first == {"replayed": 1, "by_cause": {"filtered": 1}}
    assert project.sent() == []
    assert plan_of(project)["requests"] == 1
    assert project.run("run").ok
    assert len(project.sent()) == 1  # dead again
    result = call(project, "replay", "labels", "--yes")
    assert "4 dead letters may be tried again; the next dbt run sends them" in result.stdout
    assert "no dead letters" in call(project, "replay", "--yes").stdout
    project.forget_sent()
    assert project.run("run").ok
    assert len(project.sent()) == 3 + 3 + 3 + 1


def test_replay_asks_on_a_terminal_and_refuses_without_one(
    duck: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead_letters(duck)

    def dead() -> int:
        return int(duck.target.one("select count(*) from {ledger}.dead_letters"))

    result = call(duck, "replay")
    assert (result.exit_code, dead()) == (2, 4)
    assert "give --yes" in result.stderr
    monkeypatch.setattr(replay, "_is_interactive", lambda: True)
    place = ["--project-dir", str(duck.root), "--profiles-dir", str(duck.root)]
    no = CliRunner().invoke(cli.main, ["replay", *place], input="n\n")
    assert (no.exit_code, dead()) == (1, 4)
    assert "sends and pays for them again" in no.stderr
    yes = CliRunner().invoke(cli.main, ["replay", *place], input="y\n")
    assert (yes.exit_code, dead()) == (0, 0)


def test_replay_of_nothing_does_not_ask(target: Target, project: Project) -> None:
    project.model("tickets", rows_sql(tickets(1)))
    project.model("labels", ALL_TICKETS, llm={})
    assert project.run("run").ok
    result = call(project, "replay", "--cause", "invalid")
    assert (result.exit_code, result.stdout) == (0, "no dead letters with the cause invalid\n")
    assert target.one("select count(*) from {ledger}.attempts") == 1
