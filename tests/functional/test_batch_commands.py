"""``batchsql collect`` and ``cancel``, and what the other commands say of open batches."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from batchsql import cli
from batchsql.cli import batches
from batchsql.cli.ledger import NO_LEDGER
from batchsql.emulate import Call, Emulator
from tests.support.project import Project, Target, duckdb_target
from tests.support.rehearsal import (
    ANTHROPIC,
    GOOGLE,
    KEY,
    KEY_ENV,
    OPENAI,
    Nights,
    Provider,
    rehearsal,
    rule,
    shards,
)

pytest.importorskip("openai")
pytest.importorskip("anthropic")

# Each test's model is run without dbt. So its project has no such model, as if it had been deleted
# since: what the commands need of it stands in the ledger.


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "FIRST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(batches, "LOCK_PAUSE_SECONDS", 0.02)
    monkeypatch.setenv(KEY_ENV, KEY)


@pytest.fixture
def duck(tmp_path: Path) -> Project:
    return Project(tmp_path / "project", duckdb_target(tmp_path / "warehouse.duckdb"))


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    with rehearsal(OPENAI) as started:
        yield started


def begin(
    target: Target, emulator: Emulator, rows: int = 6, provider: Provider = OPENAI, **more: Any
) -> Nights:
    """Submit a batch of a model that the project does not have."""
    name = more.pop("name", "labels")
    bodies = [f"{name} {number}." for number in range(rows)]
    nights = Nights(target, provider, emulator, bodies, more, name)
    assert nights.run().requests_in_batches == rows
    return nights


def call(project: Project, *args: str, reply: str | None = None) -> Result:
    """Run a command on a project in this process."""
    command, *rest = args
    place = ["--project-dir", str(project.root), "--profiles-dir", str(project.root)]
    return CliRunner().invoke(cli.main, [command, *place, *rest], input=reply)


def document(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


# --- nothing to do --------------------------------------------------------------------------------


def test_without_a_ledger_there_is_nothing_to_collect_or_cancel(project: Project) -> None:
    for args in (["collect"], ["collect", "--exit-code", "--wait", "1h"], ["cancel", "--yes"]):
        result = call(project, *args)
        assert (result.exit_code, result.stdout) == (0, f"{NO_LEDGER}\n"), args
    assert document(call(project, "collect", "--json")) == {"moved": [], "open": []}
    if project.target.kind == "duckdb":  # asking makes no file
        assert not Path(project.target.profile["path"]).exists()


def test_without_an_open_batch_nobody_is_asked(project: Project, emulator: Emulator) -> None:
    begin(project.target, emulator)
    emulator.finish()
    assert call(project, "collect").exit_code == 0
    asked = len(emulator.calls)
    result = call(project, "collect", "--exit-code", "--wait", "1h")
    assert (result.exit_code, result.stdout) == (0, "no batch is open\n")
    made = document(call(project, "collect", "--json"))
    assert (made["moved"], made["open"], made["errors"]) == ([], [], [])
    assert "cancel 0 batches" in call(project, "cancel", "--yes").stdout
    assert len(emulator.calls) == asked


# --- collecting -----------------------------------------------------------------------------------


def test_an_open_batch_is_shown_and_then_collected(project: Project, emulator: Emulator) -> None:
    nights = begin(project.target, emulator)
    (batch_id,) = shards(project.target, "provider_batch_id")
    emulator.advance(stage="in_progress", fraction=0.5)
    result = call(project, "collect")
    assert result.exit_code == 0
    assert re.search(rf"^{batch_id} +labels +in_progress .* 6 +3 +0$", result.stdout, re.MULTILINE)
    assert call(project, "collect", "--exit-code").exit_code == 3
    (shown,) = document(call(project, "collect", "--json"))["open"]
    assert (shown["provider_batch_id"], shown["state"]) == (batch_id, "submitted")
    assert (shown["model"], shown["requests"]) == (OPENAI.model, 6)
    assert nights.claims == 6

    emulator.finish()
    result = call(project, "collect", "--exit-code")
    assert result.exit_code == 0
    cost_usd = project.target.one("select sum(cost_usd) from {ledger}.attempts")
    assert cost_usd > 0
    assert f"collected 1 of 1 batches: 6 answers, 0 failures, {cost_usd:.4f} USD" in result.stdout
    assert nights.rows == {"pending": 6}
    assert nights.run().ok == 6
    assert nights.times_billed == {1: 6}


def test_collect_counts_failures_beside_the_answers(duck: Project, emulator: Emulator) -> None:
    begin(duck.target, emulator)
    emulator.misbehave(rule("refusal", text="labels 3."))
    emulator.finish()
    made = document(call(duck, "collect", "--json"))
    assert (made["counts"]["ok"], made["counts"]["tries"], made["counts"]["given_up"]) == (5, 6, 0)
    (moved,) = made["moved"]
    assert (moved["state"], moved["enrichment"]) == ("collected", "model.shop.labels")


def test_waiting_ends_with_the_last_batch(duck: Project) -> None:
    polls: list[Call] = []

    def end_at_the_third_look(made: Call) -> None:
        if made.operation == OPENAI.poll:
            polls.append(made)
            if len(polls) == 3:
                emulator.finish()

    with rehearsal(OPENAI, on_call=end_at_the_third_look) as emulator:
        nights = begin(duck.target, emulator)
        result = call(duck, "collect", "--wait", "1h", "--exit-code")
        assert result.exit_code == 0, result.output
        assert len(polls) >= 4
        assert "collected 1 of 1 batches: 6 answers" in result.stdout
        assert nights.run().ok == 6


def test_waiting_ends_when_the_time_is_up(
    duck: Project, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(duck.target, emulator)
    monkeypatch.setattr(batches, "FIRST_PAUSE_SECONDS", 60.0)  # no longer than what is left
    result = call(duck, "collect", "--wait", "1s", "--exit-code")
    assert result.exit_code == 3
    assert sum(made.operation == OPENAI.poll for made in emulator.calls) == 2


def test_names_choose_whose_batches_are_looked_after(duck: Project, emulator: Emulator) -> None:
    begin(duck.target, emulator)
    begin(duck.target, emulator, name="others")
    emulator.finish()
    made = document(call(duck, "collect", "others", "--json"))
    assert [moved["enrichment"] for moved in made["moved"]] == ["model.shop.others"]
    assert shards(duck.target, "enrichment, state") == [
        ("model.shop.labels", "submitted"),
        ("model.shop.others", "collected"),
    ]
    for command in (["collect"], ["cancel", "--yes"]):
        result = call(duck, *command, "lables")
        assert (result.exit_code, result.stdout) == (1, "")
        assert "named lables; it knows: labels, others" in result.stderr


def test_trouble_with_one_account_keeps_no_other_from_being_collected(
    duck: Project, emulator: Emulator
) -> None:
    begin(duck.target, emulator)
    begin(duck.target, emulator, provider=ANTHROPIC, name="others")
    emulator.finish()
    emulator.misbehave(rule("bad_key", endpoint="openai.*"))
    result = call(duck, "collect", "--json")
    assert result.exit_code == 1
    made = json.loads(result.stdout)
    assert [moved["enrichment"] for moved in made["moved"]] == ["model.shop.others"]
    assert [left["enrichment"] for left in made["open"]] == ["model.shop.labels"]
    (error,) = made["errors"]
    assert "key" in error
    assert error in result.stderr
    assert KEY not in result.output
    emulator.behave()
    assert call(duck, "collect", "--exit-code").exit_code == 0


def test_the_key_of_another_account_is_told_and_nothing_is_given_up(
    duck: Project, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights = begin(duck.target, emulator)
    monkeypatch.delenv(KEY_ENV)
    result = call(duck, "collect")
    assert result.exit_code == 1
    assert f"the environment variable {KEY_ENV} is not set" in result.stderr
    assert nights.claims == 6
    monkeypatch.setenv(KEY_ENV, KEY)
    emulator.finish()
    assert call(duck, "collect", "--exit-code").exit_code == 0


# --- the DuckDB file ------------------------------------------------------------------------------


class Holder:
    """Another process that has the DuckDB file open."""

    def __init__(self, path: str) -> None:
        code = "import duckdb, sys; c = duckdb.connect(sys.argv[1]); print(flush=True); input()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.communicate("\n")


@pytest.fixture
def holder(duck: Project, emulator: Emulator) -> Iterator[Holder]:
    begin(duck.target, emulator)
    emulator.finish()
    opened = Holder(str(duck.target.profile["path"]))
    yield opened
    opened.end()


@pytest.mark.parametrize("command", [["collect"], ["cancel", "--yes"]])
def test_a_process_that_has_the_file_is_named(
    duck: Project, holder: Holder, command: list[str]
) -> None:
    result = call(duck, *command)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"is open in the process {holder.process.pid} (" in result.stderr
    assert "Traceback" not in result.stderr


def test_lock_wait_waits_until_the_file_is_free(
    duck: Project, holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout)
            if len(pauses) == 2:
                holder.end()
            return False

    monkeypatch.setattr(batches, "Event", Stop)
    result = call(duck, "collect", "--lock-wait", "1h")
    assert result.exit_code == 0, result.output
    assert len(pauses) == 2
    assert result.stderr.count(f"is open in the process {holder.process.pid} (") == 1
    assert "waiting for at most" in result.stderr
    assert "collected 1 of 1 batches: 6 answers" in result.stdout


def test_command_that_is_told_to_end_waits_for_the_file_no_longer(
    duck: Project, holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            return True  # as Ctrl-C and SIGTERM have it

    monkeypatch.setattr(batches, "Event", Stop)
    result = call(duck, "collect", "--lock-wait", "1h")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.rstrip().endswith(
        "ended while another process had the file; nothing was done"
    )


def test_worker_that_is_told_to_end_while_it_waits_for_the_file_exits_well(
    duck: Project, holder: Holder
) -> None:
    place = ["--project-dir", str(duck.root), "--profiles-dir", str(duck.root)]
    command = [sys.executable, "-m", "tests.support.cli_main", "work", "--lock-wait", "1h", *place]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stderr is not None
        assert "waiting for at most" in worker.stderr.readline()
        worker.send_signal(signal.SIGTERM)
        said = worker.stderr.read()
    assert worker.returncode == 0
    assert "Error" not in said


# --- cancelling -----------------------------------------------------------------------------------


def test_what_was_finished_before_the_cancelling_is_kept_and_the_rest_waits(
    project: Project, emulator: Emulator
) -> None:
    nights = begin(project.target, emulator)
    emulator.advance(stage="in_progress", fraction=0.5)
    assert call(project, "cancel", "--yes").stdout == "asked to cancel 1 batch\n"
    result = call(project, "collect", "--exit-code")
    assert result.exit_code == 0
    assert "collected 1 of 1 batches: 3 answers, 3 failures" in result.stdout
    assert nights.shards == ["cancelled"]
    assert (nights.claims, nights.dead) == (0, {})
    counts = nights.run()
    assert (counts.ok, counts.pending, counts.requests_sent) == (3, 3, 3)
    emulator.finish()
    assert nights.run().ok == 6
    assert nights.times_billed == {1: 6}


def test_cancel_asks_first_and_takes_names(duck: Project, emulator: Emulator) -> None:
    begin(duck.target, emulator)
    begin(duck.target, emulator, name="others")
    result = call(duck, "cancel", reply="n\n")
    assert result.exit_code == 1
    assert "Cancel the open batches of all models?" in result.output
    assert not [made for made in emulator.calls if made.operation == "openai.batches.cancel"]
    result = call(duck, "cancel", "others", reply="y\n")
    assert result.exit_code == 0
    assert "Cancel the open batches of others?" in result.output
    asked = "enrichment, cancel_requested_at is not null"
    assert shards(duck.target, asked) == [
        ("model.shop.labels", False),
        ("model.shop.others", True),
    ]


def test_cancel_says_before_it_asks_what_will_be_lost(duck: Project) -> None:
    pytest.importorskip("google.genai")
    lost = (
        "google keeps nothing of a cancelled batch: what 1 batch of 6 requests finished until now"
    )
    with rehearsal(OPENAI) as kept, rehearsal(GOOGLE) as emulator:
        begin(duck.target, kept, name="others")
        result = call(duck, "cancel", reply="n\n")
        assert "lost" not in result.output
        nights = begin(duck.target, emulator, provider=GOOGLE)
        emulator.advance(stage="in_progress", fraction=0.5)
        result = call(duck, "cancel", reply="n\n")
        assert result.output.index(lost) < result.output.index("Cancel the open batches of all")
        assert nights.calls["google.batches.cancel"] == 0
        assert lost not in call(duck, "cancel", "others", reply="n\n").output
        result = call(duck, "cancel", "labels", "--yes")
        assert lost in result.stderr
        assert (result.stdout, result.exit_code) == ("asked to cancel 1 batch\n", 0)
        call(duck, "collect", "labels")
        emulator.finish()
        assert nights.night().ok == 6
        assert nights.times_billed == {1: 3, 2: 3}


def test_cancelling_twice_does_no_harm(duck: Project, emulator: Emulator) -> None:
    emulator.misbehave(rule("cancel_hangs"))
    nights = begin(duck.target, emulator)
    for _ in range(2):
        assert call(duck, "cancel", "--yes").exit_code == 0
    result = call(duck, "collect", "--exit-code")
    assert result.exit_code == 3
    assert "cancelling" in result.stdout
    assert nights.claims == 6


def test_a_batch_that_ended_before_it_was_cancelled_gives_all_it_has(
    duck: Project, emulator: Emulator
) -> None:
    nights = begin(duck.target, emulator)
    emulator.finish()
    assert call(duck, "cancel", "--yes").exit_code == 0
    assert call(duck, "collect", "--exit-code").exit_code == 0
    assert nights.run().ok == 6
    assert nights.times_billed == {1: 6}


# --- status ---------------------------------------------------------------------------------------


def test_status_shows_batches_until_they_are_collected(duck: Project, emulator: Emulator) -> None:
    begin(duck.target, emulator)
    (batch_id,) = shards(duck.target, "provider_batch_id")
    shown = document(call(duck, "status", "--json"))
    (shard,) = shown["shards"]
    assert (shard["state"], shard["provider_batch_id"]) == ("submitted", batch_id)
    (labels,) = shown["enrichments"]
    assert labels["rows"] == {"total": 6, "ok": 0, "pending": 6, "failed": 0}
    assert labels["requests"]["in_progress"] == 6
    assert batch_id in call(duck, "status").stdout
    assert call(duck, "status", "--exit-code").exit_code == 3
    emulator.finish()
    assert call(duck, "collect").exit_code == 0
    shown = document(call(duck, "status", "--json"))
    assert shown["shards"] == []
    assert shown["enrichments"][0]["requests"]["answered"] == 6
