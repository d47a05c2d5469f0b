"""``batchsql plan``: what a run would send."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from batchsql.cli.options import (
    EXIT_OPEN_WORK,
    ReadableFailure,
    exit_code_option,
    json_option,
    opens_project,
)
from batchsql.cli.screen import number, print_json, print_table, say, working

if TYPE_CHECKING:
    from batchsql.dbt_project import ModelPlan, ProjectOptions


@click.command()
@click.option("--select", "-s", metavar="SELECTOR",
              help="dbt's selection syntax; only llm models count. Default: all.")  # fmt: skip
@json_option
@exit_code_option("a run would send something")
@opens_project
@click.pass_context
def plan(
    context: click.Context, *, options: ProjectOptions, select: str | None, as_json: bool,
    use_exit_code: bool,
) -> None:  # fmt: skip
    """Show what `dbt run` would send to the models now.

    Compiles the selected llm models, evaluates their rows in the warehouse and compares them with
    the ledger. What is new is recorded there (its keys and its rendered requests), so that the run
    does not repeat the work.

    Never sends a request, never builds or changes a table of yours. Hooks are not run. The tables
    that a model selects from have to be there.

    \b
    Example:
      batchsql plan --select ticket_labels
    """
    from batchsql.dbt_project import plan_models

    with working() as on_step:
        plans = plan_models(options, select, on_step)
    if as_json:
        print_json({"models": [_plan_document(each) for each in plans]})
    else:
        _print_plans(plans)
    failed = [each for each in plans if each.error is not None]
    if failed:
        raise ReadableFailure("\n".join(str(each.error) for each in failed))
    if use_exit_code and any(each.to_send for each in plans):
        context.exit(EXIT_OPEN_WORK)


def _plan_document(plan: ModelPlan) -> Mapping[str, object]:
    return {**dataclasses.asdict(plan), "to_send": plan.to_send}


def _print_plans(plans: Sequence[ModelPlan]) -> None:
    good = [each for each in plans if each.error is None]
    if not plans:
        say("no llm model is selected")
    if not good:
        return
    print_table(
        ["model", "answered by", ">rows", ">reused", ">new", ">duplicates", ">failed", ">requests",
         ">to send"],
        [
            (each.name, each.model, each.rows, each.reused, each.new, each.duplicates, each.failed,
             each.requests, each.to_send)
            for each in good
        ],
    )  # fmt: skip
    for each in good:
        for note in _plan_notes(each):
            say(f"{each.name}: {note}")
    total = sum(each.to_send for each in good)
    say(f"A run would send {number(total, 'request')}. Nothing was sent.")


def _plan_notes(plan: ModelPlan) -> Iterator[str]:
    if plan.limit is not None and plan.requests - plan.borrowable > plan.limit:
        left = plan.requests - plan.borrowable - plan.limit
        yield f"limit {plan.limit:,} holds; {number(left, 'request')} would stay pending"
    if plan.borrowable:
        yield f"{number(plan.borrowable, 'answer')} would be copied from the ledgers in read_from"
    if plan.in_batches:
        yield (
            f"{number(plan.in_batches, 'request')} are in batches at the provider already "
            "(batchsql collect brings their answers)"
        )
    if plan.in_progress:
        yield (
            f"{number(plan.in_progress, 'request')} of these are claimed by another run, which "
            "sends them unless it has died"
        )
    if plan.failed:
        yield (
            f"{number(plan.failed, 'row')} with dead letters stay unanswered "
            f"(batchsql failed {plan.name} says why)"
        )
    yield from plan.warnings
