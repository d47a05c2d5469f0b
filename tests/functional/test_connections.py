"""What dbt's connections do while a model answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg2
import pytest
from psycopg2 import sql

from tests.support.lean import wait_for
from tests.support.project import Project


@pytest.mark.parametrize("target", ["postgres"], indirect=True)
def test_no_transaction_and_no_dbt_connection_waits_for_a_model(
    project: Project, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    project.model(
        "labels",
        "select 1 as id, 'one' as body union all select 2, 'two'",
        llm={"engine": {"gate": str(gate), "gate_after": 1}},
    )
    name = f"waits_{project.target.schema}"
    profile = {**project.target.profile, "application_name": name}
    project.write_yaml("profiles.yml", {"shop": {"target": "dev", "outputs": {"dev": profile}}})
    process = project.process("run")
    wait_for((tmp_path / "gate.reached").exists, 60)
    states = project.target.query(
        f"select state, query from pg_stat_activity where application_name = '{name}'"
    )
    gate.touch()
    done = project.finish(process)
    assert done.ok, done.output
    # What is left while the model answers is the ledger's own connection, between transactions,
    # and dbt's main one, which it keeps for itself.
    assert states
    assert [query for state, query in states if state != "idle"] == []


PASSWORD = 'it\'s a "p\\w" = 1'


@pytest.fixture
def login(project: Project) -> Iterator[str]:
    """A user with a password of every kind of quote, who may act as a role."""
    name = f"user_{project.target.schema}"
    profile = project.target.profile
    host, database = profile["host"], profile["dbname"]
    connection = psycopg2.connect(host=host, user="postgres", dbname=database)
    connection.autocommit = True
    with connection.cursor() as cursor:
        user = sql.Identifier(name)
        cursor.execute(sql.SQL("create role {}").format(sql.Identifier(f"{name}_role")))
        cursor.execute(
            sql.SQL("grant create on database {} to {}").format(
                sql.Identifier(database), sql.Identifier(f"{name}_role")
            )
        )
        cursor.execute(
            sql.SQL("create role {} login noinherit password {} in role {}").format(
                user, sql.Literal(PASSWORD), sql.Identifier(f"{name}_role")
            )
        )
        yield name
        cursor.execute(sql.SQL("drop owned by {} cascade").format(sql.Identifier(f"{name}_role")))
        cursor.execute(sql.SQL("drop role {}, {}").format(user, sql.Identifier(f"{name}_role")))
    connection.close()


@pytest.mark.parametrize("target", ["postgres"], indirect=True)
def test_ledgers_connection_has_all_that_the_profile_says(project: Project, login: str) -> None:
    profile = {
        **project.target.profile, "user": login, "password": PASSWORD,
        "role": f"{login}_role".upper(),  # as dbt writes it into its SQL: without quotes
        "search_path": "public, pg_catalog", "sslmode": "prefer", "application_name": "a b'c\\",
    }  # fmt: skip
    project.write_yaml("profiles.yml", {"shop": {"target": "dev", "outputs": {"dev": profile}}})
    project.model("labels", "select 1 as id, 'one' as body", llm={})
    result = project.run("run")
    assert result.ok, result.output
    assert project.target.query(
        "select distinct tableowner from pg_tables where schemaname in ('{schema}', '{ledger}')"
    ) == [(f"{login}_role",)]
    # A role that is refused is an error of ours, in words, without the password.
    project.write_yaml(
        "profiles.yml",
        {"shop": {"target": "dev", "outputs": {"dev": {**profile, "role": f'"{login}_x"'}}}},
    )
    refused = project.run("run")
    assert not refused.ok
    assert "Traceback" not in refused.output
    assert PASSWORD not in refused.output
