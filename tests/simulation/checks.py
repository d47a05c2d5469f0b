"""What must hold at the end of a world, whatever happened in it."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from typing import Any

from batchsql.backends.batch import BatchState
from batchsql.batches import OVERDUE_SECONDS
from batchsql.types import Completion, Outcome
from batchsql.warehouse.shards import ShardState
from tests.simulation.provider import EPOCH, Batch, Fate, Provider, results
from tests.simulation.world import ENRICHMENT, SPEC, World

_DONE = {ShardState.COLLECTED, ShardState.EXPIRED, ShardState.CANCELLED}


@dataclass(frozen=True)
class ShardFacts:
    """A shard as the ledger has it at the end. Times are seconds of the world."""

    shard_id: str
    state: ShardState
    fault: str | None
    provider_batch_id: str | None
    created_at: float
    finished_at: float | None


@dataclass(frozen=True)
class AttemptFacts:
    """A try as the ledger has it at the end."""

    attempt_id: str
    shard_hex: str
    request_key: str
    outcome: Outcome
    error: str | None
    recorded_at: float


def find_faults(world: World) -> list[str]:
    """Return every promise that was broken, in words."""
    shards = _read_shards(world)
    attempts = _read_attempts(world)
    copied = _read_copied(world)
    return [
        *_check_counts(world),
        *_check_shards(shards),
        *_check_batches(world.provider, shards, attempts, copied),
        *_check_results(world, attempts),
        *_check_bills(world.provider, shards, attempts, copied),
        *_check_cancels(world.provider, world.cancelled_by_hand),
    ]


def _check_counts(world: World) -> list[str]:
    ledger = world.open_ledger()
    counts = ledger.count_requests(SPEC)
    faults = []
    if not counts.adds_up or counts.total != len(world.keys):
        faults.append(f"the counts do not add up: {counts}")
    if counts.claimed or counts.waiting:
        faults.append(f"requests are neither answered nor dead: {counts}")
    unbalanced = ledger.read_unbalanced_batches(ENRICHMENT)
    if unbalanced:
        faults.append(f"shards whose requests are not all recorded: {unbalanced}")
    # What is asked twice on purpose is numbered twice: neither try knows of the other.
    twice = "(select request_key from ledger.attempts where outcome = 'copied')"
    for columns, where in (
        ("request_key, shard_id", "outcome <> 'copied'"),
        ("request_key, attempt_number", f"request_key not in {twice}"),
    ):
        found = world.fetch(
            f"select {columns}, count(*) from ledger.attempts where {where} "
            "group by all having count(*) > 1"
        )
        if found:
            faults.append(f"several tries have one {columns}: {found}")
    left = world.fetch("select request_key, shard_id from ledger.claims")
    if left:
        faults.append(f"claims are left: {left}")
    return faults


def _check_shards(shards: dict[str, ShardFacts]) -> list[str]:
    return [f"a shard is still open: {shard}" for shard in shards.values() if shard.state.is_open]


def _check_batches(
    provider: Provider,
    shards: dict[str, ShardFacts],
    attempts: dict[tuple[str, str], AttemptFacts],
    copied: dict[tuple[str, str], float],
) -> list[str]:
    """Check that each batch has one shard, which recorded what the batch had to give."""
    faults = []
    seen: set[str] = set()
    for batch in provider.batches.values():
        shard = shards.get(batch.shard_hex)
        if shard is None:
            faults.append(f"{batch.batch_id} has no shard")
            continue
        if batch.shard_hex in seen:
            faults.append(f"{batch.batch_id} is the second batch of its shard {shard}")
        seen.add(batch.shard_hex)
        if shard.provider_batch_id not in (None, batch.batch_id):
            faults.append(f"{batch.batch_id} is of shard {shard}, which took another for its own")
        faults += _check_end(provider, batch, shard)
        faults += _check_lines(provider, batch, shard, attempts, copied)
    return faults


def _check_end(provider: Provider, batch: Batch, shard: ShardFacts) -> list[str]:
    """Check that a shard ended as its batch allows."""
    ended = shard.finished_at if shard.finished_at is not None else -math.inf
    vanished = batch.created_at + provider.limits.retention_seconds
    if batch.fate is Fate.IS_REFUSED and batch.state(ended) is BatchState.FAILED:
        is_found = shard.state is not ShardState.ABANDONED or ended > vanished
        is_right = is_found and shard.state not in _DONE
    elif shard.state in _DONE:
        is_right = batch.is_final(ended)
    elif shard.fault == "lost":
        is_right = ended > shard.created_at + provider.limits.retention_seconds
    elif shard.fault == "gone" or shard.state is ShardState.ABANDONED:
        is_right = ended > vanished
    else:
        is_right = False
    if is_right:
        return []
    return [f"{batch.batch_id}, which {batch.fate.value} at {batch.final_at:.0f}, is of {shard}"]


def _check_lines(
    provider: Provider,
    batch: Batch,
    shard: ShardFacts,
    attempts: dict[tuple[str, str], AttemptFacts],
    copied: dict[tuple[str, str], float],
) -> list[str]:
    """Check that what the batch answered is recorded, and nothing else."""
    if shard.state not in _DONE:
        return []
    vanished = batch.created_at + provider.limits.retention_seconds
    # The first line for a request counts, and only those that were asked for here.
    given: dict[str, Completion] = {}
    for line in results(batch, provider.limits.keeps_partial):
        given.setdefault(line.custom_id, line.completion)
    faults = []
    for line in batch.lines:
        attempt = attempts.get((batch.shard_hex, line.request_key))
        completion = given.get(line.custom_id)
        if attempt is None and (batch.shard_hex, line.request_key) in copied:
            # It was let go; only what came of it all the same is recorded.
            if completion is not None and (shard.finished_at or 0.0) <= vanished:
                faults.append(f"{batch.batch_id} has {line}, let go but answered, unrecorded")
        elif attempt is None:
            faults.append(f"{batch.batch_id} has {line}, of which no try is recorded")
        elif attempt.outcome is Outcome.TRANSIENT and (attempt.error or "").startswith(
            "the results were deleted"
        ):
            if attempt.recorded_at <= vanished:
                faults.append(f"{attempt} says that results were deleted that are there")
        elif attempt.outcome is not _expected(completion):
            faults.append(f"{batch.batch_id} has {completion}, recorded as {attempt}")
    return faults


def _expected(completion: Completion | None) -> Outcome:
    if completion is None:
        return Outcome.TRANSIENT
    if completion.failure is not None:
        return completion.failure
    text = completion.text or ""
    if not text.endswith("}"):
        return Outcome.TRUNCATED
    return Outcome.OK if isinstance(json.loads(text)["label"], str) else Outcome.INVALID


def _check_results(world: World, attempts: dict[tuple[str, str], AttemptFacts]) -> list[str]:
    """Check that each answer is the one of the try it names, and every good try is an answer."""
    rows = world.fetch("select request_key::text, output, attempt_id::text from ledger.results")
    by_id = {attempt.attempt_id: attempt for attempt in attempts.values()}
    labels = {batch.shard_hex: batch.batch_id for batch in world.provider.batches.values()}
    faults = []
    keys = [key for key, _, _ in rows]
    if len(keys) != len(set(keys)):
        faults.append("a request has several results")
    for key, output, attempt_id in rows:
        attempt = by_id.get(attempt_id)
        if attempt is None or attempt.outcome is not Outcome.OK or attempt.request_key != _hex(key):
            faults.append(f"the result of {key} names {attempt}")
        elif json.loads(output) != {"label": labels.get(attempt.shard_hex)}:
            faults.append(f"the result of {key} is {output}, not what {attempt} was answered")
    answered = {_hex(key) for key in keys}
    faults += [
        f"{attempt} is no result"
        for attempt in attempts.values()
        if attempt.outcome is Outcome.OK and attempt.request_key not in answered
    ]
    return faults


def _check_bills(
    provider: Provider,
    shards: dict[str, ShardFacts],
    attempts: dict[tuple[str, str], AttemptFacts],
    copied: dict[tuple[str, str], float],
) -> list[str]:
    """Check that nothing was asked for twice without a recorded reason in between."""
    asked: dict[str, list[Batch]] = {}
    for batch in sorted(provider.batches.values(), key=lambda batch: batch.created_at):
        if batch.fate is not Fate.IS_REFUSED:
            for line in batch.lines:
                asked.setdefault(line.request_key, []).append(batch)
    faults = []
    for key, batches in asked.items():
        for before, after in itertools.pairwise(batches):
            attempt = attempts.get((before.shard_hex, key))
            shard = shards[before.shard_hex]
            if copied.get((before.shard_hex, key), math.inf) <= after.created_at:
                continue  # twice on purpose, near a deadline
            if attempt is not None:
                is_right = attempt.outcome is not Outcome.OK
                known_at = attempt.recorded_at
            else:  # given up unseen, long after anything of it could be fetched
                is_right = shard.fault == "lost" or shard.state is ShardState.ABANDONED
                known_at = math.inf if shard.finished_at is None else shard.finished_at
            if not is_right or known_at > after.created_at:
                faults.append(
                    f"{key} was asked for in {after.batch_id} after {before.batch_id}, of which "
                    f"the ledger has {attempt} and {shard}"
                )
    return faults


def _check_cancels(provider: Provider, by_hand: set[str]) -> list[str]:
    """Check that no batch was cancelled whose answers are paid and lost by it, unless by hand.

    One that does not end long after its window gives nothing anyhow.
    """
    if provider.limits.keeps_partial:
        return []
    late = provider.limits.window_seconds + OVERDUE_SECONDS
    return [
        f"{batch.batch_id} was cancelled at {batch.cancelled_at:.0f}, and {len(paid)} answers lost"
        for batch in provider.batches.values()
        if batch.state(math.inf) is BatchState.CANCELLED
        and batch.shard_hex not in by_hand
        and batch.cancelled_at < batch.created_at + late
        and (paid := [line for line in batch.answered(math.inf) if line.text is not None])
    ]


def _read_shards(world: World) -> dict[str, ShardFacts]:
    rows = world.fetch(
        "select shard_id::text, state, fault, provider_batch_id, epoch(created_at), "
        "epoch(finished_at) from ledger.shards"
    )
    start = EPOCH.timestamp()
    return {
        _hex(shard_id): ShardFacts(
            shard_id, ShardState(state), fault, batch_id, created - start,
            None if finished is None else finished - start,
        )
        for shard_id, state, fault, batch_id, created, finished in rows
    }  # fmt: skip


def _read_attempts(world: World) -> dict[tuple[str, str], AttemptFacts]:
    rows: list[tuple[Any, ...]] = world.fetch(
        "select attempt_id::text, shard_id::text, request_key::text, outcome, error, "
        "epoch(recorded_at) from ledger.attempts where outcome <> 'copied'"
    )
    return {
        (_hex(shard_id), _hex(key)): AttemptFacts(
            attempt_id, _hex(shard_id), _hex(key), Outcome(outcome), error,
            recorded - EPOCH.timestamp(),
        )
        for attempt_id, shard_id, key, outcome, error, recorded in rows
    }  # fmt: skip


def _read_copied(world: World) -> dict[tuple[str, str], float]:
    """Return when requests were let go by their shards, to be asked twice."""
    rows = world.fetch(
        "select shard_id::text, request_key::text, epoch(recorded_at) from ledger.attempts "
        "where outcome = 'copied'"
    )
    return {(_hex(s), _hex(key)): at - EPOCH.timestamp() for s, key, at in rows}


def _hex(text: str) -> str:
    return text.replace("-", "")
