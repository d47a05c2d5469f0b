"""``batchsql replay``: dead letters once more, at the next dbt run or now and asked differently."""

from __future__ import annotations

import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml  # type: ignore[import-untyped]

from batchsql.cli.batches import stopping
from batchsql.cli.ledger import NO_LEDGER, found_ledgers, model_name
from batchsql.cli.options import json_option, opens_project
from batchsql.cli.screen import number, print_json, say, usd, working
from batchsql.types import ModelRef, Outcome

if TYPE_CHECKING:
    from batchsql.cli.ledger import Found
    from batchsql.dbt_project import ProjectOptions
    from batchsql.replaying import DeadSpec, Instead, Replay, Replayed

# Causes of death, in the order of the types; the others are no failures of a request.
_CAUSES = [each.value for each in Outcome if each.is_item_failure or each is Outcome.TRANSIENT]


class _Model(click.ParamType):  # type: ignore[type-arg]
    name = "model"

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> ModelRef:
        provider, _, model = str(value).partition("/")
        if not (provider and model):
            self.fail(f"got {value!r}; write provider/name", param, context)
        return ModelRef(provider, model)


class _Mapping(click.ParamType):  # type: ignore[type-arg]
    name = "mapping"

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> Mapping[str, Any]:
        try:
            content = yaml.safe_load(value)
        except yaml.YAMLError as error:
            self.fail(f"is not YAML: {error}", param, context)
        if not isinstance(content, dict):
            self.fail("give a mapping such as '{temperature: 0}'", param, context)
        return {str(key): item for key, item in content.items()}


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--cause", type=click.Choice(_CAUSES), help="Only those whose last try ended so.")
@click.option("--model", type=_Model(), metavar="PROVIDER/NAME",
              help="Ask this model, now, instead of the declared one.")  # fmt: skip
