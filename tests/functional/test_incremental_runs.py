"""What is sent when rows, prompts, models and columns change."""

from __future__ import annotations

from tests.support.project import Project

SOURCE = "select {id} as id, 'ticket {body}' as body, 'new' as state"


def write_rows(project: Project, rows: list[tuple[int, str]], state: str = "new") -> None:
    selects = [f"select {key} as id, '{body}' as body, '{state}' as state" for key, body in rows]
    project.model("tickets", " union all ".join(selects))


def rows(count: int, start: int = 1) -> list[tuple[int, str]]:
    return [(n, f"ticket {n}") for n in range(start, start + count)]


def test_second_run_sends_nothing(project: Project) -> None:
    write_rows(project, rows(30))
    project.model("labels", "select * from {{ ref('tickets') }}", llm={})
    first = project.run("run")
    assert first.ok, first.output
    assert len(project.sent()) == 30
    project.forget_sent()
    second = project.run("run")
    assert second.ok, second.output
    assert project.sent() == []
    assert second.response("labels")["reused"] == 30
    assert project.target.query(
        "select llm_status, count(*), count(category), count(urgency) from {schema}.labels group by 1"
    ) == [("ok", 30, 30, 30)]
