create schema "{ledger}";
create table "{ledger}"."meta" (ledger_version integer not null, batchsql_version text not null, changed_at timestamp with time zone not null);
create table "{ledger}"."specs" (
    spec_version uuid not null , key_recipe integer not null, model text not null,
    template text not null, params text not null, returns text not null,
    normalize text not null, identity text not null, prefix text not null,
    batchsql_version text not null, first_used_at timestamp with time zone not null);
create table "{ledger}"."items" (
    item_key uuid not null , request_key uuid not null, spec_version uuid not null,
    unique_key text, first_seen_at timestamp with time zone not null);
create table "{ledger}"."requests" (
    request_key uuid not null , spec_version uuid not null, messages text not null,
    created_at timestamp with time zone not null);
create table "{ledger}"."claims" (
    request_key uuid not null , shard_id uuid not null, epoch integer not null,
    claimed_at timestamp with time zone not null);
create table "{ledger}"."shards" (
    shard_id uuid not null , run_id uuid not null, enrichment text not null,
    spec_version uuid not null, backend text not null, model text not null,
    state text not null, owner text not null, epoch integer not null,
    lease_expires_at timestamp with time zone not null, requests integer not null,
    ok integer not null, failed integer not null,
    created_at timestamp with time zone not null, finished_at timestamp with time zone);
create table "{ledger}"."attempts" (
    attempt_id uuid not null, request_key uuid not null, shard_id uuid,
    run_id uuid not null, attempt_number integer not null, outcome text not null,
    is_final boolean not null,
    error text, raw_output text, finish_reason text, input_tokens bigint,
    output_tokens bigint, cached_tokens bigint, cost_usd double precision,
    model_reported text, engine_version text, started_at timestamp with time zone,
    finished_at timestamp with time zone, recorded_at timestamp with time zone not null);
create table "{ledger}"."results" (
    request_key uuid not null , output json not null, checksum text not null,
    attempt_id uuid not null, state text not null,
    created_at timestamp with time zone not null);
create table "{ledger}"."runs" (
    run_id uuid not null , enrichment text not null, spec_version uuid not null,
    state text not null, total_rows bigint, new_rows bigint, reused_rows bigint,
    duplicate_rows bigint, ok_rows bigint, pending_rows bigint, failed_rows bigint,
    requests_sent bigint, requests_ok bigint, requests_failed bigint,
    requests_borrowed bigint, input_tokens bigint, output_tokens bigint,
    cost_usd double precision, error text, invocation_id text,
    batchsql_version text not null, started_at timestamp with time zone not null,
    finished_at timestamp with time zone);
create view "{ledger}"."dead_letters" as
    select a.request_key, q.spec_version, a.outcome, a.error, a.raw_output,
        a.attempt_number as attempts, a.recorded_at
    from "{ledger}"."attempts" a join "{ledger}"."requests" q on q.request_key = a.request_key
    where a.is_final
      and not exists (select 1 from "{ledger}"."attempts" l where l.request_key = a.request_key
                      and l.attempt_number > a.attempt_number)
      and not exists (select 1 from "{ledger}"."results" r where r.request_key = a.request_key);
alter table "{ledger}"."shards" add column route text;
alter table "{ledger}"."shards" add column route_reason text;
alter table "{ledger}"."shards" add column settings text;
alter table "{ledger}"."shards" add column account text;
alter table "{ledger}"."shards" add column uploaded text;
alter table "{ledger}"."shards" add column provider_batch_id text;
alter table "{ledger}"."shards" add column provider_state text;
alter table "{ledger}"."shards" add column provider_ok bigint;
alter table "{ledger}"."shards" add column provider_failed bigint;
alter table "{ledger}"."shards" add column end_state text;
alter table "{ledger}"."shards" add column fault text;
alter table "{ledger}"."shards" add column copied bigint;
alter table "{ledger}"."shards" add column error text;
alter table "{ledger}"."shards" add column intent_at timestamp with time zone;
alter table "{ledger}"."shards" add column intent_expires_at timestamp with time zone;
alter table "{ledger}"."shards" add column submitted_at timestamp with time zone;
alter table "{ledger}"."shards" add column checked_at timestamp with time zone;
alter table "{ledger}"."shards" add column ended_at timestamp with time zone;
alter table "{ledger}"."shards" add column results_until timestamp with time zone;
alter table "{ledger}"."shards" add column deadline_at timestamp with time zone;
alter table "{ledger}"."shards" add column cancel_requested_at timestamp with time zone;
alter table "{ledger}"."attempts" add column route text;
alter table "{ledger}"."attempts" add column cache_write_tokens bigint;
alter table "{ledger}"."attempts" add column reasoning_tokens bigint;
alter table "{ledger}"."attempts" add column copy_of uuid;
create table "{ledger}"."completions" (
    enrichment text not null , spec_version uuid not null,
    opened_at timestamp with time zone not null, fired_at timestamp with time zone);
alter table "{ledger}"."shards" add column worker text;
alter table "{ledger}"."shards" add column figures text;
alter table "{ledger}"."completions" add column telling_until timestamp with time zone;
create table "{ledger}"."queues" (
    enrichment text not null , run_id uuid not null, spec_version uuid not null,
    model text not null, route text not null, route_reason text, settings text not null,
    enqueued_at timestamp with time zone not null);
create table "{ledger}"."queued" (
    enrichment text not null, request_key uuid not null, position bigint not null,
    is_urgent boolean not null);
