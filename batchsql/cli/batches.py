"""``batchsql collect`` and ``cancel``: the batches that are at a provider."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar

import click

from batchsql.cli.ledger import NO_LEDGER, Found, found_ledgers, model_name
from batchsql.cli.options import (
    EXIT_OPEN_WORK,
    Duration,
    ReadableFailure,
    exit_code_option,
    json_option,
    opens_project,
)
from batchsql.cli.screen import ago, number, print_json, print_table, say, usd, working
from batchsql.progress import format_seconds

if TYPE_CHECKING:
    from batchsql.completion import Telling
    from batchsql.dbt_project import ProjectOptions
    from batchsql.rounds import Round, Rounds
    from batchsql.warehouse.batch_shards import BatchShard

_T = TypeVar("_T")
_Names = Sequence[str] | None

FIRST_PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 60.0
LOCK_PAUSE_SECONDS = 1.0


lock_wait = click.option(
    "--lock-wait", "lock_seconds", type=Duration(), default=0.0, metavar="DURATION",
    help="How long to wait while another process has the DuckDB file open. Default: not at all.",
)  # fmt: skip


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--wait", "wait_seconds", type=Duration(), default=0.0, metavar="DURATION",
    help="Go on looking until every batch is over, for at most this long. Default: look once.",
)  # fmt: skip
@lock_wait
@json_option
@exit_code_option("a batch is still open")
@opens_project
@click.pass_context
def collect(
    context: click.Context, *, options: ProjectOptions, names: tuple[str, ...],
    wait_seconds: float, lock_seconds: float, as_json: bool, use_exit_code: bool,
) -> None:  # fmt: skip
    """Bring home what is done of the batches at the providers.

    Never submits a batch.

    Looks at every open batch that a run of this target submitted, also of models that are gone from
    the project. Answers of ended batches are validated and written into the ledger; batches whose
    creation was interrupted are looked for; what a batch left over whose deadline has come is asked
    online. The next `dbt run` sends what has to be sent again, and builds the tables. Where
    on_complete is declared, it is told once the last answer is there.

    Made for cron. Any number may run at once; on DuckDB, one process at a time has the file.

    \b
    Example:
      batchsql collect --wait 2h && dbt build
    """
    with stopping() as stop:
        until = time.monotonic() + wait_seconds
        pause = FIRST_PAUSE_SECONDS
        total: list[Round] = []
        while True:
            made = with_lock(lock_seconds, lambda: _make_round(options, names, stop), stop)
            if made is None:
                say(NO_LEDGER) if not as_json else print_json({"moved": [], "open": []})
                return
            total.append(made.round)
            if not as_json:
                _print_round(made.round)
            tell(options, made.tellings, lock_seconds, stop)
            is_over = not made.round.open or made.round.errors or time.monotonic() >= until
            if is_over or stop.is_set():
                break
            stop.wait(min(pause, max(0.0, until - time.monotonic())))
            pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)
    last = total[-1]
    if as_json:
        print_json(_document(total))
    if last.errors:
        raise ReadableFailure("\n".join(str(error) for error in last.errors))
    if use_exit_code and last.open:
        context.exit(EXIT_OPEN_WORK)


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--yes", is_flag=True, help="Do not ask.")
@lock_wait
@opens_project
def cancel(
    *, options: ProjectOptions, names: tuple[str, ...], yes: bool, lock_seconds: float
) -> None:
    """Ask the providers to cancel open batches. Never does so before you have said yes.

    What a batch has finished until then is paid for, and is kept where the provider keeps it:
    `batchsql collect` brings it once the cancelling is over. Gemini keeps nothing: its answers are
    lost, and this is said before anything is done. The other requests wait again, so the next
    `dbt run` sends them anew unless the model is changed or disabled.

    \b
    Example:
      batchsql cancel ticket_labels && batchsql collect --wait 15m
    """
    with stopping() as stop:
        lossy = with_lock(lock_seconds, lambda: _read_lossy(options, names, stop), stop)
    if lossy is None:
        say(NO_LEDGER)
        return
    if lossy:
        requests = sum(shard.requests for shard in lossy)
        where = ", ".join(sorted({shard.model.partition("/")[0] for shard in lossy}))
        click.echo(
            f"{where} keeps nothing of a cancelled batch: what "
            f"{number(len(lossy), 'batch', 'batches')} of {number(requests, 'request')} finished "
            "until now is lost, and everything is asked, and perhaps paid, again",
            err=True,
        )
    if not yes:
        which = ", ".join(names) or "all models"
        click.confirm(f"Cancel the open batches of {which}?", abort=True)
    with stopping() as stop:
        made = with_lock(
            lock_seconds, lambda: _make_round(options, names, stop, is_cancel=True), stop
        )
    if made is None:  # dropped while the question was open
        say(NO_LEDGER)
        return
    say(f"asked to cancel {number(len(made.round.moved), 'batch', 'batches')}")
    if made.round.errors:
        raise ReadableFailure("\n".join(str(error) for error in made.round.errors))


@dataclasses.dataclass(frozen=True, slots=True)
class _Made:
    """A round, and what it completed, with whom to tell of that."""

    round: Round
    tellings: list[Telling]


def _make_round(
    options: ProjectOptions, names: Sequence[str], stop: Event, is_cancel: bool = False
) -> _Made | None:
    """Make a round over each ledger; None where there is none."""
    from batchsql.completion import take_tellings

    def act(found: Found, maker: Rounds, enrichments: _Names) -> tuple[Round, list[Telling]]:
        made = (maker.cancel if is_cancel else maker.make)(enrichments)
        return made, take_tellings(found.ledger, found.on_complete)

    made = _visit(options, names, stop, act)
    if made is None:
        return None
    return _Made(_joined([each for each, _ in made]), [one for _, more in made for one in more])


def _read_lossy(
    options: ProjectOptions, names: Sequence[str], stop: Event
) -> list[BatchShard] | None:
    """Return the batches of which a cancelling leaves nothing; None where there is no ledger."""
    found = _visit(options, names, stop, lambda _, maker, names: maker.read_lossy(names))
    return None if found is None else [shard for each in found for shard in each]


def _visit(
    options: ProjectOptions, names: Sequence[str], stop: Event,
    act: Callable[[Found, Rounds, _Names], _T],
) -> list[_T] | None:  # fmt: skip
    """Open the ledgers, do something with each, and close them again."""
    done: list[_T] = []
    with working() as on_step, found_ledgers(options, names) as found:
        if not found:
            return None
        for each in found:
            each.ledger.migrate()
            enrichments = [row.enrichment for row in each.enrichments] if names else None
            maker = _open_rounds(each.ledger, each.root, stop, on_step)
            try:
                done.append(act(each, maker, enrichments))
            finally:
                maker.close()
    return done


def _open_rounds(ledger: Any, root: Any, stop: Event, on_step: Any) -> Rounds:
    from batchsql.backends.registry import open_backend, open_batch_backend
    from batchsql.pricing import open_prices
    from batchsql.rounds import Rounds

    def note(message: str) -> None:
        on_step(message)
        click.echo(message, err=True)

    return Rounds(
        ledger,
        open_batch_backend=lambda model, engine: open_batch_backend(model, engine, root),
        open_backend=lambda model, engine: open_backend(model, engine, root),
        open_prices=open_prices,
        stop=stop, say=note, warn=note,
    )  # fmt: skip


def _joined(rounds: Sequence[Round]) -> Round:
    from batchsql.counting import ShipCounts
    from batchsql.rounds import Round

    return Round(
        tuple(shard for each in rounds for shard in each.moved),
        tuple(shard for each in rounds for shard in each.open),
        tuple(error for each in rounds for error in each.errors),
        sum((each.counts for each in rounds), ShipCounts()),
    )


def tell(
    options: ProjectOptions, tellings: Sequence[Telling], lock_seconds: float, stop: Event
) -> None:
    """Tell of what is complete, while no connection is open: the command may be a dbt run."""
    if not tellings:
        return
    told = [is_told(each, stop) for each in tellings]

    def settle() -> None:
        with found_ledgers(options, ()) as found:
            by_schema = {each.ledger.schema: each.ledger for each in found}
            for each, was_told in zip(tellings, told, strict=True):
                ledger = by_schema[each.schema]
                if was_told:
                    ledger.close_completion(each.completion)
                else:
                    ledger.give_back_completion(each.completion)

    with_lock(max(lock_seconds, 60.0), settle, stop)


def is_told(telling: Telling, stop: Event) -> bool:
    """Tell of what is complete; say why where nobody could be told."""
    from batchsql.completion import NotToldError

    try:
        telling.tell(stop)
    except NotToldError as error:
        click.echo(str(error), err=True)
        return False
    return True


def with_lock(seconds: float, act: Callable[[], Any], stop: Event) -> Any:
    """Do something, waiting as long as asked while another process has the DuckDB file.

    Raises:
        StoppedError: ``stop`` was set while it waited.
    """
    from batchsql.dbt_project import explain_error, is_file_lock
    from batchsql.shipping import StoppedError

    until = time.monotonic() + seconds
    is_said = False
    while True:
        try:
            return act()
        except Exception as error:
            if not is_file_lock(error) or time.monotonic() >= until:
                raise
            if not is_said:
                left = format_seconds(until - time.monotonic())
                click.echo(f"{explain_error(error)}; waiting for at most {left}", err=True)
                is_said = True
        if stop.wait(LOCK_PAUSE_SECONDS):
            raise StoppedError("ended while another process had the file; nothing was done")


@contextlib.contextmanager
def stopping() -> Iterator[Event]:
    """Let Ctrl-C and SIGTERM end a command after the transaction that it is in."""
    stop = Event()
    before = {
        each: signal.signal(each, lambda *_: stop.set()) for each in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number_, handler in before.items():
            signal.signal(number_, handler)


# --- printing -------------------------------------------------------------------------------------


def _print_round(made: Round) -> None:
    counts = made.counts
    if not made.moved and not made.open:
        say("no batch is open")
        return
    if made.moved or counts.tries:
        cost = f", {usd(counts.cost_usd)}" if counts.cost_usd else ""
        say(
            f"collected {len(made.moved):,} of {len(made.moved) + len(made.open):,} batches: "
            f"{number(counts.ok, 'answer')}, "
            f"{number(counts.tries - counts.ok, 'failure')}{cost}"
        )
    if made.open:
        print_table(
            ["open batch", "model", "state", "submitted", ">requests", ">done", ">failed"],
            [
                (each.provider_batch_id or each.shard_id, model_name(each.enrichment),
                 each.provider_state or each.state.value,
                 ago(each.seconds_since_submission or each.age_seconds), each.requests,
                 each.provider_ok, each.provider_failed)
                for each in made.open
            ],
        )  # fmt: skip


def _document(rounds: Sequence[Round]) -> dict[str, Any]:
    def shown(shard: BatchShard) -> dict[str, Any]:
        return {
            "shard_id": shard.shard_id,
            "enrichment": shard.enrichment,
            "model": shard.model,
            "state": shard.state.value,
            "provider_batch_id": shard.provider_batch_id,
            "requests": shard.requests,
            "error": shard.error,
        }

    return {
        "moved": [shown(shard) for each in rounds for shard in each.moved],
        "open": [shown(shard) for shard in rounds[-1].open],
        "errors": [str(error) for error in rounds[-1].errors],
        "counts": dataclasses.asdict(sum((r.counts for r in rounds[1:]), rounds[0].counts)),
    }
