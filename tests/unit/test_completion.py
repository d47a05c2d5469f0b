"""Telling that all is answered, and being told to end meanwhile."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from batchsql import completion
from batchsql.completion import Completed, NotToldError, tell_completed
from batchsql.declare.routing import OnComplete
from tests.support.lean import wait_for

TOLD = Completed("model.shop.labels", 3, 1)


def test_command_finds_what_is_told_in_its_environment(tmp_path: Path) -> None:
    file = tmp_path / "told"
    facts = "$BATCHSQL_MODEL $BATCHSQL_ENRICHMENT $BATCHSQL_ANSWERED $BATCHSQL_GIVEN_UP"
    tell_completed(OnComplete(command=f"echo {facts} > {file}"), TOLD, threading.Event())
    assert file.read_text() == "labels model.shop.labels 3 1\n"


def test_command_that_fails_was_not_told() -> None:
    with pytest.raises(NotToldError, match="ended with 3;"):
        tell_completed(OnComplete(command="exit 3"), TOLD, threading.Event())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(completion, "COMMAND_GRACE_SECONDS", 1.0)


def stop_once(begun: Path) -> threading.Event:
    """Return an event that is set once the command has begun."""
    stop = threading.Event()

    def end() -> None:
        wait_for(begun.exists)
        stop.set()

    threading.Thread(target=end, daemon=True).start()
    return stop


@pytest.mark.usefixtures("quick")
def test_command_is_told_to_end_with_its_caller(tmp_path: Path) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    command = f"trap 'touch {ended}; exit 0' TERM; touch {begun}; while true; do sleep 0.1; done"
    tell_completed(OnComplete(command=command), TOLD, stop_once(begun))  # its end was a good one
    assert ended.exists()


@pytest.mark.usefixtures("quick")
def test_command_that_does_not_want_to_end_is_killed_with_what_it_started(tmp_path: Path) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    stubborn = f"trap '' TERM; touch {begun}; sleep 5; touch {ended}"
    started = time.monotonic()
    with pytest.raises(NotToldError, match="after it was told to end"):
        tell_completed(
            OnComplete(command=f'trap "" TERM; sh -c "{stubborn}"'), TOLD, stop_once(begun)
        )
    assert time.monotonic() - started < 5
    assert not ended.exists()


def test_nothing_is_begun_by_one_who_was_told_to_end(tmp_path: Path) -> None:
    stop, file = threading.Event(), tmp_path / "told"
    stop.set()
    with pytest.raises(NotToldError, match="the next time"):
        tell_completed(OnComplete(command=f"touch {file}"), TOLD, stop)
    assert not file.exists()
