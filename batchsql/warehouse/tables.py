"""The ledger's tables: their names, how they are made, and how they are brought forward.

``docs/ledger.md`` describes every table for readers.
"""

from __future__ import annotations

from batchsql.errors import LedgerVersionError
from batchsql.version import __version__
from batchsql.warehouse.base import Warehouse, fit_identifier, quote

LEDGER_VERSION = 3
"""Raised by one with every change of the tables; ``_MIGRATIONS`` holds the steps."""

_MIGRATIONS: dict[int, tuple[str, ...]] = {
    1: (
        """create table {specs} (
            spec_version uuid not null {pk}, key_recipe integer not null, model text not null,
            template text not null, params text not null, returns text not null,
            normalize text not null, identity text not null, prefix text not null,
            batchsql_version text not null, first_used_at timestamp with time zone not null)""",
        """create table {items} (
            item_key uuid not null {pk}, request_key uuid not null, spec_version uuid not null,
            unique_key text, first_seen_at timestamp with time zone not null)""",
        """create table {requests} (
            request_key uuid not null {pk}, spec_version uuid not null, messages text not null,
            created_at timestamp with time zone not null)""",
        """create table {claims} (
            request_key uuid not null {pk}, shard_id uuid not null, epoch integer not null,
            claimed_at timestamp with time zone not null)""",
        """create table {shards} (
            shard_id uuid not null {pk}, run_id uuid not null, enrichment text not null,
            spec_version uuid not null, backend text not null, model text not null,
            state text not null, owner text not null, epoch integer not null,
            lease_expires_at timestamp with time zone not null, requests integer not null,
            ok integer not null, failed integer not null,
            created_at timestamp with time zone not null, finished_at timestamp with time zone)""",
        """create table {attempts} (
            attempt_id uuid not null, request_key uuid not null, shard_id uuid,
            run_id uuid not null, attempt_number integer not null, outcome text not null,
            is_final boolean not null,
            error text, raw_output text, finish_reason text, input_tokens bigint,
            output_tokens bigint, cached_tokens bigint, cost_usd double precision,
            model_reported text, engine_version text, started_at timestamp with time zone,
            finished_at timestamp with time zone, recorded_at timestamp with time zone not null)""",
        """create table {results} (
            request_key uuid not null {pk}, output {json} not null, checksum text not null,
            attempt_id uuid not null, state text not null,
            created_at timestamp with time zone not null)""",
        """create table {runs} (
            run_id uuid not null {pk}, enrichment text not null, spec_version uuid not null,
            state text not null, total_rows bigint, new_rows bigint, reused_rows bigint,
            duplicate_rows bigint, ok_rows bigint, pending_rows bigint, failed_rows bigint,
            requests_sent bigint, requests_ok bigint, requests_failed bigint,
            requests_borrowed bigint, input_tokens bigint, output_tokens bigint,
            cost_usd double precision, error text, invocation_id text,
            batchsql_version text not null, started_at timestamp with time zone not null,
            finished_at timestamp with time zone)""",
        # A dead letter: its budget is spent, nobody gave it a new one, and no answer came late.
        """create view {dead_letters} as
            select a.request_key, q.spec_version, a.outcome, a.error, a.raw_output,
                a.attempt_number as attempts, a.recorded_at
            from {attempts} a join {requests} q on q.request_key = a.request_key
            where a.is_final
              and not exists (select 1 from {attempts} l where l.request_key = a.request_key
                              and l.attempt_number > a.attempt_number)
              and not exists (select 1 from {results} r where r.request_key = a.request_key)""",
    ),
    # Provider batches: a shard lives on between two runs, and what is known of it stands here.
    2: (
        *(
            f"alter table {{shards}} add column {column}"
            for column in (
                "route text",
                "route_reason text",
                "settings text",
                "account text",
                "uploaded text",
                "provider_batch_id text",
                "provider_state text",
                "provider_ok bigint",
                "provider_failed bigint",
                "end_state text",
                "fault text",
                "copied bigint",
                "error text",
                "intent_at timestamp with time zone",
                "intent_expires_at timestamp with time zone",
                "submitted_at timestamp with time zone",
                "checked_at timestamp with time zone",
                "ended_at timestamp with time zone",
                "results_until timestamp with time zone",
                "deadline_at timestamp with time zone",
                "cancel_requested_at timestamp with time zone",
            )
        ),
        *(
            f"alter table {{attempts}} add column {column}"
            for column in (
                "route text",
                "cache_write_tokens bigint",
                "reasoning_tokens bigint",
                "copy_of uuid",
            )
        ),
        """create table {completions} (
            enrichment text not null {pk}, spec_version uuid not null,
            opened_at timestamp with time zone not null, fired_at timestamp with time zone)""",
    ),
    # Workers: what waits for them, who worked on a shard, and how its engine did.
    3: (
        "alter table {shards} add column worker text",
        "alter table {shards} add column figures text",
        "alter table {completions} add column telling_until timestamp with time zone",
        """create table {queues} (
            enrichment text not null {pk}, run_id uuid not null, spec_version uuid not null,
            model text not null, route text not null, route_reason text, settings text not null,
            enqueued_at timestamp with time zone not null)""",
        """create table {queued} (
            enrichment text not null, request_key uuid not null, position bigint not null,
            is_urgent boolean not null)""",
    ),
}

