"""Projects and lean runs whose batches go to the rehearsal server, and what can be asked of them.

A provider is data: to test another one, add it to ``PROVIDERS``.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from batchsql.backends import registry
from batchsql.emulate import BedrockLimits, Behaviour, Emulator, Rule
from batchsql.emulate.timeline import Durations
from batchsql.pricing import open_prices
from batchsql.rounds import Round, Rounds
from batchsql.runner import Counts
from batchsql.types import ModelRef
from batchsql.warehouse.ledger import Ledger
from tests.support import lean
from tests.support.project import Project, Target

KEY = "sk-rehearsal-0123456789"
KEY_ENV = "REHEARSAL_API_KEY"
BUCKET = "rows-of-mine"

PATIENT = Durations(validating=0, processing=600, finalizing=0, cancelling=0)
"""Batches are worked on until the test says that they are done; the rest takes no time."""

INSTANT = Durations(validating=0, processing=0, finalizing=0, cancelling=0)

PRICES = {"input": 2.0, "output": 8.0}
"""USD per million tokens. In a batch everything costs half."""


@dataclass(frozen=True)
class Provider:
    """A provider: a model, and what the rehearsal server calls its operations."""

    model: str
    extra: str
    create: str
    poll: str
    fetch: str
    ask: str
    least: int = 1
    """The fewest requests that it takes in a batch."""

    @property
    def name(self) -> str:
        return self.model.partition("/")[0]

    def engine(self, emulator: Emulator) -> dict[str, Any]:
        """Return the engine options that lead to the rehearsal server."""
        if self.name == "bedrock":
            return {
                "region": "us-east-1",
                "base_url": emulator.bedrock_base_url,
                "s3_endpoint_url": emulator.environment["AWS_ENDPOINT_URL_S3"],
                "credentials": "environment",
                "s3_uri": f"s3://{BUCKET}/batches",
                "role_arn": "arn:aws:iam::123456789012:role/batch",
            }
        return {
            "base_url": getattr(emulator, f"{self.name}_base_url"),
            "api_key_env": KEY_ENV,
        }


OPENAI = Provider(
    "openai/gpt-5-mini", "openai", "openai.batches.create", "openai.batches.retrieve",
    "openai.files.content", "openai.chat",
)  # fmt: skip
ANTHROPIC = Provider(
    "anthropic/claude-haiku-4-5", "anthropic", "anthropic.batches.create",
    "anthropic.batches.retrieve", "anthropic.batches.results", "anthropic.messages",
)  # fmt: skip
GOOGLE = Provider(
    "google/gemini-2.5-flash", "google.genai", "google.batches.create", "google.batches.get",
    "google.batches.get", "google.generate",
)  # fmt: skip
BEDROCK = Provider(
    "bedrock/us.anthropic.claude-haiku-4-5-20251001-v1:0", "boto3", "bedrock.batches.create",
    "bedrock.batches.retrieve", "bedrock.batches.retrieve", "bedrock.converse", least=100,
)  # fmt: skip
PROVIDERS = (OPENAI, ANTHROPIC, GOOGLE, BEDROCK)


@contextmanager
def rehearsal(
    provider: Provider, *rules: Rule, durations: Durations = PATIENT, **more: Any
) -> Iterator[Emulator]:
    """Start the rehearsal server; for Bedrock with the S3 server that its batches need."""
    if provider.name != "bedrock":
        with Emulator(rules=rules, durations=durations, **more) as emulator:
            yield emulator
        return
    import boto3

    from batchsql.emulate.s3 import serve_s3

    with serve_s3() as s3_url:
        boto3.client("s3", endpoint_url=s3_url, region_name="us-east-1").create_bucket(
            Bucket=BUCKET
        )
        more.setdefault("bedrock", BedrockLimits(batch_minimum=provider.least))
        with Emulator(rules=rules, durations=durations, s3_endpoint_url=s3_url, **more) as emulator:
            yield emulator


def declare(
    project: Project,
    provider: Provider,
    emulator: Emulator,
    name: str = "labels",
    select: str = "select * from {{ ref('tickets') }}",
    **llm: Any,
) -> None:
    """Write a model whose requests go in batches, however few they are."""
    declaration = {
        "model": provider.model,
        "prompt": "prompts/label.md",
        "returns": lean.RETURNS,
        "online_up_to": 0,
        "prices": PRICES,
        "engine": provider.engine(emulator),
        **llm,
    }
    config = f"materialized='llm', unique_key='id', meta={ {'llm': declaration}!r}"
    project.write(f"models/{name}.sql", f"{{{{ config({config}) }}}}\n{select}\n")


def statuses(target: Target, name: str = "labels") -> dict[str, int]:
    """Return how many rows of a built table have which ``llm_status``."""
    found = target.query(f"select llm_status, count(*) from {{schema}}.{name} group by 1")
    return {str(status): int(count) for status, count in found}


def outcomes(target: Target) -> dict[str, int]:
    """Return how many tries in the ledger ended how."""
    return dict(target.query("select outcome, count(*) from {ledger}.attempts group by 1"))


def shards(target: Target, columns: str = "state") -> list[Any]:
    """Return a column of the batches' shards, or several, in the order of their making."""
    found = target.query(
        f"select {columns} from {{ledger}}.shards where route = 'batch' order by created_at"
    )
    return [row[0] if len(row) == 1 else row for row in found]


