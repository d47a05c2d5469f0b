"""Give a ledger shards of batches that it did not submit itself, so that it can collect them.

They come out of another ledger's export, or were found in a provider's list.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from batchsql.types import Route
from batchsql.warehouse.ledger import Ledger
from batchsql.warehouse.shards import ShardState

NOBODY_SQL: Mapping[str, str] = {
    "owner": "''",
    "lease_expires_at": "{clock} - interval '1 second'",
}
"""SQL for the columns that let anybody take the lease of a shard."""


@dataclass(frozen=True, slots=True)
class FoundBatch:
    """A batch that has ended at a provider, and the spec whose requests it answers.

    ``run_id`` is the run for which its tries are recorded; ``end_state`` where its shard goes once
    its results are fetched.
    """

    provider_batch_id: str
    provider_state: str
    end_state: ShardState
    account: str
    run_id: str
    enrichment: str
    spec_version: str
    model: str
    settings: str

    @property
    def shard_id(self) -> str:
        """The id of its shard: always the same for the same batch."""
        return str(uuid.uuid5(uuid.NAMESPACE_OID, f"batchsql {self.provider_batch_id}"))


def claim_members(ledger: Ledger, shard_id: str, request_keys: pa.Array, epoch: int = 1) -> int:
    """Claim requests for a shard, but for those answered or claimed already; return how many.

    Belongs into a transaction. A request that was given up is claimed too: an answer revives it.
    """
    warehouse = ledger.warehouse
    staged = warehouse.stage("members", pa.table({"key": request_keys}))
    warehouse.insert_new(
        ledger.names["claims"],
        ("request_key", "shard_id", "epoch", "claimed_at"),
        ledger.sql(
            f"select m.key::uuid as request_key, '{uuid.UUID(shard_id)}'::uuid as shard_id, "
            f"{int(epoch)} as epoch, {{clock}} as claimed_at from {staged} m "
            "join {requests} q on q.request_key = m.key::uuid where not exists "
            "(select 1 from {results} r where r.request_key = m.key::uuid)"
        ),
    )
    rows = warehouse.fetch(
        ledger.sql("select count(*) from {claims} where shard_id = ?::uuid"), [shard_id]
    )
    return int(rows[0][0])


def has_shard(ledger: Ledger, shard_id: str) -> bool:
    """Return whether the ledger has a shard already."""
    return bool(
        ledger.warehouse.fetch(
            ledger.sql("select 1 from {shards} where shard_id = ?::uuid"), [shard_id]
        )
    )


def adopt_batch(ledger: Ledger, batch: FoundBatch, request_keys: pa.Array) -> int:
    """Make a shard of a batch that was found, in one transaction; return what it claims.

    From then on it is collected like any other. Without a request to claim, or where the ledger has
    its shard already, nothing is written.
    """
    warehouse = ledger.warehouse
    with warehouse.transaction():
        if has_shard(ledger, batch.shard_id):
            return 0
        count = claim_members(ledger, batch.shard_id, request_keys)
        if not count:
            return 0
        values = {
            **NOBODY_SQL,
            "epoch": "1", "requests": str(count), "ok": "0", "failed": "0", "created_at": "{clock}",
            "submitted_at": "{clock}", "ended_at": "{clock}",
        }  # fmt: skip
        given = {
            "shard_id": batch.shard_id, "run_id": batch.run_id, "spec_version": batch.spec_version,
            "enrichment": batch.enrichment, "backend": batch.model.partition("/")[0],
            "model": batch.model, "state": ShardState.ENDED.value, "route": Route.BATCH.value,
            "route_reason": f"recovered from {batch.provider_batch_id}",
            "settings": batch.settings, "account": batch.account,
            "provider_batch_id": batch.provider_batch_id,
            "provider_state": batch.provider_state, "end_state": batch.end_state.value,
        }  # fmt: skip
        marks = ["?::uuid" if name in _UUIDS else "?" for name in given]
        warehouse.execute(
            ledger.sql(
                f"insert into {{shards}} ({', '.join([*given, *values])}) "
                f"values ({', '.join([*marks, *values.values()])})"
            ),
            list(given.values()),
        )
    return count


_UUIDS = ("shard_id", "run_id", "spec_version")
