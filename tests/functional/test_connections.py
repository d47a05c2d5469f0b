"""What dbt's connections do while a model answers."""

from __future__ import annotations

from pathlib import Path

import pytest

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
