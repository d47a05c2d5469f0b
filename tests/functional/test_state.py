"""How dbt finds the plugin, what it costs a project without an llm model, and state:modified."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.project import ROOT, Project
from tests.support.tables import rows_sql, tickets

ALL_TICKETS = "select * from {{ ref('tickets') }}"
# Nothing here depends on the warehouse.
ON_DUCKDB = pytest.mark.parametrize("target", ["duckdb"], indirect=True)


def modified(project: Project) -> list[str]:
    """Return the models that differ from the saved state."""
    result = project.run(
        "ls", "--resource-type", "model", "--output", "name", "--quiet",
        "--select", "state:modified", "--state", str(project.root / "state"),
    )  # fmt: skip
    assert result.ok, result.output
    names = {"labels", "text_labels", "other_labels", "tickets"}
    return sorted(names & set(result.output.split()))


@ON_DUCKDB
def test_changed_prompt_makes_its_model_modified(project: Project) -> None:
    project.model("tickets", rows_sql(tickets(3)))
    project.write("prompts/other.md", "Other labels for:\n{{ body }}\n")
    project.model("labels", ALL_TICKETS, llm={})
    project.model("other_labels", ALL_TICKETS, llm={"prompt": "prompts/other.md"})
    text = "{% set prompt %}{% raw %}Label\n{{ body }}{% endraw %}{% endset %}\n"
    project.model("text_labels", ALL_TICKETS, llm={"prompt": "PROMPT"})
    file = project.root / "models/text_labels.sql"
    file.write_text(text + file.read_text().replace("'PROMPT'", "prompt"))
    first = project.run("run")
    assert first.ok, first.output
    shutil.copytree(project.root / "target", project.root / "state")
    assert modified(project) == []
    project.write("prompts/label.md", "You label tickets, in English.\n{{ body }}\n")
    assert modified(project) == ["labels"]
    project.forget_sent()
    result = project.run(
        "run", "--select", "state:modified", "--state", str(project.root / "state")
    )
    assert result.ok, result.output
    assert [name.split(".")[-1] for name in result.nodes] == ["labels"]
    assert len(project.sent()) == 3
    # Line ends are not a change, since the prompt is read as text.
    project.write("prompts/label.md", "system:\r\nYou label tickets.\r\nuser:\r\n{{ body }}\r\n")
    assert modified(project) == []
    file.write_text(file.read_text().replace("Label\n", "Label this\n"))
    assert modified(project) == ["text_labels"]


def run_python(code: str, cwd: Path) -> object:
    """Run code in a process of its own, away from the checkout; return the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=dict(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@ON_DUCKDB
def test_project_without_an_llm_model_pays_nothing(project: Project, tmp_path: Path) -> None:
    project.model("tickets", rows_sql(tickets(3)))
    project.model("copied", ALL_TICKETS)
    flags = ["--project-dir", str(project.root), "--profiles-dir", str(project.root), "--quiet"]
    code = (
        "import json, sys\n"
        "from dbt.cli.main import dbtRunner\n"
        f"result = dbtRunner().invoke(['build', *{flags!r}])\n"
        "ours = ('batchsql', 'dbt_batchsql')\n"
        "loaded = sorted(m for m in sys.modules if m.split('.')[0] in ours)\n"
        "heavy = sorted({'jsonschema_rs', 'xllamacpp', 'sqlglot'} & set(sys.modules))\n"
        "print(json.dumps([result.success, loaded, heavy]))"
    )
    is_ok, loaded, heavy = run_python(code, tmp_path)  # type: ignore[misc]
    assert is_ok
    assert loaded == [
        "batchsql",
        "batchsql.dbt",
        "batchsql.errors",
        "batchsql.version",
        "dbt_batchsql",
    ]
    assert heavy == []
    assert project.target.one("select count(*) from {schema}.copied") == 3


def test_dbt_finds_the_installed_plugin(tmp_path: Path) -> None:
    code = (
        "import json\n"
        "from dbt.plugins.manager import PluginManager\n"
        "found = PluginManager.from_modules('any_project')\n"
        "names = [type(plugin).__name__ for plugin in found._plugins]\n"
        "import batchsql\n"
        "print(json.dumps([names, batchsql.__file__]))"
    )
    names, file = run_python(code, tmp_path)  # type: ignore[misc]
    assert "BatchsqlPlugin" in names
    assert Path(file).is_file()


def test_macros_and_package_say_the_same_version() -> None:
    from batchsql.version import __version__

    macro = (ROOT / "macros/sql/package_version.sql").read_text()
    assert f"return('{__version__}')" in macro
