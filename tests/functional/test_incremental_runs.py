"""What is sent when rows, prompts, models and columns change."""

from __future__ import annotations

from typing import Any

from tests.support.project import Project
from tests.support.tables import rows_sql, tickets

ALL_TICKETS = "select * from {{ ref('tickets') }}"


def run(project: Project, *args: str) -> int:
    """Run dbt, which has to succeed; return how many requests it sent."""
    project.forget_sent()
    result = project.run("run", *args)
    assert result.ok, result.output
    return len(project.sent())


def statuses(project: Project, table: str = "labels") -> dict[str, int]:
    """Return the number of rows by status, after a look at their answers."""
    target = project.target
    wrong = target.one(
        f"select count(*) from {{schema}}.{table} "
        "where (llm_status = 'ok') <> (category is not null and urgency is not null)"
    )
    assert wrong == 0
    return dict(target.query(f"select llm_status, count(*) from {{schema}}.{table} group by 1"))


def test_only_new_rows_are_sent(project: Project) -> None:
    project.model("tickets", rows_sql(tickets(300, state="new")))
    project.model("labels", ALL_TICKETS, llm={})
    assert run(project) == 300
    assert run(project) == 0
    # A column that the prompt does not use changes in every row, and one row in a hundred is new.
    project.model("tickets", rows_sql(tickets(303, state="closed")))
    project.forget_sent()
    result = project.run("run")
    assert result.ok, result.output
    assert len(project.sent()) == 3
    response = result.response("labels")
    assert (response["rows"], response["reused"], response["new"]) == (303, 300, 3)
    assert statuses(project) == {"ok": 303}
    assert project.target.query("select distinct state from {schema}.labels") == [("closed",)]


def test_edited_branch_of_a_template_sends_the_rows_it_touches(project: Project) -> None:
    template = (
        "{{% if kind == 'bug' %}}{bug}: {{{{ body }}}}"
        "{{% else %}}Label: {{{{ body }}}}{{% endif %}}"
    )
    rows = [{**row, "kind": "bug" if row["id"] <= 4 else "other"} for row in tickets(10)]
    project.model("tickets", rows_sql(rows))
    project.model("labels", ALL_TICKETS, llm={})
    project.write("prompts/label.md", template.format(bug="A bug"))
    assert run(project) == 10
    before = answers(project)
    project.write("prompts/label.md", template.format(bug="A defect"))
    assert run(project) == 4
    after = answers(project)
    assert [key for key in before if before[key] != after[key]] == [1, 2, 3, 4]
    project.write("prompts/label.md", template.format(bug="A bug"))
    assert run(project) == 0
    assert answers(project) == before


def answers(project: Project) -> dict[int, Any]:
    """Return each row's request by id."""
    return dict(project.target.query("select id, llm_request_id from {schema}.labels order by id"))


def test_changed_model_parameter_or_schema_sends_all_and_going_back_none(project: Project) -> None:
    project.model("tickets", rows_sql(tickets(5)))
    project.model("labels", ALL_TICKETS, llm={})
    assert run(project) == 5
    first = answers(project)
    project.model("labels", ALL_TICKETS, llm={"model": "fake/another"})
    project.model("warmer", ALL_TICKETS, llm={"params": {"temperature": 0.5}})
    project.model("other_weights", ALL_TICKETS, llm={"engine": {"identity": "2"}})
    project.model(
        "shorter", ALL_TICKETS,
        llm={"returns": {"category": {"enum": ["bug", "other"]}, "urgency": {"type": "integer"}}},
    )  # fmt: skip
    project.forget_sent()
    result = project.run("run")
    assert result.ok, result.output
    for model in ("labels", "warmer", "other_weights", "shorter"):
        assert result.response(model)["requests_sent"] == 5, model
    assert len(set(project.sent())) == 20
    assert not set(first.values()) & set(answers(project).values())
    # The same question from another model of the project is the same request.
    for model in ("labels", "warmer", "other_weights", "shorter"):
        project.model(model, ALL_TICKETS, llm={})
    assert run(project) == 0
    assert answers(project) == first


def test_rows_that_ask_the_same_are_sent_once(project: Project) -> None:
    bodies = ["same", "same", "same  \t", "  same\r\n", "other", "othEr"]
    rows = [{"id": n, "body": body} for n, body in enumerate(bodies)]
    project.model("tickets", rows_sql(rows))
    project.model("labels", ALL_TICKETS, llm={})
    # Two models that ask the same at the same time, each in a thread of its own.
    project.model("more_labels", ALL_TICKETS, llm={}, unique_key=None)
    result = project.run("run")
    assert result.ok, result.output
    assert len(project.sent()) == 3
    assert len(set(project.sent())) == 3
    assert result.response("labels")["duplicates"] == 3
    assert statuses(project) == statuses(project, "more_labels") == {"ok": 6}
    by_answer = project.target.query(
        "select llm_request_id, count(*), count(distinct category) from {schema}.labels "
        "group by 1 order by 2 desc"
    )
    assert [row[1:] for row in by_answer] == [(4, 1), (1, 1), (1, 1)]


def test_limit_leaves_rows_pending_and_full_refresh_pays_nothing(project: Project) -> None:
    project.model("tickets", rows_sql(tickets(12)))
    project.model("labels", ALL_TICKETS, llm={})
    assert run(project, "--vars", "{batchsql: {limit: 5}}") == 5
    assert statuses(project) == {"ok": 5, "pending": 7}
    assert run(project, "--full-refresh", "--vars", "{batchsql: {limit: 0}}") == 0
    assert statuses(project) == {"ok": 5, "pending": 7}
    assert run(project) == 7
    assert run(project, "--full-refresh") == 0
    assert statuses(project) == {"ok": 12}


def test_read_from_borrows_what_production_knows(project: Project) -> None:
    target = project.target
    profile = {**target.profile, "schema": f"{target.schema}_ci"}
    project.write_yaml(
        "profiles.yml",
        {"shop": {"target": "dev", "outputs": {"dev": dict(target.profile), "ci": profile}}},
    )
    project.model("tickets", rows_sql(tickets(8)))
    project.model("labels", ALL_TICKETS, llm={})
    assert run(project) == 8
    project.model("tickets", rows_sql(tickets(10)))
    project.forget_sent()
    variables = f"{{batchsql: {{read_from: [{target.ledger}]}}}}"
    result = project.run("run", "--target", "ci", "--vars", variables)
    assert result.ok, result.output
    assert len(project.sent()) == 2
    assert result.response("labels")["requests_borrowed"] == 8
    assert target.query("select llm_status, count(*) from {schema}_ci.labels group by 1") == [
        ("ok", 10)
    ]
    assert (
        target.one(
            "select count(*) from {schema}_ci.labels c join {schema}.labels p on p.id = c.id "
            "and p.llm_request_id = c.llm_request_id and p.category = c.category "
            "and p.urgency = c.urgency"
        )
        == 8
    )
    # What was borrowed is owned now, and production's ledger was only read.
    assert run(project, "--target", "ci") == 0
    assert target.one("select count(*) from {ledger}.results") == 8
    missing = project.run("run", "--target", "ci", "--full-refresh", "--vars",
                          "{batchsql: {read_from: [nowhere], model: fake/another}}")  # fmt: skip
    assert not missing.ok
    assert "read_from names nowhere" in missing.output
    assert project.sent() == []
