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


def rehearsed_job(target: Target, emulator: Emulator, provider: str, **more: Any) -> Job:
    """Return a run of eight rows in two batches of the rehearsal server."""
    engine: dict[str, Any] = {"api_key_env": "TEST_API_KEY"}
    if provider == "bedrock":
        engine = {
            "region": "us-east-1", "base_url": emulator.bedrock_base_url,
            "s3_endpoint_url": emulator.environment["AWS_ENDPOINT_URL_S3"],
            "credentials": "environment", "s3_uri": f"s3://{_BUCKET}/batches/",
            "role_arn": "arn:aws:iam::123456789012:role/batch",
        }  # fmt: skip
    else:
        engine["base_url"] = getattr(emulator, f"{provider}_base_url")
    options = {"route": "batch", "max_batch_requests": 4, **more.pop("options", {})}
    job = Job(
        target, "", [f"ticket {n}" for n in range(8)], model=f"{provider}/{_MODELS[provider]}",
        engine=engine, options=options, lease_seconds=600,
    )  # fmt: skip
    return replace(job, **more)


def environment(folder: Path) -> Mapping[str, str]:
    """Return what a run needs in its environment, and nothing of this machine."""
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


@contextmanager
def rehearsal(s3_url: str | None = None, durations: Durations = INSTANT) -> Iterator[Emulator]:
    """Run a rehearsal server, with an empty bucket where there is a store."""
    if s3_url is not None:
        import boto3

        bucket = boto3.resource("s3", endpoint_url=s3_url, region_name="us-east-1").Bucket(_BUCKET)
        bucket.create()
        bucket.objects.all().delete()
    limits = BedrockLimits(batch_minimum=1)
    with Emulator(s3_endpoint_url=s3_url, bedrock=limits, durations=durations) as emulator:
        yield emulator


def run_conducted(job: Job, conduct: Conduct) -> Mapping[str, Any]:
    """Run a job, in a process of its own."""
    os.environ.update(conduct.environment)
    quicken(create_seconds=conduct.create_seconds)
    points.watch()
    points.arm(conduct.die_at, conduct.stop_file)
    messages: list[str] = []

    def open_watched(model: ModelRef, engine: Mapping[str, Any]) -> BatchBackend | None:
        backend = registry.open_batch_backend(model, engine, Path())
        return None if backend is None else points.watch_batches(backend)  # type: ignore[no-any-return]

    counts = run_job(job, say=messages.append, open_batch_backend=open_watched)
    return {"counts": asdict(counts), "trace": points.trace(), "messages": messages}


def let_time_pass(target: Target) -> None:
    """Make leases run out and creation calls be long over, as if hours had gone by."""
    if target.kind == "postgres" and not target.query(
        "select 1 from pg_tables where schemaname = '{ledger}' and tablename = 'shards'"
    ):
        return
    if target.kind == "duckdb" and not target.query(
        "select 1 from duckdb_tables() where schema_name = '{ledger}' and table_name = 'shards'"
    ):
        return
    clock = "clock_timestamp()" if target.kind == "postgres" else "now()"
    target.query(
        f"update {{ledger}}.shards set lease_expires_at = {clock} - interval '1 second', "
        f"intent_expires_at = {clock} - interval '{SETTLED_SECONDS} seconds' "
        "where state in ('running', 'planned', 'submitting', 'submitted', 'ended')"
    )


def run_to_the_end(job: Job, runs: int = 4) -> list[str]:
    """Run a job again, hours later, until nothing is pending; return what was said."""
    messages: list[str] = []
    for _ in range(runs):
        let_time_pass(job.target)
        counts = run_job(
            replace(job, options={**job.options, "wait": "1m"}), say=messages.append
        )
        if not counts.pending:
            return messages
    raise AssertionError(f"{counts.pending} rows stay pending: {messages}")


def assert_paid_once(job: Job, emulator: Emulator, where: str = "") -> None:
    """Check a finished table, its ledger and the bill: no row lost, none paid twice."""
    target, rows = job.target, len(job.bodies)
    bill = emulator.bill
    assert bill.paid_twice == {}, where
    assert len(bill.charges) == rows, where
    assert target.query(
        f"select llm_status, count(*), count(category) from {{schema}}.{job.name} group by 1"
    ) == [("ok", rows, rows)], where
    assert target.one("select count(*) from {ledger}.claims") == 0, where
    assert (
        target.one(
            "select count(*) from {ledger}.shards where state in "
            "('running', 'planned', 'submitting', 'submitted', 'ended')"
        )
        == 0
    ), where
    assert target.query(
        "select count(*), count(distinct request_key) from {ledger}.attempts where outcome = 'ok'"
    ) == [(rows, rows)], where
    assert target.query("select count(*), count(distinct request_key) from {ledger}.results") == [
        (rows, rows)
    ], where


def creations(emulator: Emulator, provider: str) -> int:
    """Return how many calls to create a batch have come in."""
    return sum(call.operation == f"{provider}.batches.create" for call in emulator.calls)