@click.option("--prompt", "prompt_file", metavar="FILE",
              type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Ask with this prompt, now, instead of the declared one.")  # fmt: skip
@click.option("--params", type=_Mapping(), metavar="YAML",
              help="Parameters in place of all those declared.")  # fmt: skip
@click.option("--engine", type=_Mapping(), metavar="YAML",
              help="Engine options, such as base_url. Default: none with --model, else the "
              "declared ones.")  # fmt: skip
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@json_option
@opens_project
def replay(
    *, options: ProjectOptions, names: tuple[str, ...], cause: str | None, model: ModelRef | None,
    prompt_file: Path | None, params: Mapping[str, Any] | None, engine: Mapping[str, Any] | None,
    yes: bool, as_json: bool,
) -> None:  # fmt: skip
    """Give dead letters a new budget of tries.

    The next `dbt run` of their models sends these requests, and pays for them, again. With --model
    or --prompt they are asked now instead, by that model or with that prompt, one by one and not in
    a batch; the answers count as those of the declaration, and the next `dbt run` builds them into
    the table. NAME is the name of a dbt model. Models with the same declaration share their
    requests.

    Asks first, unless --yes is given. Never touches an answer or a request that may still get one.
    Never sends a request itself without --model or --prompt.

    \b
    Example:
      batchsql replay ticket_labels --cause truncated
      batchsql replay ticket_labels --model anthropic/claude-sonnet-4-5
    """
    if model is None and prompt_file is None:
        if params is not None or engine is not None:
            raise click.UsageError("--params and --engine go with --model or --prompt")
        _replay_later(options, names, cause, yes, as_json)
        return
    from batchsql.replaying import Instead, read_new_prompt

    new = None
    if prompt_file is not None:
        new = read_new_prompt(str(prompt_file), prompt_file.read_bytes())
    _replay_now(options, names, cause, Instead(model, params, engine, new), yes, as_json)


def _is_interactive() -> bool:
    return sys.stdin.isatty()


def _none_dead(cause: str | None) -> str:
    return "no dead letters" + (f" with the cause {cause}" if cause else "")


def _by_cause(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {outcome}" for outcome, count in counts.items())


# --- at the next run ------------------------------------------------------------------------------


def _replay_later(
    options: ProjectOptions, names: Sequence[str], cause: str | None, yes: bool, as_json: bool
) -> None:
    with found_ledgers(options, names) as found:
        counts: dict[str, int] = {}
        for each in found:
            for outcome, count in each.report.count_dead_letters(each.spec_versions).items():
                if cause in (None, outcome):
                    counts[outcome] = counts.get(outcome, 0) + count
        has_ledger = bool(found)
    total = sum(counts.values())
    replayed = 0
    if total and not yes:
        _ask_to_replay(total, counts)
    if total:
        # Opened anew: while people think, nobody is kept from the warehouse.
        with found_ledgers(options, names) as found:
            replayed = sum(
                each.report.replay(str(uuid.uuid4()), each.spec_versions, cause) for each in found
            )
    if as_json:
        print_json({"replayed": replayed, "by_cause": counts})
    elif not has_ledger:
        say(NO_LEDGER)
    elif not replayed:
        say(_none_dead(cause))
    else:
        say(f"{number(replayed, 'dead letter')} may be tried again; the next dbt run sends them")


def _ask_to_replay(total: int, counts: Mapping[str, int]) -> None:
    if not _is_interactive():
        raise click.UsageError(
            f"{number(total, 'request')} would be sent and paid for again by the next dbt run, "
            "and there is no terminal to ask on; give --yes"
        )
    click.confirm(
        f"{number(total, 'dead letter')} ({_by_cause(counts)}) would get a new budget; the next "
        "dbt run sends and pays for them again. Go on?",
        abort=True, err=True,
    )  # fmt: skip


# --- now ------------------------------------------------------------------------------------------


def _replay_now(
    options: ProjectOptions, names: Sequence[str], cause: str | None, instead: Instead, yes: bool,
    as_json: bool,
) -> None:  # fmt: skip
    with working() as on_step:
        has_ledger, specs, plans = _plan(options, names, cause, instead, on_step)
    outcomes = {each.request_key: each.outcome for spec in specs for each in spec.dead}
    counts = Counter(outcomes[key] for plan in plans for key in plan.keys)
    left = sum(len(spec.dead) for spec in specs) - counts.total()
    estimate = _estimate_usd(plans)
    made: list[Replayed] = []
    if plans:
        if not yes:
            _ask_to_send(plans, counts, left, estimate)
        with stopping() as stop, working() as on_step:
            made = _send(options, names, plans, stop, on_step)
    if as_json:
        print_json(_document(made, counts, left, estimate))
    elif not has_ledger:
        say(NO_LEDGER)
    else:
        _print_replayed(made, left, cause)


def _plan(
    options: ProjectOptions, names: Sequence[str], cause: str | None, instead: Instead,
    on_step: Callable[[str], None],
) -> tuple[bool, list[DeadSpec], list[Replay]]:  # fmt: skip
    """Return whether there is a ledger, what is dead, and what would be sent."""
    with found_ledgers(options, names) as found:
        pairs = [(each, spec) for each in found for spec in _dead_specs(each, cause)]
        specs = [spec for _, spec in pairs]
        if instead.prompt is None:
            plans = [each.project.plan_stored(each.ledger, spec, instead) for each, spec in pairs]
            return bool(found), specs, [plan for plan in plans if plan is not None]
        has_ledger = bool(found)
    if not specs:
        return has_ledger, [], []
    from batchsql.dbt_project import render_dead_letters

    return (
        has_ledger,
        specs,
        render_dead_letters(options, specs, instead.prompt, instead, on_step),
    )


def _dead_specs(found: Found, cause: str | None) -> Iterable[DeadSpec]:
    from batchsql.replaying import DeadSpec

    for version in found.spec_versions:
        dead = found.report.read_dead_letters(version, cause)
        using = [row.enrichment for row in found.enrichments if row.spec_version == version]
        if dead:
            yield DeadSpec(found.ledger.schema, version, tuple(using), tuple(dead))


def _estimate_usd(plans: Sequence[Replay]) -> float | None:
    """Return what one try of each request costs at most, or None where a price is not known."""
    from datetime import datetime, timezone

    from batchsql.plan.cost import price_book

    total = 0.0
    for each in plans:
        declaration = each.declaration
        at = datetime.now(timezone.utc)
        cost = each.estimate_usd(price_book(declaration.model, declaration.prices, at=at))
        if cost is None:
            return None
        total += cost
    return total


def _ask_to_send(
    plans: Sequence[Replay], counts: Mapping[str, int], left: int, estimate: float | None
) -> None:
    total = sum(counts.values())
    models = ", ".join(sorted({model_name(each.enrichment) for each in plans}))
    asked = ", ".join(sorted({str(each.declaration.model) for each in plans}))
    cost = "at a price that is not known"
    if estimate is not None:
        cost = f"for at most about {usd(estimate)}, if one try of each is enough"
    question = (
        f"{number(total, 'dead letter')} of {models} ({_by_cause(counts)}) would be sent to "
        f"{asked} now, {cost}."
    )
    if left:
        question += f" {_left(left)}."
    if not _is_interactive():
        raise click.UsageError(f"{question} There is no terminal to ask on; give --yes")
    click.confirm(f"{question} Go on?", abort=True, err=True)


def _left(count: int) -> str:
    return (
        f"{number(count, 'dead letter')} cannot be asked: the row or the model is gone, or the "
        "declaration has changed since"
    )


def _send(
    options: ProjectOptions, names: Sequence[str], plans: Sequence[Replay], stop: Any,
    on_step: Callable[[str], None],
) -> list[Replayed]:  # fmt: skip
    """Send what was planned, over connections opened anew since people may have thought long."""
    from batchsql.backends.registry import open_backend
    from batchsql.pricing import open_prices
    from batchsql.replaying import ask_again

    def note(message: str) -> None:
        on_step(message)
        click.echo(message, err=True)

    made = []
    with found_ledgers(options, names) as found:
        ledgers = {each.ledger.schema: each for each in found}
        for plan in plans:
            each = ledgers[plan.ledger_schema]
            each.ledger.migrate()
            declaration = plan.declaration
            note(
                f"{declaration.subject}: {number(len(plan.keys), 'dead letter')} to "
                f"{declaration.model}"
            )
            backend = open_backend(declaration.model, declaration.engine, each.root)
            made.append(
                ask_again(plan, each.ledger, backend, open_prices, stop=stop, say=note, warn=note)
            )
    return made


def _document(
    made: Sequence[Replayed], counts: Mapping[str, int], left: int, estimate: float | None
) -> dict[str, Any]:
    return {
        "replayed": sum(each.requests for each in made),
        "by_cause": dict(counts),
        "answered": sum(each.counts.ok for each in made),
        "failed": sum(each.counts.given_up for each in made),
        "left": left,
        "cost_usd": sum(each.counts.cost_usd for each in made),
        "estimated_usd": estimate,
    }


def _print_replayed(made: Sequence[Replayed], left: int, cause: str | None) -> None:
    answered = sum(each.counts.ok for each in made)
    failed = sum(each.counts.given_up for each in made)
    cost = sum(each.counts.cost_usd for each in made)
    if made:
        paid = f", {usd(cost)}" if cost else ""
        say(
            f"{number(answered, 'dead letter')} answered, {failed:,} failed again{paid}; the next "
            "dbt run builds the answers into the table"
        )
    if left:
        say(_left(left))
    if not made and not left:
        say(_none_dead(cause))
