"""A dbt project in a temporary folder, run with real dbt in this process or in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.parse
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Target:
    """Where a test's tables go. ``schema`` is the test's own; its ledger is beside it."""

    kind: str
    schema: str
    profile: Mapping[str, Any]

    @property
    def ledger(self) -> str:
        return f"{self.schema}_batchsql"

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Run SQL on a connection of its own; ``{schema}`` and ``{ledger}`` are filled in."""
        sql = sql.replace("{schema}", self.schema).replace("{ledger}", self.ledger)
        if self.kind == "duckdb":
            import duckdb

            with duckdb.connect(self.profile["path"]) as connection:
                cursor = connection.execute(sql)
                return cursor.fetchall() if cursor.description else []
        import psycopg2

        connection = psycopg2.connect(
            host=self.profile["host"], user="postgres", dbname=self.profile["dbname"]
        )
        try:
            with connection, connection.cursor() as cursor:
                cursor.execute(sql)
                return cursor.fetchall() if cursor.description else []
        finally:
            connection.close()

    def one(self, sql: str) -> Any:
        """Return the only value of a query."""
        ((value,),) = self.query(sql)
        return value

    def drop(self) -> None:
        for schema in (self.schema, self.ledger):
            self.query(f'drop schema if exists "{schema}" cascade')


def duckdb_target(path: Path) -> Target:
    return Target(
        "duckdb", "analytics",
        {"type": "duckdb", "path": str(path), "schema": "analytics", "threads": 4},
    )  # fmt: skip


def postgres_target(uri: str) -> Target:
    host = urllib.parse.parse_qs(urllib.parse.urlparse(uri).query)["host"][0]
    schema = f"t_{uuid.uuid4().hex[:12]}"
    profile = {
        "type": "postgres", "host": host, "port": 5432, "user": "postgres", "password": "",
        "dbname": "postgres", "schema": schema, "threads": 4,
    }  # fmt: skip
    return Target("postgres", schema, profile)


@dataclass(frozen=True)
class DbtResult:
    """How a dbt command ended: its exit code, its output, and what run_results.json says."""

    returncode: int
    output: str
    nodes: Mapping[str, Mapping[str, Any]]

    @property
    def ok(self) -> bool:
        return self.returncode == 0

    def response(self, model: str) -> Mapping[str, Any]:
        """Return the ``adapter_response`` of a model."""
        (node,) = (n for name, n in self.nodes.items() if name.split(".")[-1] == model)
        response: Mapping[str, Any] = node["adapter_response"]
        return response


class Project:
    """Files of a dbt project and the commands run in it.

    ``run`` uses this process, which is quicker; ``process`` starts one of its own, which can be
    killed. In both, models ``fake/<name>`` exist and append the requests they get to ``sent_log``.
    """

    def __init__(self, root: Path, target: Target) -> None:
        self.root = root
        self.target = target
        self.sent_log = root.parent / "sent.log"
        self.write("prompts/label.md", "system:\nYou label tickets.\nuser:\n{{ body }}\n")
        self.write_yaml(
            "dbt_project.yml",
            {
                "name": "shop", "version": "1.0", "profile": "shop", "config-version": 2,
                "models": {"+materialized": "table"},
                "flags": {"send_anonymous_usage_stats": False},
            },
        )  # fmt: skip
        self.write_yaml("packages.yml", {"packages": [{"local": str(ROOT)}]})
        self.write_yaml(
            "profiles.yml",
            {"shop": {"target": "dev", "outputs": {"dev": dict(target.profile)}}},
        )
        # What `dbt deps` does for a local package, without its second of start-up.
        (root / "dbt_packages").mkdir(parents=True)
        (root / "dbt_packages" / "batchsql").symlink_to(ROOT)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8", newline="")

    def write_yaml(self, path: str, content: object) -> None:
        self.write(path, yaml.safe_dump(content, allow_unicode=True))

    def model(
        self, name: str, select: str, llm: Mapping[str, Any] | None = None, **config: Any
    ) -> None:
        """Write a model. ``llm`` is laid over a small default declaration for ``fake/labeller``."""
        if llm is not None:
            declaration = {
                "model": "fake/labeller",
                "prompt": "prompts/label.md",
                "returns": {
                    "category": {"enum": ["billing", "bug", "other"]},
                    "urgency": {"type": "integer", "minimum": 1, "maximum": 5},
                },
                **llm,
            }
            engine = {"log": str(self.sent_log), **declaration.pop("engine", {})}
            config = {
                "materialized": "llm",
                "unique_key": "id",
                "meta": {"llm": {**declaration, "engine": engine}},
                **config,
            }
        head = (
            f"{{{{ config({', '.join(f'{k}={v!r}' for k, v in config.items())}) }}}}\n"
            if config
            else ""
        )
        self.write(f"models/{name}.sql", head + select + "\n")

    def sent(self) -> list[str]:
        """Return the keys of all requests that reached the fake backend, in order."""
        return self.sent_log.read_text().split() if self.sent_log.exists() else []

    def forget_sent(self) -> None:
        self.sent_log.unlink(missing_ok=True)

    def run(self, *args: str) -> DbtResult:
        """Run a dbt command in this process; ``run("run")`` is ``dbt run``."""
        import contextlib
        import io

        from dbt.cli.main import dbtRunner

        (self.root / "target" / "run_results.json").unlink(missing_ok=True)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            result = dbtRunner().invoke([*args, *self._flags()])
        output = out.getvalue() + (str(result.exception) if result.exception else "")
        return DbtResult(0 if result.success else 1, output, self._nodes())

    def process(self, *args: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a dbt command in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.dbt_main", *args, *self._flags()],
            cwd=ROOT, env={**os.environ, **(env or {})}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def worker(self, *args: str) -> subprocess.Popen[str]:
        """Start a batchsql command in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.cli_main", *args],
            cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def finish(self, process: subprocess.Popen[str], timeout: float = 120) -> DbtResult:
        """Wait for a process and return how it ended."""
        output, _ = process.communicate(timeout=timeout)
        return DbtResult(process.returncode, output, self._nodes())

    def _flags(self) -> Sequence[str]:
        return [
            "--project-dir",
            str(self.root),
            "--profiles-dir",
            str(self.root),
            "--no-use-colors",
        ]

    def _nodes(self) -> Mapping[str, Mapping[str, Any]]:
        file = self.root / "target" / "run_results.json"
        if not file.exists():
            return {}
        return {result["unique_id"]: result for result in json.loads(file.read_text())["results"]}
