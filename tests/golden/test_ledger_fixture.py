"""What one version has paid for, no later version pays for again.

``ledger_v<n>/`` holds the ledger that a batchsql with ledger version n wrote for the project in
``ledger_project/``: its tables as SQL, so that loading them uses no code of ours, and their rows.
A folder that is there is never rewritten, nor may the project change: if a test here is red, users
would pay again. ``BATCHSQL_GOLDEN=write`` makes only the folder of the current version, and only
where there is none yet.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchsql.warehouse.tables import LEDGER_VERSION
from tests.support.ledger_fixture import (
    fixture_folder,
    load_ledger,
    make_project,
    read_labels,
    read_rows,
    write_fixture,
)
from tests.support.project import Project, duckdb_target, postgres_target

MAX_BYTES = 200_000


def test_ledger_of_this_version_is_kept(tmp_path: Path, postgres_uri: str) -> None:
    folder = fixture_folder(LEDGER_VERSION)
    if os.environ.get("BATCHSQL_GOLDEN") == "write" and not folder.exists():
        targets = (duckdb_target(tmp_path / "warehouse.duckdb"), postgres_target(postgres_uri))
        projects = [Project(tmp_path / target.kind / "project", target) for target in targets]
        for project in projects:
            make_project(project)
            result = project.run("run")
            assert result.ok, result.output
        write_fixture(folder, *projects)
        targets[1].drop()
    assert folder.is_dir(), "make golden writes it"
    assert sum(file.stat().st_size for file in folder.iterdir()) < MAX_BYTES


@pytest.mark.parametrize("items", ["known rows", "rows rendered anew"])
@pytest.mark.parametrize("version", range(1, LEDGER_VERSION + 1))
def test_ledger_of_any_version_is_not_paid_for_again(
    version: int, items: str, project: Project
) -> None:
    folder, target = fixture_folder(version), project.target
    labels = read_rows(folder / "labels.jsonl")
    make_project(project)
    load_ledger(folder, target)
    if items == "rows rendered anew":
        # With no row known, each is rendered, and must render to the request that was answered.
        target.query("delete from {ledger}.items")
    kept = {
        name: read_rows(folder / f"{name}.jsonl") for name in ("requests", "attempts", "results")
    }

    result = project.run("run")

    assert result.ok, result.output
    assert project.sent() == []
    assert read_labels(target) == labels
    statuses = [row["llm_status"] for row in labels]
    ok, failed = statuses.count("ok"), statuses.count("failed")
    response = result.response("labels")
    assert (response["rows"], response["ok"], response["failed"]) == (len(labels), ok, failed)
    # An answered row that is known needs no look at its prompt.
    assert response["new"] == (failed if items == "known rows" else len(labels))
    assert target.one("select count(*) from {ledger}.dead_letters") == failed == 2
    for name, rows in kept.items():
        assert target.one(f"select count(*) from {{ledger}}.{name}") == len(rows)
    assert target.one("select max(ledger_version) from {ledger}.meta") == LEDGER_VERSION
