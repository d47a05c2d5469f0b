"""Lean runs whose provider is the rehearsal server: real SDKs, a real bill, processes that die.

The server runs in the test's process and lives on when a run is killed, as a provider does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from batchsql import batches, dispatch
from batchsql.backends import (
    anthropic_batch,
    bedrock_batch,
    google_batch,
    openai_batch,
    registry,
)
from batchsql.backends.batch import BatchBackend
from batchsql.emulate import BedrockLimits, Durations, Emulator
from batchsql.types import ModelRef
from tests.support import points
from tests.support.lean import Job, run_job
from tests.support.project import Target

INSTANT = Durations(0, 0, 0, 0)
SETTLED_SECONDS = 360
"""Longer than any provider's time to settle, shorter than clocks may differ."""

_BUCKET = "rows-of-mine"
_OPEN = "('running', 'planned', 'submitting', 'submitted', 'ended')"
_MODELS = {
    "openai": "gpt-5-mini",
    "anthropic": "claude-haiku-4-5",
    "google": "gemini-2.5-flash",
    "bedrock": "amazon.nova-lite-v1:0",
}
_LIMITS = (
    (openai_batch, "_LIMITS"),
    (anthropic_batch, "LIMITS"),
    (google_batch, "LIMITS"),
    (bedrock_batch, "LIMITS"),
)


@dataclass(frozen=True)
class Conduct:
    """How a run in a process of its own differs from others.

    ``die_at`` is a point of ``tests.support.points``; with ``stop_file`` the process stops there
    instead, once it has written the file.
    """

    die_at: str | None = None
    stop_file: Path | None = None
    create_seconds: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RehearsedProvider:
    """A provider as the rehearsal server plays it; Bedrock needs a store beside it."""

    name: str
    environment: Mapping[str, str]
    s3_url: str | None = None

    @contextmanager
    def rehearsal(self, durations: Durations = INSTANT) -> Iterator[Emulator]:
        """Run a server, with an empty bucket where there is a store."""
        if self.s3_url is not None:
            import boto3

            store = boto3.resource("s3", endpoint_url=self.s3_url, region_name="us-east-1")
            store.Bucket(_BUCKET).create()
            store.Bucket(_BUCKET).objects.all().delete()
        limits = BedrockLimits(batch_minimum=1)
        with Emulator(s3_endpoint_url=self.s3_url, bedrock=limits, durations=durations) as emulator:
            yield emulator

    def job(self, target: Target, emulator: Emulator, **more: Any) -> Job:
        """Return a run of eight rows in two batches."""
        engine: dict[str, Any] = {"api_key_env": "TEST_API_KEY"}
        if self.name == "bedrock":
            engine = {
                "region": "us-east-1", "base_url": emulator.bedrock_base_url,
                "s3_endpoint_url": self.s3_url, "credentials": "environment",
                "s3_uri": f"s3://{_BUCKET}/batches/",
                "role_arn": "arn:aws:iam::123456789012:role/batch",
            }  # fmt: skip
        else:
            engine["base_url"] = getattr(emulator, f"{self.name}_base_url")
        job = Job(
            target, "", [f"ticket {n}" for n in range(8)],
            model=f"{self.name}/{_MODELS[self.name]}", engine=engine,
            options={"route": "batch", "max_batch_requests": 4}, lease_seconds=600,
        )  # fmt: skip
        return replace(job, **more)

    def creations(self, emulator: Emulator) -> int:
        """Return how many calls to create a batch have come in."""
        return sum(call.operation == f"{self.name}.batches.create" for call in emulator.calls)


def clean_environment(folder: Path) -> Mapping[str, str]:
    """Return what a run needs in its environment, so that it uses nothing of this machine."""
    return {
        "TEST_API_KEY": "sk-test-0123456789abcdef",
        "AWS_ACCESS_KEY_ID": "AKIDOFTHETEST",
        "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(folder / "no-config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "no-credentials"),
    }


def quicken(ingest_rows: int = 2, create_seconds: float | None = None) -> None:
    """Make batches of a few rows pass all that large ones do, in this process and for good."""
    batches.INGEST_ROWS = ingest_rows
    dispatch.FIRST_POLL_SECONDS = 0.02
    for module, name in _LIMITS:
        limits = replace(getattr(module, name), min_requests=1)
        if create_seconds is not None:
            limits = replace(limits, create_seconds=create_seconds)
        setattr(module, name, limits)


