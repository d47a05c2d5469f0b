"""Ask dead letters again, now, with another model or prompt.

First it is planned what would be asked, while the rows and the declaration are at hand; then, once
people have agreed to it, only what is in the plan and still dead is sent. Answers are stored under
the requests' own keys, so the next ``dbt run`` builds them in and sends nothing.
"""

from __future__ import annotations

import hashlib
import json
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson
import pyarrow as pa

from batchsql.asking import OpenPrices
from batchsql.backends import registry
from batchsql.backends.base import Capabilities, StreamBackend
from batchsql.candidate import ITEM_KEY, OUTPUT
from batchsql.collecting import shard_settings
from batchsql.counting import ShipCounts
from batchsql.declare.keys import parse_asked
from batchsql.declare.prompt import Prompt, RenderError
from batchsql.declare.spec import Declaration, parse_template
from batchsql.errors import BatchsqlError, DataError, Mistake, SpecError
from batchsql.judging import Judge
from batchsql.placement import check_egress
from batchsql.plan.cost import Prices, estimate_tokens
from batchsql.runner import EnrichmentRun
from batchsql.shipping import Pace, SendLimit, Shipper, StoppedError, flush_rows
from batchsql.types import Call, Completion, Message, ModelRef, Request, Route
from batchsql.warehouse.base import (
    Column,
    ColumnSql,
    Dialect,
    UnsupportedColumnTypeError,
    column_values,
    quote,
)
from batchsql.warehouse.ledger import Ledger
from batchsql.warehouse.report import DeadLetter, LedgerReport
from batchsql.warehouse.shards import ShardOrder, process_id
from batchsql.warehouse.todo import iter_positions

Say = Callable[[str], None]

RENDER_BATCH_ROWS = 20_000
REASON_DIGITS = 12
"""How many digits of a prompt's SHA-256 the ledger names it by; its text is in the settings."""


@dataclass(frozen=True, slots=True)
class NewPrompt:
    """A prompt to ask with instead of the declared one. ``sha256`` is that of the file's bytes."""

    label: str
    template: str
    prompt: Prompt
    sha256: str


def read_new_prompt(label: str, content: bytes) -> NewPrompt:
    """Return the prompt in a file.

    Raises:
        SpecError: it is not UTF-8, does not parse, or refers to no column.
    """
    where = f"prompt {label}"
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        mistake = Mistake(where, "is not UTF-8 text; save it as UTF-8")
        raise SpecError("replay", [mistake]) from error
    template, prompt, mistakes = parse_template(text, where)
    if mistakes or prompt is None:
        raise SpecError("replay", mistakes)
    return NewPrompt(label, template, prompt, hashlib.sha256(content).hexdigest())


@dataclass(frozen=True, slots=True)
class Instead:
    """What dead letters are asked with; None leaves it as it was declared.

    Another model is asked without the declared engine options, which are of the declared provider;
    the declared parameters stay unless others are given.
    """

    model: ModelRef | None = None
    params: Mapping[str, Any] | None = None
    engine: Mapping[str, Any] | None = None
    prompt: NewPrompt | None = None

    @property
    def reason(self) -> str:
        """What the ledger says of the shards that are sent."""
        parts = []
        if self.model is not None:
            parts.append(f"model {self.model}")
        if self.prompt is not None:
            digits = self.prompt.sha256[:REASON_DIGITS]
            parts.append(f"prompt {self.prompt.label} (sha256 {digits})")
        return f"replay with {' and '.join(parts)}"

    def lay_over(self, declared: Declaration) -> Declaration:
        """Return a declaration with what is given here in its place.

        Raises:
            SpecError: the provider is unknown, or refuses a parameter or engine option.
            SystemicError: the rows may not leave, and the model would be asked outside.
        """
        laid = declared
        if self.model is not None:
            # Declared prices are those of the declared model.
            laid = replace(laid, model=self.model, engine={}, prices=None)
        if self.params is not None:
            laid = replace(laid, params=self.params)
        if self.engine is not None:
            laid = replace(laid, engine=self.engine)
        mistakes = registry.check_model(laid.model, laid.params, laid.engine)
        if mistakes:
            raise SpecError(f"{declared.subject}, replayed with {laid.model}", mistakes)
        check_egress(laid)
        return laid


@dataclass(frozen=True, slots=True)
class DeadSpec:
    """Dead letters of one spec, and those of the enrichments using it that were asked for."""

    ledger_schema: str
    spec_version: str
    enrichments: tuple[str, ...]
    dead: tuple[DeadLetter, ...]


