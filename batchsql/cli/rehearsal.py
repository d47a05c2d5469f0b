"""``batchsql emulate``: a server to rehearse on."""

from __future__ import annotations

import contextlib
import errno
import signal
import threading
from typing import Any
from urllib.parse import urlsplit

import click

from batchsql.cli.options import ReadableFailure, reports_errors
from batchsql.cli.screen import number, say
from batchsql.errors import MissingExtraError


def _read_speed(context: click.Context, option: click.Parameter, value: str) -> float:
    try:
        speed = float("inf" if value == "instant" else value)
    except ValueError:
        speed = 0.0
    if not speed > 0:
        raise click.BadParameter(f"got {value!r}; give a number above zero, or instant")
    return speed


def _read_s3(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    if value in (None, "moto"):
        return value
    try:
        parts = urlsplit(value)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_url = False
    if not is_url:
        raise click.BadParameter(f"got {value!r}; give moto, or a URL: http://127.0.0.1:9000")
    return value


@click.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=0,
    help="The port on 127.0.0.1. Default: a free one.",
)
@click.option(
    "--misbehave",
    multiple=True,
    metavar="RULE",
    help="What goes wrong: a rule such as 'rate_limit endpoint=openai.chat count=3', or "
    "a YAML file of rules. May be given several times.",
)
@click.option(
    "--speed",
    default="60",
    show_default=True,
    callback=_read_speed,
    help="How many times as fast as a provider batches are worked off; or instant. "
    "At 1 a batch takes about eleven minutes.",
)
@click.option(
    "--latency",
    type=click.FloatRange(0),
    default=0.0,
    metavar="SECONDS",
    help="How long every reply takes. Default: as fast as it goes.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME",
    help="A model that exists, besides those known. May be given several times.",
)
@click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="PROVIDER.LIMIT=N",
    help="Another limit of a provider, such as openai.batch_requests=10.",
)
@click.option(
    "--s3",
    metavar="URL",
    callback=_read_s3,
    help="Where Bedrock's batch jobs read and write: the address of a server that speaks S3, or "
    "moto to start one here, with the bucket rehearsal. Without it there are no such jobs.",
)
@click.option("--log", is_flag=True, help="Print a line for each request.")
@reports_errors
def emulate(
    *, port: int, misbehave: tuple[str, ...], speed: float, latency: float,
    models: tuple[str, ...], limits: tuple[str, ...], s3: str | None, log: bool,
) -> None:  # fmt: skip
    """Rehearse on a server that speaks the providers' wire formats.

    Serves OpenAI (chat completions, files, batches), Anthropic (messages, message batches), Amazon
    Bedrock (Converse, batch inference jobs) and Google Gemini (generateContent, files, batches) on
    this machine until Ctrl-C. Answers fit the schema that is asked for and mean nothing; requests
    are checked as the provider checks them. What would have been billed is counted.

    Never asks a model, never connects to another machine, never reads your project.

    docs/rehearsal.md tells what can go wrong on demand.

    \b
    Example:
      batchsql emulate --port 8089
      batchsql emulate --misbehave 'refusal every=10' --misbehave night.yml
    """
    try:
        from batchsql.emulate import Emulator
        from batchsql.emulate.limits import read_limits
        from batchsql.emulate.s3 import BUCKET, serve_s3
        from batchsql.emulate.script import read_rules
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"the rehearsal server needs {error.name}: pip install 'batchsql[emulate]'"
        ) from error

    def tell(call: Any) -> None:
        met = "" if call.misbehaviour is None else f"  {call.misbehaviour.value}"
        say(f"{call.operation}  {call.method} {call.path}  {call.status or 'no reply'}{met}")

    rules = [rule for option in misbehave for rule in read_rules(option)]
    known_limits = read_limits(limits)
    stop = threading.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, lambda *_: stop.set())
    with contextlib.ExitStack() as opened:
        s3_endpoint_url = opened.enter_context(serve_s3()) if s3 == "moto" else s3
        emulator = Emulator(
            port=port, rules=rules, speed=speed, latency_seconds=latency, models=models,
            s3_endpoint_url=s3_endpoint_url, on_call=tell if log else None, **known_limits,
        )  # fmt: skip
        try:
            server = opened.enter_context(emulator)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise ReadableFailure(
                f"port {port} is in use; give another --port, or leave it out for a free one"
            ) from error
        say(f"The rehearsal server listens on {server.url}. Nothing is real, nothing is paid.")
        say("Send the providers' SDKs here with:")
        for name, value in server.environment.items():
            say(f"  export {name}={value}")
        if s3 == "moto":
            say(f"The S3 server here holds one bucket, which is empty: s3://{BUCKET}")
        say(f"What would have been billed: curl {server.url}/_emulate/bill")
        say(f"Bring all batches to their end: curl -d '{{\"stage\": \"end\"}}' "
            f"{server.url}/_emulate/advance")  # fmt: skip
        say("Ctrl-C ends it.")
        stop.wait()
    bill = server.bill
    say(
        f"Would have been billed: {number(len(bill.charges), 'answer')}, of which "
        f"{len(bill.charges) - len(bill.by_prompt):,} to a question that was billed before."
    )