# PostgreSQL finds the attempts of a request by index; DuckDB scans a column faster than it would
# keep one.
_POSTGRES_INDEXES = (
    "create index if not exists {attempts_index} on {attempts} (request_key)",
    "create index if not exists {attempts_final_index} on {attempts} (request_key) where is_final",
    "create index if not exists {claims_shard_index} on {claims} (shard_id)",
    "create index if not exists {queued_index} on {queued} (enrichment, position)",
)

_TABLES = (
    "specs", "items", "requests", "claims", "shards", "attempts", "results", "runs", "completions",
    "queues", "queued", "dead_letters",
)  # fmt: skip

_TEMPORARY_SCHEMA = {"duckdb": "temp.main", "postgres": "pg_temp"}
NEW_UUID = {"duckdb": "uuid()", "postgres": "gen_random_uuid()"}


class LedgerTables:
    """The tables of one target's ledger, over a connection of batchsql's own.

    Args:
        warehouse: the connection; it is not closed here.
        schema: where the tables are; a name too long for PostgreSQL is shortened.
        prefix: put before each table's name when the schema is shared with other tables.
    """

    def __init__(self, warehouse: Warehouse, schema: str, prefix: str = "") -> None:
        self.warehouse = warehouse
        self.schema = fit_identifier(schema)
        self.prefix = prefix
        self.names = {name: self.relation(name) for name in (*_TABLES, "meta")}
        # Qualified wherever they are named: a bare name could mean a table of the user's.
        temporary = _TEMPORARY_SCHEMA[warehouse.dialect]
        self.names.update({name: f"{temporary}.{name}" for name in ("todo", "borrowed")})

    def relation(self, name: str) -> str:
        """Return the quoted, qualified name of a table of the ledger."""
        return relation_name(self.warehouse, self.schema, self.prefix + name)

    def sql(self, text: str, **more: str) -> str:
        """Fill the names of tables, the clock and ``more`` into the braces of some SQL."""
        return text.format(clock=self.warehouse.clock, **self.names, **more)

    def exists(self) -> bool:
        """Return whether the ledger's tables are there."""
        return self.warehouse.relation_exists(self.schema, self.prefix + "meta")

    def migrate(self) -> None:
        """Create the tables or bring them to this version, under a lock.

        Raises:
            LedgerVersionError: a newer batchsql wrote this ledger.
            WarehouseError: the schema is not there and may not be created.
        """
        if self.exists() and self.check_version() == LEDGER_VERSION:
            return
        with self.warehouse.migration_lock():
            self.warehouse.create_schema(self.schema)
            self._migrate_locked(self.check_version() if self.exists() else 0)

    def _migrate_locked(self, version: int) -> None:
        warehouse = self.warehouse
        if version == 0:
            warehouse.execute(
                self.sql(
                    "create table {meta} (ledger_version integer not null, batchsql_version text "
                    "not null, changed_at timestamp with time zone not null)"
                )
            )
        for step in range(version + 1, LEDGER_VERSION + 1):
            for statement in _MIGRATIONS[step]:
                warehouse.execute(
                    self.sql(
                        statement,
                        pk="primary key" if warehouse.dialect == "postgres" else "",
                        json=warehouse.json_type,
                    )
                )
            warehouse.execute(
                self.sql("insert into {meta} values (?, ?, {clock})"), [step, __version__]
            )
        if warehouse.dialect == "postgres":
            names = {
                f"{name}_index": quote(f"{self.prefix}{name}_index", "postgres")
                for name in ("attempts", "attempts_final", "claims_shard", "queued")
            }
            for statement in _POSTGRES_INDEXES:
                warehouse.execute(self.sql(statement, **names))

    def check_version(self) -> int:
        """Return the version of the tables.

        Raises:
            LedgerVersionError: a newer batchsql wrote this ledger.
        """
        rows = self.warehouse.fetch(self.sql("select max(ledger_version) from {meta}"))
        version = int(rows[0][0] or 0)
        if version > LEDGER_VERSION:
            raise LedgerVersionError(
                f"the ledger in {self.schema} has version {version}, written by a newer batchsql; "
                f"this one ({__version__}) knows version {LEDGER_VERSION}. Upgrade batchsql here"
            )
        return version


def braced(text: str) -> str:
    """Keep the braces of a name or of filled SQL through ``LedgerTables.sql``."""
    return text.replace("{", "{{").replace("}", "}}")


def relation_name(warehouse: Warehouse, schema: str, name: str) -> str:
    """Return a quoted name, with the database where a process may have several attached."""
    parts = [schema, name]
    if warehouse.dialect == "duckdb":
        parts.insert(0, warehouse.database)
    return ".".join(quote(part, warehouse.dialect) for part in parts)
