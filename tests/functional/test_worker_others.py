"""What `batchsql work` says where --model and --select leave nothing, but others' requests wait."""

from __future__ import annotations

import pytest

from tests.support.project import Project
from tests.support.workers import DETACHED, rows, run, worker

ANY = "select id, body from ({rows}) as t"


@pytest.fixture
def queued(project: Project) -> Project:
    """A project with 3 requests queued for one model, and a model with nothing queued."""
    project.model("labels", ANY.format(rows=rows(3)), llm=DETACHED)
    project.model("idle", ANY.format(rows=rows(1, "other")), llm=DETACHED)
    run(project)
    assert worker(project, "--select", "idle").exit_code == 0
    project.forget_sent()
    return project


@pytest.mark.parametrize("options", [["--model", "openai/gpt-9"], ["--select", "idle"]])
def test_requests_that_wait_for_others_are_told_once(queued: Project, options: list[str]) -> None:
    result = worker(queued, *options)
    told = "queued: 3 requests of labels for fake/labeller\n"
    assert (result.exit_code, result.stderr.count(told)) == (0, 1), result.stderr
    assert result.stdout == "0 tries: 0 answers, 0 failures\n"
    assert queued.sent() == []


def test_worker_of_a_model_with_nothing_queued_anywhere_ends_well(queued: Project) -> None:
    assert worker(queued, "--model", "fake/labeller").exit_code == 0
    result = worker(queued, "--model", "openai/gpt-9")
    assert (result.exit_code, "queued" in result.stderr) == (0, False)


def test_worker_that_has_answered_does_not_mind_what_waits_for_others(queued: Project) -> None:
    queued.model("idle", ANY.format(rows=rows(2, "other")), llm=DETACHED)
    run(queued)
    result = worker(queued, "--select", "idle")
    assert (result.exit_code, "queued" in result.stderr) == (0, False)
    assert result.stdout.startswith("1 try: 1 answer")
