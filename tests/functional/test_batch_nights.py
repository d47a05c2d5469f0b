"""Nights of dbt with provider batches: what is sent, what is built, and what it costs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from batchsql import cli
from batchsql.cli import batches
from batchsql.emulate import Emulator
from tests.support.project import DbtResult, Project
from tests.support.rehearsal import (
    INSTANT,
    KEY,
    KEY_ENV,
    PROVIDERS,
    Provider,
    billed_usd,
    declare,
    outcomes,
    rehearsal,
    shards,
    statuses,
)
from tests.support.tables import rows_sql, tickets


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(batches, "FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(batches, "LOCK_PAUSE_SECONDS", 0.05)
    monkeypatch.setenv(KEY_ENV, KEY)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDOFTHETEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))


@pytest.fixture(params=PROVIDERS, ids=lambda provider: provider.name)
def provider(request: pytest.FixtureRequest) -> Provider:
    wanted: Provider = request.param
    if importlib.util.find_spec(wanted.extra) is None:
        pytest.skip(f"{wanted.extra} is not installed")
    if wanted.name == "bedrock" and importlib.util.find_spec("moto") is None:
        pytest.skip("moto is not installed")
    return wanted


def call(project: Project, *args: str) -> Result:
    """Run a command on a project in this process."""
    command, *rest = args
    place = ["--project-dir", str(project.root), "--profiles-dir", str(project.root)]
    return CliRunner().invoke(cli.main, [command, *place, *rest])


def document(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def run(project: Project, *args: str) -> DbtResult:
    result = project.run("run", *args)
    assert result.ok, result.output
    return result


def creations(emulator: Emulator, provider: Provider) -> int:
    return sum(each.operation == provider.create for each in emulator.calls)


# --- stories --------------------------------------------------------------------------------------


def test_rows_of_two_days_are_answered_over_three_nights_and_billed_once(
    project: Project, provider: Provider
) -> None:
    first, more = provider.least + 2, provider.least + 1
    with rehearsal(provider) as emulator:
        project.model("tickets", rows_sql(tickets(first)))
        declare(project, provider, emulator)

        # The evening: everything is submitted, and the table is built without it.
        evening = run(project).response("labels")
        assert (evening["rows"], evening["pending"], evening["ok"]) == (first, first, 0)
        assert (evening["requests_sent"], evening["requests_in_batches"]) == (first, first)
        assert evening["cost_usd"] == 0
        assert statuses(project.target) == {"pending": first}
        assert emulator.bill.charges == []
        assert call(project, "collect", "--exit-code").exit_code == 3

        # The night: the batch ends. Cron collects it, and the morning's run sends nothing.
        emulator.finish()
        collected = document(call(project, "collect", "--json"))
        assert (collected["counts"]["ok"], collected["open"]) == (first, [])
        assert collected["counts"]["cost_usd"] == pytest.approx(billed_usd(emulator))
        assert statuses(project.target) == {"pending": first}  # collecting builds nothing
        asked = len(emulator.calls)
        morning = run(project).response("labels")
        assert (morning["ok"], morning["pending"], morning["requests_sent"]) == (first, 0, 0)
        assert statuses(project.target) == {"ok": first}
        assert len(emulator.calls) == asked

        # The second day: only the new rows are sent, and the run after it collects by itself.
        project.model("tickets", rows_sql(tickets(first + more)))
        evening = run(project).response("labels")
        assert (evening["reused"], evening["requests_in_batches"]) == (first, more)
        assert statuses(project.target) == {"ok": first, "pending": more}
        emulator.finish()
        earlier = billed_usd(emulator) - collected["counts"]["cost_usd"]
        morning = run(project).response("labels")
        assert (morning["ok"], morning["requests_sent"]) == (first + more, 0)
        assert morning["cost_usd"] == pytest.approx(earlier)
        assert morning["output_tokens"] > 0

        # Rebuilding, and another model that asks the same, cost nothing.
        asked = len(emulator.calls)
        declare(project, provider, emulator, "others")
        again = run(project, "--full-refresh")
        for name in ("labels", "others"):
            assert again.response(name)["ok"] == first + more
            assert again.response(name)["requests_sent"] == 0
        assert len(emulator.calls) == asked
        assert len(emulator.bill.charges) == first + more
        assert emulator.bill.paid_twice == {}
        assert creations(emulator, provider) == 2
        assert KEY not in evening["_message"]
    target = project.target
    assert shards(target) == ["collected", "collected"]
    assert outcomes(target) == {"ok": first + more}
    assert target.one("select sum(cost_usd) from {ledger}.attempts") == pytest.approx(
        billed_usd(emulator)
    )
    compared = "select count(*) from {schema}.labels join {schema}.others o using (id) "
    same = "where labels.category = o.category and labels.urgency = o.urgency"
    assert target.one(compared + same) == first + more


def test_a_run_that_waits_has_all_answers_in_one_go(project: Project, provider: Provider) -> None:
    rows = provider.least + 1
    with rehearsal(provider, durations=INSTANT) as emulator:
        project.model("tickets", rows_sql(tickets(rows)))
        declare(project, provider, emulator, wait="forever")
        response = run(project).response("labels")
        assert (response["ok"], response["pending"]) == (rows, 0)
        assert (response["requests_sent"], response["requests_in_batches"]) == (rows, rows)
        assert response["requests_ok"] == rows
        assert response["cost_usd"] == pytest.approx(billed_usd(emulator))
        assert statuses(project.target) == {"ok": rows}
        assert len(emulator.bill.charges) == rows