@contextmanager
def quickened(**changes: Any) -> Iterator[None]:
    """Do what ``quicken`` does, and undo it."""
    found = [(module, name, getattr(module, name)) for module, name in _LIMITS]
    found += [(batches, "INGEST_ROWS", batches.INGEST_ROWS)]
    found += [(dispatch, "FIRST_POLL_SECONDS", dispatch.FIRST_POLL_SECONDS)]
    quicken(**changes)
    try:
        yield
    finally:
        for module, name, value in found:
            setattr(module, name, value)


def run_conducted(job: Job, conduct: Conduct) -> Mapping[str, Any]:
    """Run a job, in a process of its own."""
    os.environ.update(conduct.environment)
    quicken(create_seconds=conduct.create_seconds)
    points.watch()
    points.arm(conduct.die_at, conduct.stop_file)
    messages: list[str] = []

    def open_watched(model: ModelRef, engine: Mapping[str, Any]) -> BatchBackend | None:
        backend = registry.open_batch_backend(model, engine, Path())
        return None if backend is None else points.watch_batches(backend)

    counts = run_job(job, say=messages.append, open_batch_backend=open_watched)
    return {"counts": asdict(counts), "trace": points.trace(), "messages": messages}


def let_time_pass(target: Target) -> None:
    """Make leases run out and creation calls be long over, as if minutes had gone by."""
    tables = "pg_tables" if target.kind == "postgres" else "duckdb_tables()"
    schema = "schemaname" if target.kind == "postgres" else "schema_name"
    table = "tablename" if target.kind == "postgres" else "table_name"
    if not target.query(
        f"select 1 from {tables} where {schema} = '{{ledger}}' and {table} = 'shards'"
    ):
        return
    clock = "clock_timestamp()" if target.kind == "postgres" else "now()"
    target.query(
        f"update {{ledger}}.shards set lease_expires_at = {clock} - interval '1 second', "
        f"intent_expires_at = {clock} - interval '{SETTLED_SECONDS} seconds' "
        f"where state in {_OPEN}"
    )


def run_to_the_end(job: Job) -> list[str]:
    """Run a job again, each time minutes later, until nothing is pending; return what was said."""
    messages: list[str] = []
    job = replace(job, options={**job.options, "wait": "1m"})
    for _ in range(3):
        let_time_pass(job.target)
        counts = run_job(job, say=messages.append)
        if not counts.pending:
            return messages
    raise AssertionError(f"{counts.pending} rows stay pending: {messages}")


def shards(target: Target) -> list[tuple[Any, ...]]:
    """Return every shard as the ledger has it."""
    return target.query("select * from {ledger}.shards order by shard_id")


def shard_states(target: Target) -> list[str]:
    """Return the states of all shards, sorted."""
    return [state for (state,) in target.query("select state from {ledger}.shards order by 1")]


def attempts(target: Target) -> list[tuple[Any, ...]]:
    """Return every try as the ledger has it."""
    return target.query("select * from {ledger}.attempts order by attempt_id")


def assert_paid_once(job: Job, emulator: Emulator, where: str = "") -> None:
    """Check a finished table, its ledger and the bill: no row is lost, none is paid twice."""
    bill = emulator.bill
    assert bill.paid_twice == {}, where
    assert len(bill.charges) == len(job.bodies), where
    assert_nothing_lost(job, where)


def assert_nothing_lost(job: Job, where: str = "") -> None:
    """Check a finished table and its ledger."""
    target, rows = job.target, len(job.bodies)
    assert target.query(
        f"select llm_status, count(*), count(category) from {{schema}}.{job.name} group by 1"
    ) == [("ok", rows, rows)], where
    assert target.one("select count(*) from {ledger}.claims") == 0, where
    is_open = f"select count(*) from {{ledger}}.shards where state in {_OPEN}"
    assert target.one(is_open) == 0, where
    good = "select count(*), count(distinct request_key) from {ledger}.attempts"
    assert target.query(f"{good} where outcome = 'ok'") == [(rows, rows)], where
    assert target.one("select count(*) from {ledger}.results") == rows, where
