"""The built wheel in an environment of its own, as users have it: no checkout in sight."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from batchsql.version import __version__
from tests.support.project import ROOT

PROFILE = (
    "demo:\n  target: dev\n  outputs:\n    dev: {type: duckdb, path: demo.duckdb, threads: 2}\n"
)


class Installed:
    """A virtual environment that holds the wheel and can import its dependencies."""

    def __init__(self, root: Path, home: Path) -> None:
        self.bin = root / "bin"
        self.python = self.bin / "python"
        # No variable of ours: above all no path to the checkout.
        self._env = {
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(home),
            "DBT_SEND_ANONYMOUS_USAGE_STATS": "false",
        }

    def run(self, *command: str, cwd: Path) -> str:
        done = subprocess.run(
            command, cwd=cwd, env=self._env, text=True, timeout=200,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    def dbt(self, *args: str, cwd: Path) -> str:
        return self.run(str(self.python), "-m", "dbt.cli.main", *args, cwd=cwd)

    def batchsql(self, *args: str, cwd: Path) -> str:
        return self.run(str(self.bin / "batchsql"), *args, cwd=cwd)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # Without isolation nothing is downloaded, where the build backend is installed.
    has_backend = importlib.util.find_spec("hatchling") is not None
    isolation = ["--no-build-isolation"] if has_backend else []
    subprocess.run(
        [*pip, "wheel", "--no-deps", *isolation, "--wheel-dir", str(folder), str(ROOT)], check=True
    )
    (wheel,) = folder.glob("batchsql-*.whl")
    root = folder / "venv"
    venv.create(root, with_pip=False, symlinks=True)
    # The dependencies of the tests' own environment. A folder named in a .pth file is searched, but
    # its own .pth files are not read, so that an editable install of the checkout stays unseen.
    (site,) = root.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run(
        [*pip, "--python", str(root / "bin" / "python"), "install", "--no-deps", "--no-index",
         "--force-reinstall", str(wheel)],
        check=True,
    )  # fmt: skip
    return Installed(root, folder)


def test_wheel_is_what_is_imported(installed: Installed, tmp_path: Path) -> None:
    code = (
        "import batchsql, dbt_batchsql, sys, json;"
        "print(json.dumps([batchsql.__file__, dbt_batchsql.__file__, sys.path]))"
    )
    *files, path = json.loads(installed.run(str(installed.python), "-c", code, cwd=tmp_path))
    venv_root = installed.bin.parent
    assert all(Path(file).is_relative_to(venv_root) for file in files)
    assert str(ROOT) not in path
    assert __version__ in installed.batchsql("--version", cwd=tmp_path)


def test_dbt_finds_the_plugin_of_the_wheel(installed: Installed, tmp_path: Path) -> None:
    code = (
        "from dbt.plugins.manager import PluginManager;"
        "hooks = PluginManager.from_modules('demo').hooks['get_manifest_artifacts'];"
        "print(*[type(hook.__self__).__module__ for hook in hooks])"
    )
    assert "batchsql.dbt" in installed.run(str(installed.python), "-c", code, cwd=tmp_path).split()


def test_project_of_dbt_init_is_answered_by_the_embedded_model(
    installed: Installed, tmp_path: Path
) -> None:
    installed.dbt("init", "demo", "--skip-profile-setup", cwd=tmp_path)
    project = tmp_path / "demo"
    (project / "profiles.yml").write_text(PROFILE)
    output = installed.batchsql("init", cwd=project)
    package = next(installed.bin.parent.glob("lib/python*/site-packages/batchsql/dbt_package"))
    assert f"local: {package.resolve()}" in (project / "packages.yml").read_text()
    # The commands that init names are the ones that are run.
    deps, run = re.findall(r"^  dbt (.+)$", output, re.MULTILINE)
    installed.dbt(*deps.split(), cwd=project)
    installed.dbt(*run.split(), cwd=project)
    assert responses(project) == (3, 3)
    installed.dbt(*run.split(), cwd=project)
    assert responses(project) == (3, 0)
    (model,) = json.loads(installed.batchsql("status", "--json", cwd=project))["enrichments"]
    assert model["name"] == "ticket_labels"
    assert model["rows"] == {"total": 3, "ok": 3, "pending": 0, "failed": 0}


def responses(project: Path) -> tuple[int, int]:
    """Return the rows answered and the requests sent by the last run's only model."""
    results = json.loads((project / "target" / "run_results.json").read_text())["results"]
    (response,) = [result["adapter_response"] for result in results]
    return response["ok"], response["requests_sent"]
