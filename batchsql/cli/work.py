"""``batchsql work``: ask what runs with ``runner: detached`` have queued."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
import yaml  # type: ignore[import-untyped]

from batchsql.cli.batches import is_told, lock_wait, tell, with_lock
from batchsql.cli.ledger import found_ledgers, model_name
from batchsql.cli.options import Duration, ReadableFailure, json_option, opens_project
from batchsql.cli.screen import clean, number, print_json, say

if TYPE_CHECKING:
    from batchsql.cli.ledger import Found
    from batchsql.completion import Telling
    from batchsql.dbt_project import ProjectOptions
    from batchsql.shipping import SendLimit
    from batchsql.warehouse.queue import Queue
    from batchsql.working import Worked, Worker

GRACE_SECONDS = 20.0
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 15.0


def _read_engine(
    context: click.Context, option: click.Parameter, values: Sequence[str]
) -> dict[str, Any]:
    engine = {}
    for value in values:
        name, equals, text = value.partition("=")
        if not (name and equals):
            raise click.BadParameter(f"got {value!r}; write NAME=VALUE, such as max_num_seqs=64")
        try:
            engine[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise click.BadParameter(f"{name}: the value is not YAML: {error}") from error
    return engine


@click.command()
@click.option("--select", "-s", metavar="SELECTOR",
              help="dbt's selection syntax; only llm models count. Default: all.")  # fmt: skip
@click.option("--model", "models", metavar="MODEL", multiple=True,
              help="Work only for this model, such as vllm/Qwen/Qwen3-8B; may be repeated. "
                   "Default: whatever is asked for.")  # fmt: skip
@click.option("--engine", metavar="NAME=VALUE", multiple=True, callback=_read_engine,
              help="An engine option of this machine, over the declared one; may be "
                   "repeated.")  # fmt: skip
@click.option("--max-shards", type=click.IntRange(min=1), metavar="N",
              help="End after N shards. Default: no limit.")  # fmt: skip
@click.option("--idle-exit", "idle_seconds", type=Duration(), metavar="DURATION",
              help="End once there was nothing to do for this long. Default: stay; on DuckDB "
                   "always at once, since nobody else could open the file.")  # fmt: skip
@click.option("--grace", "grace_seconds", type=Duration(), default=f"{GRACE_SECONDS:g}s",
              show_default=True, metavar="DURATION",
              help="How long requests that are being answered may go on after SIGTERM or Ctrl-C. "
                   "What is not answered by then is given back.")  # fmt: skip
@lock_wait
@json_option
@opens_project
def work(
    *, options: ProjectOptions, select: str | None, models: tuple[str, ...],
    engine: Mapping[str, Any], max_shards: int | None, idle_seconds: float | None,
    grace_seconds: float, lock_seconds: float, as_json: bool,
) -> None:  # fmt: skip
    """Answer what runs have queued, on the engine of this machine.

    A model with `runner: detached` is not answered by `dbt run`: the run queues what is new, builds
    with what is known, and ends. Workers do the rest, on any machine that reaches the warehouse and
    has this project; the next run builds the table with their answers. A worker never touches a
    table of yours.

    Any number of workers share the queues. Each claims a shard of some ten minutes under a lease,
    writes answers as they come, and takes over what a worker that is gone had claimed. On SIGTERM
    it claims nothing more, ends what it can within --grace, gives the rest back and exits with 0.
    A second signal ends it at once. On DuckDB one process at a time has the file: there the worker
    runs while dbt does not.

    Exit codes: 0 nothing left or told to end; 1 an error, also when all that is left cannot be
    asked from here.

    \b
    Example:
      batchsql work --model vllm/Qwen/Qwen3-8B --idle-exit 10m
    """
    from batchsql.shipping import SendLimit, StoppedError

    stop, drain = threading.Event(), threading.Event()
    limit = SendLimit(None, max_shards, drain)
    with ending(stop, drain, grace_seconds):
        enrichments = None if select is None else _select(options, select)
        if select is not None and not enrichments:
            say(f"no llm model is selected by {select}")
            return
        session = _Session(options, enrichments, models or None, engine, idle_seconds, limit, stop)
        with contextlib.suppress(StoppedError):
            while with_lock(lock_seconds, session.work, drain) and session.pause():
                pass
        tell(options, session.tellings, lock_seconds, stop)
    if as_json:
        print_json(session.document())
    else:
        say(session.summary())
    if session.set_aside and not limit.is_reached:
        raise ReadableFailure(
            "\n".join(f"{model_name(name)}: {why}" for name, why in session.set_aside.items())
        )


def _select(options: ProjectOptions, select: str) -> list[str]:
    from batchsql.dbt_project import select_models

    return select_models(options, select)


@contextlib.contextmanager
def ending(stop: threading.Event, drain: threading.Event, grace_seconds: float) -> Iterator[None]:
    """Let the first SIGTERM or Ctrl-C drain the work, and its grace or a second one stop it."""
    timer = threading.Timer(grace_seconds, stop.set)
    timer.daemon = True

    def end(*_: object) -> None:
        if drain.is_set():
            stop.set()
            return
        drain.set()
        timer.start()
        click.echo("ending: what is being answered comes to its end, nothing new is taken on",
                   err=True)  # fmt: skip

    before = {each: signal.signal(each, end) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        timer.cancel()
        for each, handler in before.items():
            signal.signal(each, handler)


@dataclasses.dataclass
class _Session:
    """What one worker process looks at, what it may do, and what it has done."""

    options: ProjectOptions
    enrichments: Sequence[str] | None
    models: Sequence[str] | None
    engine: Mapping[str, Any]
    idle_seconds: float | None
    limit: SendLimit
    stop: threading.Event
    tellings: list[Telling] = dataclasses.field(default_factory=list)
    done: list[Worked] = dataclasses.field(default_factory=list)
    idle_since: float = dataclasses.field(default_factory=time.monotonic)
    has_told_of_others: bool = False

    def work(self) -> bool:
        """Open the ledgers and work on them to the end; return whether to look for some later."""
        with found_ledgers(self.options, ()) as found:
            if not found:
                return True
            self._say_what_is_not_known(found[0])
            workers = [(each, self._worker(each)) for each in found]
            try:
                self._work(workers)
            finally:
                self.done += [worker.worked for _, worker in workers]
        return False

    def pause(self) -> bool:
        """Wait while there is no ledger, which dbt run may make; return whether to go on."""
        from batchsql.dbt_project import open_project

        with open_project(self.options) as project:
            if not project.has_foreign_writers:
                return False
        self._pause(LONGEST_PAUSE_SECONDS)
        return not self.limit.is_reached and not self._is_idle_for_too_long()

    def _work(self, workers: Sequence[tuple[Found, Worker]]) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self.limit.is_reached:
            has_worked = False
            for each, worker in workers:
                while not self.limit.is_reached and worker.work(self.enrichments, self.models):
                    has_worked = True
                    self._look_for_completed(each)
            if has_worked:
                self.idle_since, pause = time.monotonic(), FIRST_PAUSE_SECONDS
                continue
            self._look_for_others(workers)
            is_alone = any(not each.ledger.warehouse.has_foreign_writers for each, _ in workers)
            has_set_aside = any(worker.worked.set_aside for _, worker in workers)
            if is_alone or has_set_aside or self._is_idle_for_too_long():
                return
            self._pause(pause)
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    def _look_for_others(self, workers: Sequence[tuple[Found, Worker]]) -> None:
        """Say once what waits, where --model and --select have left this worker nothing at all."""
        is_choosy = self.enrichments is not None or self.models is not None
        done = [worker.worked for _, worker in workers]
        if not is_choosy or self.has_told_of_others or any(each.counts.tries for each in done):
            return
        queues = [queue for each, _ in workers for queue in each.ledger.read_queues()]
        if not queues or any(self._is_wanted(queue) for queue in queues):
            return
        self.has_told_of_others = True
        waiting = ", ".join(
            f"{number(each.free + each.claimed, 'request')} of {model_name(each.enrichment)} "
            f"for {each.model}"
            for each in queues
        )
        _note(f"nothing that --model and --select leave is queued; queued: {waiting}")

    def _is_wanted(self, queue: Queue) -> bool:
        is_selected = self.enrichments is None or queue.enrichment in self.enrichments
        return is_selected and (self.models is None or queue.model in self.models)

    def _is_idle_for_too_long(self) -> bool:
        idle = time.monotonic() - self.idle_since
        return self.idle_seconds is not None and idle >= self.idle_seconds

    def _pause(self, seconds: float) -> None:
        if self.idle_seconds is not None:
            left = self.idle_since + self.idle_seconds - time.monotonic()
            seconds = min(seconds, max(0.0, left))
        drain = self.limit.drain
        if drain is not None:
            drain.wait(seconds)

    def _worker(self, found: Found) -> Worker:
        from batchsql.backends.registry import open_backend
        from batchsql.pricing import open_prices
        from batchsql.working import Worker

        found.ledger.migrate()
        return Worker(
            found.ledger,
            name=f"{socket.gethostname()}:{os.getpid()}",
            open_backend=lambda model, engine: open_backend(model, engine, found.root),
            engine=self.engine, open_prices=open_prices, limit=self.limit, stop=self.stop,
            say=_note, warn=_note,
        )  # fmt: skip

    def _look_for_completed(self, found: Found) -> None:
        """Tell of what is complete; where the command may need the file, after it is closed."""
        from batchsql.completion import take_tellings

        tellings = take_tellings(found.ledger, found.on_complete)
        if not found.ledger.warehouse.has_foreign_writers:
            self.tellings += tellings
            return
        for each in tellings:
            if is_told(each, self.stop):
                found.ledger.close_completion(each.completion)
            else:
                found.ledger.give_back_completion(each.completion)

    @staticmethod
    def _say_what_is_not_known(found: Found) -> None:
        if not found.project.has_manifest:
            _note(
                "there is no target/manifest.json, so nobody knows of on_complete, nor of ledgers "
                "that models name with ledger_schema; dbt parse makes one"
            )

    @property
    def set_aside(self) -> dict[str, str]:
        return {name: why for each in self.done for name, why in each.set_aside.items()}

    def summary(self) -> str:
        counts = self._counts()
        return (
            f"{number(counts.tries, 'try', 'tries')}: {number(counts.ok, 'answer')}, "
            f"{number(counts.tries - counts.ok, 'failure')}"
        )

    def document(self) -> Mapping[str, Any]:
        return {
            "counts": dataclasses.asdict(self._counts()),
            "set_aside": self.set_aside,
        }

    def _counts(self) -> Any:
        from batchsql.counting import ShipCounts

        return sum((each.counts for each in self.done), ShipCounts())


def _note(message: str) -> None:
    click.echo(clean(message, one_line=False), err=True)