@dataclass(frozen=True, slots=True)
class Replay:
    """Dead letters of one spec, ready to be asked again.

    ``messages`` are those to send instead of the ledger's, by request key; None sends the ledger's
    own. ``declaration`` is what they are asked with; the limit and route in it play no part.
    """

    ledger_schema: str
    enrichment: str
    spec_version: str
    declaration: Declaration
    reason: str
    keys: tuple[str, ...]
    text_bytes: int
    prefix_messages: int
    messages: Mapping[str, tuple[Message, ...]] | None = None
    template: str | None = None

    @property
    def route(self) -> Route:
        """How these requests travel; never in batches."""
        return Route.ENGINE if registry.is_engine(self.declaration.model) else Route.ONLINE

    def estimate_usd(self, prices: Prices) -> float | None:
        """Return what one try of each costs at most, or None where no price is known.

        The input is counted roughly, the output as long as ``max_tokens`` allows.
        """
        count = len(self.keys)
        tokens = count * self.declaration.max_tokens
        return prices.estimate_usd(self.route, count, estimate_tokens(self.text_bytes), tokens)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of a replay: how many requests it took on, and what was sent for them."""

    requests: int
    counts: ShipCounts


# --- planning -------------------------------------------------------------------------------------


def plan_stored(
    ledger: Ledger, enrichment: str, spec_version: str, declared: Declaration,
    dead: Sequence[DeadLetter], instead: Instead,
) -> Replay:  # fmt: skip
    """Plan to ask dead letters of a spec as they stand in the ledger.

    Outputs and parameters are those of the spec, which may be older than the declaration.

    Raises:
        SpecError: the provider is unknown, or refuses a parameter or engine option.
        SystemicError: the rows may not leave, and the model would be asked outside.
    """
    spec = ledger.read_spec(spec_version)
    returns = parse_asked(orjson.loads(spec.returns))
    as_asked = replace(declared, returns=returns, params=orjson.loads(spec.params))
    prefix_bytes = len(spec.prefix.encode())
    return Replay(
        ledger_schema=ledger.schema,
        enrichment=enrichment,
        spec_version=spec_version,
        declaration=instead.lay_over(as_asked),
        reason=instead.reason,
        keys=tuple(each.request_key for each in dead),
        text_bytes=sum(each.text_bytes + prefix_bytes for each in dead),
        prefix_messages=len(orjson.loads(spec.prefix)),
    )


def plan_rendered(run: EnrichmentRun, new: NewPrompt, instead: Instead, keys: set[str]) -> Replay:
    """Plan to ask dead letters with another prompt, rendered from the rows as they are now.

    Where several rows share a request, the one with the lowest item key is rendered for all.

    Args:
        run: a run whose candidate is there and whose items are recorded.
        new: the prompt.
        instead: what else differs.
        keys: the dead letters; those that no row of the candidate asks are left out.

    Raises:
        SpecError: the prompt does not fit the columns, or the model not the parameters.
        SystemicError: the rows may not leave, and the model would be asked outside.
        DataError: the prompt cannot be rendered for a row.
    """
    declaration = instead.lay_over(run.declaration)
    columns = {column.name: column for column in run.candidate.columns}
    try:
        bound = new.prompt.bind(sorted(columns), declaration.normalize)
    except BatchsqlError as error:
        mistake = Mistake(f"prompt {new.label}", str(error))
        raise SpecError(declaration.subject, [mistake]) from error
    inputs = _inputs(declaration.subject, bound.inputs, columns, run.context.dialect)
    messages = {}
    for batch in run.context.source.stream(_rows_sql(run, inputs), RENDER_BATCH_ROWS):
        found = batch.column(0).to_pylist()
        values = [column_values(batch.column(1 + n), each.form) for n, each in enumerate(inputs)]
        for key, row in zip(found, zip(*values, strict=True), strict=True):
            request_key = key.replace("-", "")
            if request_key not in keys:
                continue
            try:
                messages[request_key] = bound.render(row)
            except RenderError as error:
                raise DataError(
                    f"{declaration.subject}: the prompt {new.label} cannot be rendered for the "
                    f"row of the request {request_key}: {error}; nothing was sent"
                ) from error
    texts = (message.content for each in messages.values() for message in each)
    return Replay(
        ledger_schema=run.context.ledger.schema,
        enrichment=run.context.enrichment,
        spec_version=run.spec_version,
        declaration=declaration,
        reason=instead.reason,
        keys=tuple(sorted(messages)),
        text_bytes=sum(len(text.encode()) for text in texts),
        prefix_messages=len(bound.prefix),
        messages=messages,
        template=new.template,
    )


def _inputs(
    subject: str, names: Sequence[str], columns: Mapping[str, Column], dialect: Dialect
) -> list[ColumnSql]:
    inputs, mistakes = [], []
    for name in names:
        try:
            inputs.append(dialect.input_sql(columns[name]))
        except UnsupportedColumnTypeError as error:
            mistakes.append(Mistake(f"column {name}", str(error)))
    if mistakes:
        raise SpecError(subject, mistakes)
    return inputs


def _rows_sql(run: EnrichmentRun, inputs: Sequence[ColumnSql]) -> str:
    """Select one row for each dead letter among the candidate's: its key and the prompt's inputs.

    Names of our own only, since the inputs name the user's columns without a prefix.
    """
    names = run.context.ledger.relation
    text = "varchar" if run.context.dialect.name == "duckdb" else "text"
    values = "".join(
        f", {each.value} as {quote(f'__batchsql_i{n}', run.context.dialect.name)}"
        for n, each in enumerate(inputs)
    )
    shown = "".join(f", __batchsql_i{n}" for n in range(len(inputs)))
    return (
        f"select __batchsql_dead::{text}{shown} from (select __batchsql_dead{values}, "
        f"row_number() over (partition by __batchsql_dead order by {ITEM_KEY}) as __batchsql_place "
        f"from {run.candidate.name} join (select item_key as __batchsql_item, request_key as "
        f"__batchsql_dead from {names('items')} where request_key in "
        f"(select request_key from {names('dead_letters')})) k on __batchsql_item = {ITEM_KEY} "
        f"where {OUTPUT} is null) q where __batchsql_place = 1"
    )


# --- asking ---------------------------------------------------------------------------------------


def ask_again(
    replay: Replay, ledger: Ledger, backend: StreamBackend, open_prices: OpenPrices,
    *, stop: threading.Event, say: Say, warn: Say,
) -> Replayed:  # fmt: skip
    """Give what is still dead of a plan a new budget, and spend it at once.

    What could not be asked, since the backend refused everything or ``stop`` was set, is dead again
    afterwards. If the process dies on the way, the rest keeps its new budget, and the next run
    asks it as declared.

    Raises:
        SystemicError: the backend refuses everything; what was answered before is kept.
        StoppedError: ``stop`` was set; what was answered before is kept.
    """
    declaration = replay.declaration
    report = LedgerReport(ledger)
    run_id = str(uuid.uuid4())
    ledger.load_todo(iter_positions(_listed(replay.keys)))
    requests = report.replay_listed(run_id)
    pace = Pace(
        declaration.subject, flush_rows(declaration.flush_rows, backend), declaration.flush_seconds,
        declaration.lease_seconds,
    )  # fmt: skip
    shipper = Shipper(
        pace, ledger,
        backend if replay.messages is None else _Reworded(backend, replay.messages),
        order=ShardOrder(
            run_id=run_id, owner=f"{process_id()}:{run_id}", enrichment=replay.enrichment,
            spec_version=replay.spec_version, backend=declaration.model.provider,
            model=str(declaration.model), lease_seconds=pace.lease_seconds, route=replay.route,
            route_reason=replay.reason, settings=_settings(replay),
        ),
        call=Call(
            model=declaration.model, params=declaration.params,
            schema=declaration.returns.object_schema(), max_tokens=declaration.max_tokens,
            prefix_messages=replay.prefix_messages,
        ),
        judge=Judge(
            declaration.returns, declaration.max_attempts, replay.route, backend.version,
            open_prices(declaration.model, declaration.prices, None),
        ),
        limit=SendLimit(None), lane=None, stop=stop, say=say, warn=warn,
    )  # fmt: skip
    try:
        shipper.ship()
    except BaseException as error:
        dead_again = report.take_back_replay(run_id)
        waiting = ledger.trim_todo()
        said = f"{shipper.counts.ok:,} answers are kept, {dead_again:,} dead letters stay dead"
        if waiting:
            said += f", {waiting:,} wait for the next dbt run"
        if isinstance(error, StoppedError):
            raise StoppedError(f"{declaration.subject}: stopped; {said}") from error
        warn(f"{declaration.subject}: {said}")
        raise
    return Replayed(requests, shipper.counts)


def _listed(keys: Sequence[str]) -> Iterator[pa.RecordBatch]:
    columns = [pa.array(keys, pa.string()), pa.array([False] * len(keys), pa.bool_())]
    yield pa.RecordBatch.from_arrays(columns, ["request_key", "is_urgent"])


def _settings(replay: Replay) -> str:
    """Return what the shards keep of the plan, its parameters and a new prompt's text too."""
    settings = json.loads(shard_settings(replay.declaration))
    settings["params"] = dict(replay.declaration.params)
    if replay.template is not None:
        settings["prompt"] = replay.template
    return json.dumps(settings, sort_keys=True)


class _Reworded:
    """A backend that is asked with other messages than those the ledger keeps."""

    def __init__(self, backend: StreamBackend, messages: Mapping[str, tuple[Message, ...]]) -> None:
        self._backend = backend
        self._messages = messages

    @property
    def capabilities(self) -> Capabilities:
        return self._backend.capabilities

    @property
    def version(self) -> str:
        return self._backend.version

    def identity(self) -> Mapping[str, Any]:
        return self._backend.identity()

    def complete(
        self, requests: Iterator[Request], call: Call, stop: threading.Event
    ) -> Iterator[Completion | None]:
        reworded = (Request(r.request_key, self._messages[r.request_key]) for r in requests)
        return self._backend.complete(reworded, call, stop)
