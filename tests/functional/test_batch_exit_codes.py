"""What scheduled commands end with when a provider's batch went wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from batchsql import cli
from batchsql.emulate import Emulator, Rule
from tests.support.project import DbtResult, Project, duckdb_target
from tests.support.rehearsal import (
    INSTANT,
    KEY,
    KEY_ENV,
    OPENAI,
    declare,
    rehearsal,
    rule,
    shards,
    statuses,
)
from tests.support.tables import rows_sql, tickets

pytest.importorskip("openai")

Begin = Callable[[Rule], tuple[Project, Emulator]]
ROWS = 6


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Submit a model's rows by ``dbt run`` as one batch to a provider that misbehaves, and let the
    batch end.
    """
    monkeypatch.setenv(KEY_ENV, KEY)
    with ExitStack() as stack:

        def start(behaviour: Rule) -> tuple[Project, Emulator]:
            emulator = stack.enter_context(rehearsal(OPENAI, behaviour))
            project = Project(tmp_path / "project", duckdb_target(tmp_path / "warehouse.duckdb"))
            project.model("tickets", rows_sql(tickets(ROWS)))
            declare(project, OPENAI, emulator)
            assert run(project).returncode == 0
            emulator.finish()
            return project, emulator

        yield start


def run(project: Project) -> DbtResult:
    return project.run("run")


def collect(project: Project, *args: str) -> Result:
    place = ["--project-dir", str(project.root), "--profiles-dir", str(project.root)]
    return CliRunner().invoke(cli.main, ["collect", "--exit-code", *args, *place])


def test_collect_fails_when_a_batch_was_refused_for_its_input(begin: Begin) -> None:
    project, _ = begin(rule("fail_validation"))
    result = collect(project)
    assert result.exit_code == 1
    assert "was refused" in result.stderr
    assert "invalid_json_line" in result.stderr
    assert KEY not in result.output
    assert shards(project.target, "state, fault") == [("failed", "systemic")]
    assert collect(project).exit_code == 0  # it is over, and was told
    assert statuses(project.target) == {"pending": ROWS}


def test_run_fails_when_a_batch_was_refused_for_its_input(begin: Begin) -> None:
    project, emulator = begin(rule("fail_validation"))
    result = run(project)
    assert result.returncode == 1
    assert "invalid_json_line" in result.output
    assert KEY not in result.output
    assert shards(project.target, "state, fault") == [("failed", "systemic")]
    assert statuses(project.target) == {"pending": ROWS}  # the table of the run before
    emulator.behave()
    assert run(project).returncode == 0
    emulator.finish()
    assert run(project).returncode == 0
    assert statuses(project.target) == {"ok": ROWS}


def test_run_that_waits_fails_when_its_batch_was_refused_for_its_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_ENV, KEY)
    with rehearsal(OPENAI, rule("fail_validation"), durations=INSTANT) as emulator:
        project = Project(tmp_path / "project", duckdb_target(tmp_path / "warehouse.duckdb"))
        project.model("tickets", rows_sql(tickets(ROWS)))
        declare(project, OPENAI, emulator, wait="1s")
        result = run(project)
    assert result.returncode == 1
    assert "invalid_json_line" in result.output
    assert shards(project.target, "state, fault") == [("failed", "systemic")]


@pytest.mark.parametrize(
    ("behaviour", "kept", "told"),
    [
        (rule("expire", fraction=0.5, count=1), 3, "is expired: 3 answers, 3 failures"),
        (rule("missing", text="ticket 3", count=1), 5, "5 answers, 1 requests without a result"),
    ],
    ids=["expired", "missing"],
)  # fmt: skip
def test_collect_and_run_end_well_when_answers_are_missing_that_can_be_asked_again(
    begin: Begin, behaviour: Rule, kept: int, told: str
) -> None:
    project, emulator = begin(behaviour)
    result = collect(project)
    assert result.exit_code == 0, result.output
    failures = f"{ROWS - kept} failure{'s' if ROWS - kept > 1 else ''}"
    assert f"collected 1 of 1 batches: {kept} answers, {failures}, " in result.stdout
    assert told in result.stderr
    result_of_run = run(project)
    assert result_of_run.returncode == 0
    response = result_of_run.response("labels")
    assert (response["ok"], response["pending"]) == (kept, ROWS - kept)
    assert collect(project).exit_code == 3  # a batch of the rest is open
    emulator.finish()
    assert run(project).returncode == 0  # without collect before it
    assert statuses(project.target) == {"ok": ROWS}