def age(target: Target, hours: float) -> None:
    """Let time pass for the batches in the ledger: it goes by the warehouse's clock."""
    moments = (
        "created_at", "intent_at", "intent_expires_at", "submitted_at", "checked_at", "ended_at",
        "deadline_at", "results_until",
    )  # fmt: skip
    moved = ", ".join(f"{each} = {each} - interval '{hours * 3600} seconds'" for each in moments)
    target.query(f"update {{ledger}}.shards set {moved}")
    # Of what is queued for no worker, the position is a deadline.
    target.query(
        f"update {{ledger}}.queued set position = position - {round(hours * 3600)} "
        "where enrichment not in (select enrichment from {ledger}.queues)"
    )


def billed_usd(emulator: Emulator, *, batch: float = 0.5) -> float:
    """Return what the bill comes to at ``PRICES``."""
    shares = {"batch": batch, "online": 1.0}
    return sum(
        shares[each.route]
        * (each.input_tokens * PRICES["input"] + each.output_tokens * PRICES["output"])
        / 1_000_000
        for each in emulator.bill.charges
    )


@dataclass
class Nights:
    """Lean runs of one model against a rehearsal server, night after night, on DuckDB or another.

    ``said`` holds what was told, warnings included, since the last ``forget``.
    """

    target: Target
    provider: Provider
    emulator: Emulator
    bodies: Sequence[str]
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = "labels"
    said: list[str] = field(default_factory=list)

    @property
    def job(self) -> lean.Job:
        return lean.Job(
            self.target, "", self.bodies, name=self.name, model=self.provider.model,
            engine=self.provider.engine(self.emulator),
            options={"online_up_to": 0, "prices": PRICES, **self.options},
        )  # fmt: skip

    def run(self, **changes: Any) -> Counts:
        """Run the model, as ``dbt run`` does."""
        return lean.run_job(replace(self.job, **changes), say=self.said.append)

    def collect(self, *, is_cancel: bool = False) -> Round:
        """Make a round over the open batches, as ``batchsql collect`` or ``cancel`` does."""
        with lean.connect(self.job) as (_, warehouse, _, _):
            rounds = Rounds(
                Ledger(warehouse, self.target.ledger),
                open_batch_backend=open_batch_backend, open_backend=_open_backend,
                open_prices=open_prices, stop=threading.Event(),
                say=self.said.append, warn=self.said.append,
            )  # fmt: skip
            try:
                return rounds.cancel() if is_cancel else rounds.make()
            finally:
                rounds.close()

    def night(self, **changes: Any) -> Counts:
        """Run the model, let its batches end, and run it again."""
        self.run(**changes)
        self.emulator.finish()
        return self.run(**changes)

    @property
    def rows(self) -> dict[str, int]:
        return statuses(self.target, self.name)

    @property
    def outcomes(self) -> dict[str, int]:
        return outcomes(self.target)

    @property
    def shards(self) -> list[str]:
        return shards(self.target)

    @property
    def claims(self) -> int:
        return int(self.target.one("select count(*) from {ledger}.claims"))

    @property
    def dead(self) -> dict[str, int]:
        """How many dead letters there are, by the outcome that each died of."""
        sql = "select outcome, count(*) from {ledger}.dead_letters group by 1"
        return dict(self.target.query(sql))

    @property
    def billed(self) -> int:
        return len(self.emulator.bill.charges)

    @property
    def times_billed(self) -> dict[int, int]:
        """How many questions were billed how often."""
        return dict(Counter(self.emulator.bill.by_prompt.values()))

    @property
    def calls(self) -> Counter[str]:
        """How often each operation was asked for."""
        return Counter(each.operation for each in self.emulator.calls)

    def heard(self, text: str) -> bool:
        """Return whether something told holds a text."""
        return any(text in each for each in self.said)


def _open_backend(model: ModelRef, engine: Mapping[str, Any]) -> Any:
    return registry.open_backend(model, engine, Path())


open_batch_backend: Callable[..., Any] = lean._open_batch_backend


def rule(behaviour: Behaviour | str, **conditions: Any) -> Rule:
    """Return a rule of the rehearsal server."""
    return Rule(behaviour=Behaviour(behaviour), **conditions)
