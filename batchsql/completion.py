"""Tell that an enrichment has every answer: run the user's command, or call the web address."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from threading import Event

from batchsql.declare.routing import OnComplete
from batchsql.errors import BatchsqlError
from batchsql.warehouse.ledger import Ledger, OpenCompletion

WEBHOOK_TIMEOUT_SECONDS = 30.0
COMMAND_GRACE_SECONDS = 5.0
"""How long a command may take to end once it was told to."""

_LOOK_SECONDS = 0.5
_ENRICHMENT = "BATCHSQL_ENRICHMENT"


class NotToldError(BatchsqlError):
    """The command failed, or nobody took the call. It is tried again the next time."""


@dataclass(frozen=True, slots=True)
class Completed:
    """What is told: the enrichment, and its requests that were answered or given up."""

    enrichment: str
    answered: int
    given_up: int

    @property
    def name(self) -> str:
        """The name of the dbt model."""
        return self.enrichment.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Telling:
    """A completion that this process has taken on to tell."""

    on_complete: OnComplete
    completion: OpenCompletion
    schema: str
    """Where its ledger is."""

    def tell(self, stop: Event) -> None:
        """Tell it, by the command or the web address.

        Raises:
            NotToldError: it failed, or ``stop`` was set before it ended.
        """
        requests = self.completion.requests
        told = Completed(self.completion.enrichment, requests.results, requests.dead)
        tell_completed(self.on_complete, told, stop)


def take_tellings(ledger: Ledger, on_complete: Mapping[str, OnComplete]) -> list[Telling]:
    """Take on what is complete in a ledger, of the enrichments that have somebody to be told.

    What a command of ``on_complete`` itself runs does not tell of the same enrichment again.
    """
    wanted = on_complete.keys() - {os.environ.get(_ENRICHMENT)}
    if not wanted:
        return []
    return [
        Telling(on_complete[each.enrichment], each, ledger.schema)
        for each in ledger.take_completions(wanted)
    ]


def tell_completed(on_complete: OnComplete, completed: Completed, stop: Event) -> None:
    """Run the command through the shell, or POST the facts as JSON.

    The command finds them in ``BATCHSQL_MODEL``, ``BATCHSQL_ENRICHMENT``, ``BATCHSQL_ANSWERED`` and
    ``BATCHSQL_GIVEN_UP``. It is told once more an hour later when a process dies in between.

    Raises:
        NotToldError: it failed, or ``stop`` was set before it ended.
    """
    if stop.is_set():
        raise NotToldError(f"{completed.name}: on_complete is told the next time, since this ends")
    if on_complete.command is not None:
        facts = {
            "BATCHSQL_MODEL": completed.name,
            _ENRICHMENT: completed.enrichment,
            "BATCHSQL_ANSWERED": str(completed.answered),
            "BATCHSQL_GIVEN_UP": str(completed.given_up),
        }
        code = _run(on_complete.command, {**os.environ, **facts}, stop)
        if code:
            was_ended = " after it was told to end" if stop.is_set() else ""
            raise NotToldError(
                f"{completed.name}: the command of on_complete ended with {code}{was_ended}; it is "
                "run again the next time that this is looked at"
            )
        return
    if on_complete.webhook is not None:
        _post(on_complete.webhook, completed)


def _run(command: str, environment: Mapping[str, str], stop: Event) -> int:
    """Run a command and what it starts, which gets SIGTERM when ``stop`` is set; return its code.

    It has a group of processes of its own, so that Ctrl-C reaches it by ``stop`` too.
    """
    # A shell, as in a crontab: it is the declaration's author who writes the command.
    with subprocess.Popen(  # noqa: S602
        command, shell=True, env=environment, start_new_session=True
    ) as process:
        try:
            while not stop.is_set():
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(_LOOK_SECONDS)
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                return process.wait(COMMAND_GRACE_SECONDS)
        except BaseException:
            _kill(process)
            raise
        _kill(process)
        return process.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Has a redirect taken for the failure that it is: the facts would not go along."""

    def redirect_request(self, *args: object) -> None:
        return None


def _post(url: str, completed: Completed) -> None:
    body = json.dumps({"model": completed.name, **asdict(completed)}).encode()
    request = urllib.request.Request(  # noqa: S310  http or https, checked when it was declared
        url, data=body, headers={"Content-Type": "application/json"}, method="POST"
    )
    try:
        opener = urllib.request.build_opener(_NoRedirects)
        with opener.open(request, timeout=WEBHOOK_TIMEOUT_SECONDS):
            return
    except (OSError, ValueError) as error:
        # The address may hold a secret, so it is not repeated.
        said = error.code if isinstance(error, urllib.error.HTTPError) else type(error).__name__
        raise NotToldError(
            f"{completed.name}: the webhook of on_complete did not take the call ({said}); it is "
            "called again the next time that this is looked at"
        ) from None
