"""Two owners on one ledger in any order of steps: no request is lost, none has two senders."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from unittest import mock

import duckdb
import pyarrow as pa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from batchsql.types import Outcome
from batchsql.warehouse.duckdb import DuckDBWarehouse
from batchsql.warehouse.ledger import Ledger, SpecRow
from batchsql.warehouse.report import LedgerReport
from batchsql.warehouse.shards import Attempt, Claim, ShardOrder

SPEC = uuid.UUID(int=1).hex
KEYS = [uuid.UUID(int=100 + n).hex for n in range(8)]
MAX_ATTEMPTS = 2
OUTCOMES = [Outcome.OK, Outcome.INVALID, Outcome.TRANSIENT, Outcome.FILTERED]

owners = st.sampled_from(["first", "second"])


@dataclass
class Owner:
    """A run in a process of its own, as far as the ledger can tell."""

    name: str
    ledger: Ledger
    run_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    epochs: dict[str, int] = field(default_factory=dict)
    claims: dict[str, tuple[str, Claim]] = field(default_factory=dict)

    @property
    def lease_owner(self) -> str:
        return f"{self.name}:{self.run_id}"

    def forget(self, shards: set[str]) -> None:
        for shard_id in shards:
            self.epochs.pop(shard_id, None)
        self.claims = {key: taken for key, taken in self.claims.items() if taken[0] not in shards}


class LedgerMachine(RuleBasedStateMachine):
    """Does to a ledger what runs do, and what is done to runs: they stall, die and come back."""

    @initialize()
    def fill(self) -> None:
        self.database = duckdb.connect(":memory:")
        self.owners = {}
        for name in ("first", "second"):
            cursor = self.database.cursor()
            ledger = Ledger(DuckDBWarehouse(cursor, "memory", cursor.close), "ledger")
            ledger.migrate()
            self.owners[name] = Owner(name, ledger)
        ledger = self.owners["first"].ledger
        ledger.write_spec(SpecRow(SPEC, 1, "fake/m", "t", "{}", "[]", "standard", "{}", "[]"))
        ledger.write_items(
            SPEC,
            pa.table({"item_key": KEYS, "request_key": KEYS, "unique_key": KEYS}),
            pa.table({"request_key": KEYS, "messages": ['[["user","hi"]]'] * len(KEYS)}),
        )
        for owner in self.owners.values():
            self.list_wanted(owner.name)
        self.outputs: dict[str, str] = {}
        self.paid: set[str] = set()
        self.claim("first", 0, 4)
        self.claim("second", 2, 4)

    def teardown(self) -> None:
        if hasattr(self, "database"):
            self.database.close()

    def list_wanted(self, name: str) -> None:
        numbered = pa.RecordBatch.from_pydict(
            {
                "request_key": KEYS,
                "position": list(range(1, len(KEYS) + 1)),
                "is_urgent": [False] * len(KEYS),
            }
        )
        self.owners[name].ledger.load_todo([numbered])

    def many(self, sql: str) -> list[tuple[object, ...]]:
        rows: list[tuple[object, ...]] = self.database.execute(sql).fetchall()
        return rows

    @rule(name=owners, after=st.integers(0, len(KEYS)), size=st.integers(1, 5))
    def claim(self, name: str, after: int, size: int) -> None:
        owner = self.owners[name]
        claimed_before = {key for (key,) in self.many("select request_key from ledger.claims")}
        shard, last = owner.ledger.claim(
            ShardOrder(owner.run_id, owner.lease_owner, "e", SPEC, "fake", "fake/m", 60),
            after=after, size=size,
        )  # fmt: skip
        assert last >= after
        if shard is None:
            return
        assert 1 <= len(shard.claims) <= size
        owner.epochs[shard.shard_id] = shard.epoch
        for claim in shard.claims:
            key = claim.request.request_key
            assert key not in self.paid
            assert uuid.UUID(key) not in claimed_before
            assert claim.item_failures < MAX_ATTEMPTS
            owner.claims[key] = (shard.shard_id, claim)

    @rule(name=owners, outcomes=st.lists(st.sampled_from(OUTCOMES), min_size=1, max_size=4))
    def flush(self, name: str, outcomes: list[Outcome]) -> None:
        self.write(self.owners[name], outcomes)

    @rule(name=owners, outcome=st.sampled_from(OUTCOMES))
    def flush_everything(self, name: str, outcome: Outcome) -> None:
        self.write(self.owners[name], [outcome] * len(self.owners[name].claims))

    @rule(name=owners, outcome=st.sampled_from(OUTCOMES))
    def flush_too_late(self, name: str, outcome: Outcome) -> None:
        self.take_over_from_dead_processes("second" if name == "first" else "first")
        self.flush_everything(name, outcome)

    def write(self, owner: Owner, outcomes: list[Outcome]) -> None:
        attempts = []
        for key, outcome in zip(sorted(owner.claims), outcomes, strict=False):
            shard_id, claim = owner.claims.pop(key)
            is_ok = outcome is Outcome.OK
            spent = outcome.is_item_failure and claim.item_failures + 1 >= MAX_ATTEMPTS
            attempts.append(
                Attempt(
                    shard_id=shard_id,
                    request_key=key,
                    attempt_number=claim.attempt_number + 1,
                    outcome=outcome,
                    is_final=not is_ok and (spent or not outcome.is_retryable),
                    answer=f'{{"by": "{owner.name}"}}' if is_ok else None,
                    checksum="c" if is_ok else None,
                )
            )
        if not attempts:
            return
        open_shards = {shard for shard, _ in owner.claims.values()}
        done = dict.fromkeys({a.shard_id for a in attempts} - open_shards)
        running = {
            str(s)
            for (s,) in self.many("select shard_id from ledger.shards where state = 'running'")
        }
        lost = owner.ledger.flush(attempts, owner.epochs, owner.run_id, owner.lease_owner, done)
        assert lost == {a.shard_id for a in attempts} - running
        self.paid |= {a.request_key for a in attempts if a.answer and a.shard_id not in lost}
        owner.forget(lost | done.keys())

    @rule(name=owners)
    def renew(self, name: str) -> None:
        owner = self.owners[name]
        owner.forget(owner.ledger.renew(owner.epochs, owner.lease_owner, 60))

    @rule(name=owners)
    def take_over_from_dead_processes(self, name: str) -> None:
        with mock.patch("batchsql.warehouse.shards.process_id", return_value=name):
            self.owners[name].ledger.free_lost_shards()
        held = (
            "select count(*) from ledger.shards where state = 'running' and owner not like '{}:%'"
        )
        assert self.many(held.format(name)) == [(0,)]

    @rule(name=owners)
    def let_leases_run_out(self, name: str) -> None:
        self.database.execute(
            "update ledger.shards set lease_expires_at = now() - interval 1 minute "
            f"where owner like '{name}:%' and state = 'running'"
        )
        with mock.patch("batchsql.warehouse.shards.process_id", return_value=name):
            self.owners[name].ledger.free_lost_shards()

    @rule(name=owners)
    def finish(self, name: str) -> None:
        owner = self.owners[name]
        owner.ledger.finish_shards(owner.epochs, owner.lease_owner)
        owner.forget(set(owner.epochs))

    @rule(name=owners)
    def die_and_come_back(self, name: str) -> None:
        owner = self.owners[name]
        self.owners[name] = Owner(name, owner.ledger)
        self.list_wanted(name)

    @rule(name=owners)
    def trim(self, name: str) -> None:
        left = self.owners[name].ledger.trim_todo()
        counts = self.owners[name].ledger.count_requests(SPEC)
        assert left <= counts.claimed + counts.waiting

    @rule(name=owners)
    def replay(self, name: str) -> None:
        owner = self.owners[name]
        dead = owner.ledger.count_requests(SPEC).dead
        assert LedgerReport(owner.ledger).replay(owner.run_id, None, None) == dead
        assert owner.ledger.count_requests(SPEC).dead == 0

    @invariant()
    def requests_are_all_somewhere(self) -> None:
        if not hasattr(self, "database"):
            return
        counts = self.owners["second"].ledger.count_requests(SPEC)
        assert counts.adds_up
        assert counts.total == len(KEYS)
        assert counts.results == len(self.paid)

    @invariant()
    def claims_have_one_running_shard(self) -> None:
        if not hasattr(self, "database"):
            return
        assert self.many("select count(*) - count(distinct request_key) from ledger.claims") == [
            (0,)
        ]
        assert self.many(
            "select count(*) from ledger.claims c left join ledger.shards s "
            "on s.shard_id = c.shard_id where s.state is distinct from 'running'"
        ) == [(0,)]
        assert self.many(
            "select count(*) from ledger.claims c join ledger.results r "
            "on r.request_key = c.request_key"
        ) == [(0,)]

    @invariant()
    def answers_stay_as_first_given(self) -> None:
        if not hasattr(self, "database"):
            return
        found = self.many("select request_key, output from ledger.results")
        outputs = {uuid.UUID(str(key)).hex: str(output) for key, output in found}
        assert len(found) == len(outputs)
        assert self.outputs.items() <= outputs.items()
        self.outputs = outputs
        # No try is numbered twice, so that a request has one last try.
        assert self.many(
            "select count(*) from (select 1 from ledger.attempts "
            "group by request_key, attempt_number having count(*) > 1)"
        ) == [(0,)]


LedgerMachine.TestCase.settings = settings(
    max_examples=12,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLedgerStates = LedgerMachine.TestCase
