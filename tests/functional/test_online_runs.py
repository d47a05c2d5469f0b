"""Runs of dbt against the online providers, at a rehearsal server that counts what is billed."""

from __future__ import annotations

from typing import Any

import pytest

from batchsql.backends import online
from batchsql.emulate import Behaviour, Emulator, Rule
from tests.support.project import Project
from tests.support.tables import rows_sql, tickets

pytest.importorskip("openai")
pytest.importorskip("anthropic")

KEY = "sk-rehearsal-0123456789"
MODELS = ["openai/gpt-5-mini", "anthropic/claude-haiku-4-5", "openai_compatible/small"]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online, "FIRST_BACKOFF_SECONDS", 0.01)
    monkeypatch.setenv("REHEARSAL_API_KEY", KEY)


def declare(project: Project, model: str, emulator: Emulator, **engine: Any) -> None:
    is_anthropic = model.startswith("anthropic/")
    url = emulator.anthropic_base_url if is_anthropic else emulator.openai_base_url
    llm = {
        "model": model,
        "route": "online",
        "prompt": "prompts/label.md",
        "returns": {
            "category": {"enum": ["billing", "bug", "other"]},
            "urgency": {"type": "integer", "minimum": 1, "maximum": 5},
        },
        "engine": {"base_url": url, "api_key_env": "REHEARSAL_API_KEY", **engine},
    }
    head = f"{{{{ config(materialized='llm', unique_key='id', meta={ {'llm': llm}!r}) }}}}\n"
    project.write("models/labels.sql", head + "select * from {{ ref('tickets') }}\n")


@pytest.mark.parametrize("model", MODELS)
def test_each_row_is_billed_once_though_the_provider_stumbles(project: Project, model: str) -> None:
    rules = [
        Rule(behaviour=Behaviour.RATE_LIMIT, every=20, retry_after=0),
        Rule(behaviour=Behaviour.SERVER_ERROR, every=25),
        Rule(behaviour=Behaviour.DROP, every=30),
    ]
    with Emulator(rules=rules, models=["small"]) as emulator:
        declare(project, model, emulator)
        project.model("tickets", rows_sql(tickets(120)))
        first = project.run("run")
        assert first.ok, first.output
        assert first.response("labels")["ok"] == 120
        assert len(emulator.bill.charges) == 120
        assert emulator.bill.paid_twice == {}
        calls = len(emulator.calls)
        assert calls > 120, "nothing stumbled"
        second = project.run("run")
        assert second.response("labels")["ok"] == 120
        assert len(emulator.calls) == calls
    reported = project.target.one("select max(model_reported) from {ledger}.attempts")
    assert model.partition("/")[2] in reported
    assert KEY not in first.output


def test_a_refused_key_fails_the_model_and_the_next_run_goes_on(project: Project) -> None:
    with Emulator(rules=[Rule(behaviour=Behaviour.BAD_KEY, skip=30)]) as emulator:
        declare(project, MODELS[0], emulator, max_concurrency=4)
        project.model("tickets", rows_sql(tickets(50)))
        result = project.run("run")
        assert not result.ok
        assert "check the key" in result.output and KEY not in result.output
        kept = project.target.one("select count(*) from {ledger}.results")
        assert kept == 30
        emulator.behave()
        result = project.run("run")
        assert result.ok, result.output
        assert len(emulator.bill.charges) == 50
        assert emulator.bill.paid_twice == {}


def test_mistakes_in_the_options_are_reported_together(project: Project) -> None:
    project.model("tickets", rows_sql(tickets(1)))
    with Emulator() as emulator:
        declare(
            project, MODELS[0], emulator,
            api_key_env=KEY, max_concurrency=0, slots=3,
        )  # fmt: skip
        result = project.run("run")
        assert not result.ok
        for part in ("engine.api_key_env", "engine.max_concurrency", "engine.slots"):
            assert part in result.output
        assert KEY not in result.output
        assert list(emulator.calls) == []
