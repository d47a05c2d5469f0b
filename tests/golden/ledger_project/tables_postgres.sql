create schema if not exists "{schema}";
create type "{schema}".mood as enum ('calm', 'angry');
create type "{schema}".visit as (page text, score double precision);
create table "{schema}".tickets (
    id integer, kind text, body text, short varchar(10), code char(5), small smallint, n integer,
    big bigint, price decimal(10, 2), ratio double precision, single_ratio real, flag boolean, day date,
    moment timestamp, instant timestamp with time zone, clock time, clock_zone time with time zone,
    span interval, bytes bytea, bits bit(4), token uuid, mood "{schema}".mood, doc json, doc_b jsonb,
    tags text[], grid integer[][], days date[], visit "{schema}".visit
);
