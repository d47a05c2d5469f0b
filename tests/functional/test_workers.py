"""``runner: detached`` and ``batchsql work``: runs queue what is new, workers answer it."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from batchsql import cli, completion
from batchsql.cli import work
from tests.support.lean import wait_for
from tests.support.project import Project, Target
from tests.support.workers import DETACHED, place, rows, run, worker

ROWS = 10


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "FIRST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(work, "LONGEST_PAUSE_SECONDS", 0.05)


def statuses(target: Target, table: str = "labels") -> dict[str, int]:
    return dict(target.query(f"select llm_status, count(*) from {{schema}}.{table} group by 1"))


# --- the story ------------------------------------------------------------------------------------


def test_run_queues_a_worker_answers_and_the_next_run_builds(project: Project) -> None:
    target = project.target
    project.model("labels", rows(), llm=DETACHED)
    result = project.run("run")
    assert result.ok, result.output
    assert "10 requests wait for a worker: batchsql work --model fake/labeller" in result.output
    assert (statuses(target), project.sent()) == ({"pending": ROWS}, [])
    assert result.response("labels")["requests_sent"] == 0

    made = worker(project, "--json")
    assert made.exit_code == 0, made.stderr
    counts = json.loads(made.stdout)["counts"]
    assert (counts["tries"], counts["ok"]) == (ROWS, ROWS)
    assert statuses(target) == {"pending": ROWS}  # no worker touches a table
    assert target.one("select count(*) from {ledger}.claims") == 0

    again = project.run("run")
    assert statuses(target) == {"ok": ROWS}
    assert again.response("labels")["requests_sent"] == 0
    assert Counter(project.sent()).most_common(1)[0][1] == 1

    project.model("labels", rows(ROWS + 2), llm=DETACHED)
    run(project)
    assert statuses(target) == {"ok": ROWS, "pending": 2}
    assert worker(project).stdout == "2 tries: 2 answers, 0 failures\n"
    run(project)
    assert statuses(target) == {"ok": ROWS + 2}
    assert len(project.sent()) == ROWS + 2


def test_shards_say_who_worked_on_them_and_how_they_were_asked(project: Project) -> None:
    project.model("labels", rows(), llm=DETACHED)
    run(project)
    worker(project)
    ((route, reason, name, settings),) = project.target.query(
        "select distinct route, route_reason, worker, settings from {ledger}.shards"
    )
    assert (route, reason) == ("online", "runner is detached")
    assert re.fullmatch(r".+:\d+", name)
    assert json.loads(settings)["max_attempts"] == 3


def test_failures_are_tried_again_and_then_given_up_by_workers(project: Project) -> None:
    bodies = "select 1 as id, 'fine' as body union all select 2, '@invalid' union all "
    project.model("labels", bodies + "select 3, '@flaky'", llm=DETACHED)
    run(project)
    assert worker(project).stdout == "6 tries: 2 answers, 4 failures\n"
    run(project)
    assert statuses(project.target) == {"ok": 2, "failed": 1}
    assert worker(project).stdout == "0 tries: 0 answers, 0 failures\n"


# --- the queue ------------------------------------------------------------------------------------


def test_rows_that_are_gone_are_not_asked_any_more(project: Project) -> None:
    project.model("labels", rows(), llm=DETACHED)
    run(project)
    project.model("labels", rows(4), llm=DETACHED)
    run(project)
    worker(project)
    assert len(project.sent()) == 4


def test_another_prompt_replaces_the_queue(project: Project) -> None:
    project.model("labels", rows(3), llm=DETACHED)
    run(project)
    project.write("prompts/label.md", "user:\nWhat is {{ body }}?\n")
    run(project)
    worker(project)
    run(project)
    assert (len(project.sent()), statuses(project.target)) == (3, {"ok": 3})


def test_limit_bounds_the_queue(project: Project) -> None:
    project.model("labels", rows(), llm={**DETACHED, "limit": 4})
    run(project)
    worker(project)
    assert len(project.sent()) == 4
    run(project)
    worker(project)
    assert len(project.sent()) == 8


def test_urgent_rows_are_asked_first(project: Project) -> None:
    project.model("labels", rows(), llm={**DETACHED, "urgent_when": "id >= 8"})
    run(project)
    assert worker(project, "--max-shards", "1").exit_code == 0
    urgent = project.target.query(
        "select replace(i.request_key::varchar, '-', '') from {ledger}.items i "
        "where i.unique_key in ('8', '9')"
    )
    assert set(project.sent()[:2]) == {key for (key,) in urgent}


def test_run_without_detached_answers_what_was_queued(project: Project) -> None:
    project.model("labels", rows(3), llm=DETACHED)
    run(project)
    project.model("labels", rows(3), llm={})
    run(project)
    assert statuses(project.target) == {"ok": 3}
    worker(project)
    assert len(project.sent()) == 3


@pytest.mark.parametrize("target", ["postgres"], indirect=True)
def test_run_waits_for_workers_as_long_as_declared(project: Project) -> None:
    project.model("labels", rows(), llm={**DETACHED, "wait": "60s", "on_pending": "fail"})
    process = project.process("run")
    wait_for(lambda: "queued" in tables(project) and queued(project), 60)
    assert worker(project).exit_code == 0
    result = project.finish(process)
    assert result.ok, result.output
    assert statuses(project.target) == {"ok": ROWS}


def tables(project: Project) -> set[str]:
    found = project.target.query(
        "select table_name from information_schema.tables where table_schema = '{ledger}'"
    )
    return {name for (name,) in found}


def queued(project: Project) -> int:
    return int(project.target.one("select count(*) from {ledger}.queued"))


@pytest.mark.parametrize("target", ["duckdb"], indirect=True)
def test_run_does_not_wait_where_no_worker_could_open_the_file(project: Project) -> None:
    project.model("labels", rows(), llm={**DETACHED, "wait": "forever"})
    run(project)
    assert statuses(project.target) == {"pending": ROWS}


def test_run_with_nothing_new_empties_the_queue(project: Project) -> None:
    project.model("labels", rows(2), llm=DETACHED)
    run(project)
    worker(project)
    project.model("labels", rows(), llm=DETACHED)
    run(project)
    assert queued(project) == 8
    project.model("labels", rows(2), llm=DETACHED)
    run(project)
    assert queued(project) == 0
    worker(project)
    assert len(project.sent()) == 2


def test_run_that_asks_itself_empties_the_queue(project: Project) -> None:
    project.model("labels", rows(3), llm=DETACHED)
    run(project)
    project.write("prompts/label.md", "user:\nWhat is {{ body }}?\n")
    project.model("labels", rows(3), llm={})
    run(project)
    worker(project)
    assert len(project.sent()) == 3


# --- what a worker takes on -----------------------------------------------------------------------


def test_worker_takes_only_what_it_was_told(project: Project) -> None:
    for name, model in (("one", "fake/small"), ("two", "fake/large"), ("three", "fake/large")):
        project.model(name, rows(2, name), llm={**DETACHED, "model": model})
    run(project)
    assert worker(project, "--model", "fake/small").stdout.startswith("2 tries")
    assert worker(project, "--select", "three").stdout.startswith("2 tries")
    assert worker(project, "--select", "tag:none").stdout == (
        "no llm model is selected by tag:none\n"
    )
    assert worker(project).stdout.startswith("2 tries")
    asked = project.target.query(
        "select enrichment, count(*) from {ledger}.shards group by 1 order by min(created_at)"
    )
    assert [name.rpartition(".")[2] for name, _ in asked] == ["one", "three", "two"]


def test_worker_ends_after_its_number_of_shards(project: Project) -> None:
    project.model("labels", rows(), llm={**DETACHED, "engine": {"shard_requests": 3}})
    run(project)
    assert worker(project, "--max-shards", "2").stdout.startswith("6 tries")
    assert len(project.sent()) == 6
    assert project.target.one("select count(*) from {ledger}.claims") == 0
    assert worker(project).stdout.startswith("4 tries")


def test_other_weights_on_the_workers_machine_are_refused(project: Project) -> None:
    project.model("labels", rows(2), llm=DETACHED)
    run(project)
    result = worker(project, "--engine", "identity=2")
    assert result.exit_code == 1
    assert "is not the one that its rows were prepared for" in result.stderr
    assert project.sent() == []
    assert worker(project, "--engine", "identity='1'").exit_code == 0
    assert len(project.sent()) == 2


def test_engine_that_refuses_is_set_aside_and_others_are_worked_on(project: Project) -> None:
    project.model("bad", "select 1 as id, '@systemic' as body", llm=DETACHED)
    project.model("good", rows(2), llm=DETACHED)
    run(project)
    result = worker(project)
    assert result.exit_code == 1
    assert "bad: the fake backend refuses everything" in result.stderr
    assert result.stdout.startswith("2 tries: 2 answers")
    assert project.target.one("select count(*) from {ledger}.claims") == 0


@pytest.mark.parametrize(
    ("llm", "message"),
    [
        ({"model": "openai/gpt-5-mini"}, "no worker is needed for batches"),
        ({"model": "openai/gpt-5-mini", "route": "batch"}, "no worker is needed for batches"),
        ({"runner": "elsewhere"}, "one of inline, detached"),
        (
            {
                "model": "openai_compatible/m",
                "engine": {"base_url": "http://127.0.0.1:1/v1", "batches": True},
            },
            "no worker is needed for batches",
        ),
    ],
)
@pytest.mark.parametrize("target", ["duckdb"], indirect=True)
def test_wrong_runner_is_refused(project: Project, llm: dict[str, Any], message: str) -> None:
    project.model("labels", rows(1), llm={**DETACHED, **llm})
    file = project.root / "models" / "labels.sql"
    file.write_text(re.sub(r"'log': '[^']*',? ?", "", file.read_text()))
    result = project.run("run")
    assert not result.ok
    assert message in result.output


@pytest.mark.parametrize(
    "llm",
    [
        {"model": "openai/gpt-5-mini", "route": "online"},
        {"model": "openai_compatible/m", "engine": {"base_url": "http://127.0.0.1:1/v1"}},
        {"model": "vllm/some/model", "engine": {"revision": "0" * 40}},
    ],
)
@pytest.mark.parametrize("target", ["duckdb"], indirect=True)
def test_engines_and_online_endpoints_can_be_detached(
    project: Project, llm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    project.model("labels", rows(2), llm={**DETACHED, **llm})
    file = project.root / "models" / "labels.sql"
    file.write_text(re.sub(r"'log': '[^']*',? ?", "", file.read_text()))
    run(project)
    assert queued(project) == 2


@pytest.mark.parametrize("target", ["duckdb"], indirect=True)
def test_rows_that_may_not_leave_are_not_asked_outside_by_a_worker(project: Project) -> None:
    project.model("labels", rows(1), llm=DETACHED)
    run(project)
    # As if the queue had been made with egress: false and a model of a provider.
    project.target.query(
        "update {ledger}.queues set settings = replace(settings, '\"egress\": true', "
        "'\"egress\": false')"
    )
    result = worker(project)
    assert result.exit_code == 1
    assert "may not leave" in result.stderr
    assert project.sent() == []


# --- life of a worker -----------------------------------------------------------------------------


def test_without_a_ledger_there_is_nothing_to_do(project: Project) -> None:
    result = worker(project)
    assert (result.exit_code, result.stdout) == (0, "0 tries: 0 answers, 0 failures\n")
    if project.target.kind == "duckdb":
        assert not Path(project.target.profile["path"]).exists()


@pytest.mark.parametrize("target", ["duckdb"], indirect=True)
def test_worker_does_not_wait_for_a_ledger_where_it_would_keep_dbt_out(project: Project) -> None:
    project.target.query("create table t as select 1 as id")
    assert project.worker("work", *place(project)).wait(60) == 0


def test_worker_that_is_told_to_end_exits_well_though_it_set_something_aside(
    project: Project,
) -> None:
    project.model("bad", "select 1 as id, '@systemic' as body", llm=DETACHED)
    project.model("good", rows(2), llm=DETACHED)
    run(project)
    assert worker(project, "--max-shards", "2").exit_code == 0
    assert worker(project).exit_code == 1


def test_completion_is_told_by_the_worker(project: Project, tmp_path: Path) -> None:
    told = tmp_path / "told"
    command = f"echo $BATCHSQL_MODEL $BATCHSQL_ANSWERED >> {told}"
    project.model("labels", rows(3), llm={**DETACHED, "on_complete": {"command": command}})
    run(project)
    assert not told.exists()
    worker(project)
    assert told.read_text() == "labels 3\n"
    run(project)
    worker(project)
    assert told.read_text() == "labels 3\n"


def test_command_of_a_completion_that_runs_dbt_is_not_run_for_its_own_run(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = {**DETACHED, "on_complete": {"command": "dbt run"}}
    project.model("labels", rows(3), llm=llm)
    run(project)
    answered = []

    def command(_command: str, env: Mapping[str, str], _stop: threading.Event) -> int:
        answered.append(env["BATCHSQL_ANSWERED"])
        if len(answered) == 1:  # a run that finds everything, then one that finds new rows
            monkeypatch.setenv("BATCHSQL_ENRICHMENT", env["BATCHSQL_ENRICHMENT"])
            run(project)
            project.model("labels", rows(5), llm=llm)
            run(project)
            monkeypatch.delenv("BATCHSQL_ENRICHMENT")
        return 0

    monkeypatch.setattr(completion, "_run", command)
    for _ in range(2):
        assert worker(project).exit_code == 0
    # What the command's own run has queued is another completion.
    assert answered == ["3", "5"]
    run(project)
    assert answered == ["3", "5"]


def test_completion_that_nobody_could_be_told_of_is_told_later(
    project: Project, tmp_path: Path
) -> None:
    ready, told = tmp_path / "ready", tmp_path / "told"
    command = f"test -e {ready} && echo told >> {told}"
    project.model("labels", rows(3), llm={**DETACHED, "on_complete": {"command": command}})
    run(project)
    assert "the command of on_complete ended with 1" in worker(project).stderr
    ready.touch()
    run(project)
    run(project)
    assert told.read_text() == "told\n"


def test_status_shows_what_waits_for_workers(project: Project) -> None:
    project.model("labels", rows(5), llm=DETACHED)
    run(project)
    where = place(project)
    shown = CliRunner().invoke(cli.main, ["status", *where])
    assert re.search(r"^labels +fake/labeller +\d+ s ago +5 +0 +0$", shown.stdout, re.MULTILINE)
    document = json.loads(CliRunner().invoke(cli.main, ["status", "--json", *where]).stdout)
    (queue,) = document["queues"]
    assert (queue["enrichment"], queue["free"], queue["claimed"]) == ("model.shop.labels", 5, 0)
    worker(project)
    document = json.loads(CliRunner().invoke(cli.main, ["status", "--json", *where]).stdout)
    assert document["queues"] == []


def test_drain_is_bounded_by_the_grace() -> None:
    stop, drain = threading.Event(), threading.Event()
    import os
    import signal

    with work.ending(stop, drain, 0.05):
        os.kill(os.getpid(), signal.SIGTERM)
        assert drain.is_set()
        assert stop.wait(10)
    with work.ending(stop := threading.Event(), drain := threading.Event(), 600):
        os.kill(os.getpid(), signal.SIGTERM)
        assert not stop.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_set()
