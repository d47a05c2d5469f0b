create schema if not exists "{schema}";
create type "{schema}".mood as enum ('calm', 'angry');
create type "{schema}".visit as struct(page varchar, score double);
create table "{schema}".tickets (
    id integer, kind varchar, body varchar, short varchar(10), code char(5), small smallint, n integer,
    big bigint, price decimal(10, 2), ratio double, single_ratio real, flag boolean, day date,
    moment timestamp, instant timestamp with time zone, clock time, clock_zone time with time zone,
    span interval, bytes blob, bits bit, token uuid, mood "{schema}".mood, doc json, doc_b json,
    tags varchar[], grid integer[][], days date[], visit "{schema}".visit
);
