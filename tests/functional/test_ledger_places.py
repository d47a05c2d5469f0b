"""Where a ledger can be, and how its schema can be named."""

from __future__ import annotations

import pytest

from tests.support.project import Project
from tests.support.tables import rows_sql, tickets


def test_ledger_of_a_schema_with_a_long_name_is_found_again(project: Project) -> None:
    target = project.target
    long = f"{target.schema}_".ljust(60, "x")
    profile = {**target.profile, "schema": long}
    project.write_yaml("profiles.yml", {"shop": {"target": "dev", "outputs": {"dev": profile}}})
    project.model("labels", rows_sql(tickets(2)), llm={})
    for _ in range(2):
        result = project.run("run")
        assert result.ok, result.output
    assert len(project.sent()) == 2
    for (name,) in target.query(
        f"select schema_name from information_schema.schemata where schema_name like '{long[:40]}%'"
    ):
        target.query(f'drop schema "{name}" cascade')


@pytest.mark.parametrize("name", ["LEDGER of {schema}", "{schema} a{{b}} 100 %?"])
def test_ledgers_schema_may_have_an_odd_name(project: Project, name: str) -> None:
    name = name.format(schema=project.target.schema)
    project.model("labels", rows_sql(tickets(2)), llm={"ledger_schema": name})
    for _ in range(2):
        result = project.run("run")
        assert result.ok, result.output
    assert len(project.sent()) == 2
    project.target.query(f'drop schema "{name}" cascade')


@pytest.mark.parametrize("target", ["duckdb"], indirect=True)
def test_case_of_a_schemas_name_means_nothing_to_duckdb(project: Project) -> None:
    project.model("labels", rows_sql(tickets(2)), llm={"ledger_schema": "ledger"})
    project.model("others", rows_sql(tickets(3)), llm={"ledger_schema": "LEDGER"})
    for _ in range(2):
        result = project.run("run")
        assert result.ok, result.output
    assert len(project.sent()) == 3


def test_answers_are_borrowed_from_a_ledger_that_shares_its_schema(project: Project) -> None:
    target = project.target
    project.model("meta", "select 1 as own")
    project.model("labels", rows_sql(tickets(2)), llm={"ledger_schema": target.schema})
    first = project.run("run")
    assert first.ok, first.output
    project.model("labels", rows_sql(tickets(2)), llm={"read_from": target.schema})
    second = project.run("run")
    assert second.ok, second.output
    assert second.response("labels")["requests_borrowed"] == 2
    assert len(project.sent()) == 2
