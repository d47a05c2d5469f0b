"""Models of other packages, and settings that the project has for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.support.project import Project
from tests.support.tables import rows_sql, tickets


def settings(project: Project, **more: object) -> None:
    """Lay keys over ``dbt_project.yml``, whose default materialization is kept to the root."""
    read = yaml.safe_load((project.root / "dbt_project.yml").read_text(encoding="utf-8"))
    models = {"shop": {"+materialized": "table"}}
    project.write_yaml("dbt_project.yml", {**read, "models": models, **more})


@pytest.mark.parametrize("folder", ["dbt_packages", "lib/packages"])
@pytest.mark.parametrize("target", ["duckdb"], indirect=True)
def test_prompt_of_a_package_is_found_in_the_package(
    project: Project, tmp_path: Path, folder: str
) -> None:
    package = tmp_path / "labelling"
    project.model("theirs", rows_sql(tickets(2)), llm={"prompt": "prompts/theirs.md"})
    for path, text in (
        ("dbt_project.yml", "name: labelling\nversion: '1.0'\nconfig-version: 2\n"),
        ("prompts/theirs.md", "Their words: {{ body }}"),
    ):
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(text, encoding="utf-8")
    (package / "models").mkdir()
    (project.root / "models" / "theirs.sql").rename(package / "models" / "theirs.sql")
    (project.root / "dbt_packages" / "labelling").symlink_to(package)
    (project.root / folder).parent.mkdir(exist_ok=True)
    (project.root / "dbt_packages").rename(project.root / folder)
    settings(project, **{"packages-install-path": folder})
    result = project.run("run")
    assert result.ok, result.output
    assert len(project.sent()) == 2
    assert "Their words" in project.target.one("select min(messages) from {ledger}.requests")


@pytest.mark.parametrize("target", ["duckdb"], indirect=True)
def test_mistake_in_the_projects_vars_is_told_before_anything_runs(project: Project) -> None:
    project.model("labels", rows_sql(tickets(2)), llm={})
    settings(project, vars={"batchsql": {"limt": 1}})
    for command in ("compile", "run"):
        result = project.run(command)
        assert not result.ok
        assert "limt: unknown key with value 1; did you mean limit?" in result.output
        assert not result.nodes
    settings(project, vars={"batchsql": {"limit": 1}})
    assert project.run("run").ok
    assert len(project.sent()) == 1
