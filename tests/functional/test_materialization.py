"""What dbt promises of a table holds for an llm model too."""

from __future__ import annotations

import json
import shutil
from typing import Any

from tests.support.project import Project
from tests.support.tables import rows_sql, tickets

ALL_TICKETS = "select * from {{ ref('tickets') }}"

RETURNS = {
    "category": {"enum": ["billing", "bug", "other"]},
    "urgency": {"type": "integer", "minimum": 1, "maximum": 5},
    "score": {"type": "number"},
    "is_spam": {"type": "boolean"},
    "due": {"type": "string", "format": "date"},
    "seen": {"type": "string", "format": "date-time"},
    "tags": {"type": "array", "items": {"type": "string"}},
}
# The table of docs/declaring.md: what each kind of output is in each warehouse.
TYPES = {
    "duckdb": {
        "id": "integer", "body": "varchar", "category": "varchar", "urgency": "bigint",
        "score": "double", "is_spam": "boolean", "due": "date", "seen": "timestamp with time zone",
        "tags": "json", "llm_status": "varchar", "llm_request_id": "varchar",
    },
    "postgres": {
        "id": "integer", "body": "text", "category": "text", "urgency": "bigint",
        "score": "double precision", "is_spam": "boolean", "due": "date",
        "seen": "timestamp with time zone", "tags": "jsonb", "llm_status": "text",
        "llm_request_id": "text",
    },
}  # fmt: skip


def write_columns(
    project: Project, types: dict[str, str], config: dict[str, Any] | None = None, **more: Any
) -> None:
    """Write the properties file of the model labels: a description and a type for each column."""
    columns = [
        {
            "name": name,
            "description": f"what {name} means",
            "data_type": data_type,
            **more.get(name, {}),
        }
        for name, data_type in types.items()
    ]
    model = {"name": "labels", "description": "labels of tickets", "config": config or {},
             "columns": columns}  # fmt: skip
    project.write_yaml("models/schema.yml", {"models": [model]})


def column_types(project: Project, table: str = "labels") -> dict[str, str]:
    return {
        name: kind.lower()
        for name, kind in project.target.query(
            "select column_name, data_type from information_schema.columns where "
            f"table_schema = '{{schema}}' and table_name = '{table}' order by ordinal_position"
        )
    }


def test_contract_comments_grants_and_constraints_hold(project: Project) -> None:
    target = project.target
    types = TYPES[target.kind]
    project.model("tickets", rows_sql(tickets(4)))
    config: dict[str, Any] = {
        "contract": {"enforced": True},
        "persist_docs": {"relation": True, "columns": True},
    }
    if target.kind == "postgres":
        target.query("drop role if exists reader; create role reader")
        config["grants"] = {"select": ["reader"]}
        config["indexes"] = [{"columns": ["llm_status"]}]
    # dbt knows the constraints of its own materializations only; without this it warns wrongly.
    not_null = {"id": {"constraints": [{"type": "not_null", "warn_unsupported": False}]}}
    project.model("labels", ALL_TICKETS, llm={"returns": RETURNS})
    write_columns(project, types, config, **not_null)
    result = project.run("--warn-error", "run")
    assert result.ok, result.output
    assert column_types(project) == types
    assert list(column_types(project)) == list(types)
    nullable = dict(target.query(
        "select column_name, is_nullable from information_schema.columns "
        "where table_schema = '{schema}' and table_name = 'labels'"
    ))  # fmt: skip
    assert (nullable["id"], nullable["category"]) == ("NO", "YES")
    if target.kind == "postgres":
        assert (
            target.one("select col_description('{schema}.labels'::regclass, 4)")
            == "what urgency means"
        )
        assert target.one("select has_table_privilege('reader', '{schema}.labels', 'select')")
        assert target.one("select count(*) from pg_indexes where schemaname = '{schema}' "
                          "and tablename = 'labels'") == 1  # fmt: skip
    else:
        comments = target.query(
            "select comment from duckdb_columns() "
            "where table_name = 'labels' and column_name = 'urgency'"
        )
        assert comments == [("what urgency means",)]

    # A contract that does not hold keeps the table of the last run, and what it paid for.
    project.model("tickets", rows_sql(tickets(6)))
    project.forget_sent()
    incomplete = {name: kind for name, kind in types.items() if name != "llm_request_id"}
    write_columns(project, {**incomplete, "id": "bigint"}, config)
    broken = project.run("run")
    assert not broken.ok
    assert "This model has an enforced contract that failed" in broken.output
    for problem in ("data type mismatch", "missing in contract"):
        assert problem in broken.output
    assert target.one("select count(*) from {schema}.labels") == 4
    assert len(project.sent()) == 2
    project.forget_sent()
    write_columns(project, types, config, **not_null)
    mended = project.run("run")
    assert mended.ok, mended.output
    assert project.sent() == []
    assert target.one("select count(*) from {schema}.labels where llm_status = 'ok'") == 6


def test_data_type_of_a_column_overrides_ours(project: Project) -> None:
    project.model("tickets", rows_sql(tickets(3)))
    project.model("labels", ALL_TICKETS, llm={})
    write_columns(project, {"urgency": "smallint", "category": "varchar(20)"})
    result = project.run("run")
    assert result.ok, result.output
    assert column_types(project)["urgency"] == "smallint"
    project.forget_sent()
    # A type that the answers do not fit fails the build, costs nothing and keeps the table.
    write_columns(project, {"category": "date"})
    wrong = project.run("run")
    assert not wrong.ok
    assert "Traceback" not in wrong.output
    assert column_types(project)["urgency"] == "smallint"
    assert project.sent() == []
    assert project.target.one("select count(*) from {ledger}.runs where state = 'running'") == 0
    leftovers = (
        "select table_name from information_schema.tables where table_name like '%candidate%'"
    )
    assert project.target.query(leftovers) == []


def test_hooks_run_once_and_the_select_sees_what_they_make(project: Project) -> None:
    log = "insert into {{ target.schema }}.hook_log values ('%s')"
    project.model(
        "labels", "select * from {{ target.schema }}.made_by_hook", llm={},
        pre_hook=[
            "create table if not exists {{ target.schema }}.hook_log (event varchar(10))",
            "drop table if exists {{ target.schema }}.made_by_hook",
            "create table {{ target.schema }}.made_by_hook as select 1 as id, 'a ticket' as body",
            log % "pre",
        ],
        post_hook=[log % "post", {"sql": log % "after", "transaction": False}],
    )  # fmt: skip
    project.model(
        "merged", "select 1 as id, 'a ticket' as body", llm={"incremental": True},
        pre_hook="create table if not exists {{ target.schema }}.second_log (event varchar(9))",
        post_hook="insert into {{ target.schema }}.second_log values ('post')",
    )  # fmt: skip
    for count in (1, 2):
        result = project.run("run")
        assert result.ok, result.output
        assert project.target.query(
            "select event, count(*) from {schema}.hook_log group by 1 order by 1"
        ) == [("after", count), ("post", count), ("pre", count)]
        assert project.target.one("select count(*) from {schema}.second_log") == count
    assert len(project.sent()) == 1
    assert project.target.query("select id, llm_status from {schema}.labels") == [(1, "ok")]


def test_dbt_commands_work_on_llm_models(project: Project) -> None:
    target = project.target
    project.model("tickets", rows_sql(tickets(3)))
    project.model("labels", ALL_TICKETS, llm={})
    project.model("literal", "select 1 as id, 'a row of its own' as body", llm={})
    project.model(
        "by_category", "select category, count(*) as n from {{ ref('labels') }} group by 1"
    )
    project.write_yaml("models/schema.yml", {"models": [{"name": "labels", "columns": [
        {"name": "id", "data_tests": ["unique", "not_null"]},
        {"name": "category", "data_tests": [
            {"accepted_values": {"arguments": {"values": ["billing", "bug", "other"]}}}
        ]},
    ]}]})  # fmt: skip
    # Nothing but a run sends anything.
    listed = project.run("ls", "--resource-type", "model", "--output", "name")
    assert listed.ok and "labels" in listed.output.split()
    for command in (["parse"], ["compile"], ["run", "--empty"]):
        result = project.run(*command)
        assert result.ok, result.output
    assert project.sent() == []
    expected = ["id", "body", "category", "urgency", "llm_status", "llm_request_id"]
    for name in ("labels", "literal"):
        assert list(column_types(project, name)) == expected
    assert target.one("select count(*) from {schema}.labels") == 0
    empty_types = column_types(project)

    built = project.run("build", "--select", "labels+", "literal")
    assert built.ok, built.output
    assert len(project.sent()) == 3 + 1
    assert column_types(project) == empty_types
    assert target.one("select sum(n) from {schema}.by_category") == 3
    response = built.response("labels")
    assert {key: response[key] for key in ("rows", "new", "ok", "pending", "requests_sent")} == {
        "rows": 3, "new": 3, "ok": 3, "pending": 0, "requests_sent": 3
    }  # fmt: skip
    assert response["input_tokens"] == 30 and response["output_tokens"] == 15
    assert "LLM 3 rows, 3 requests" in built.output

    project.forget_sent()
    shown = project.run("show", "-s", "labels")
    assert shown.ok and "ticket 1" in shown.output
    docs = project.run("docs", "generate")
    assert docs.ok, docs.output
    catalog = json.loads((project.root / "target" / "catalog.json").read_text())
    assert [name.lower() for name in catalog["nodes"]["model.shop.labels"]["columns"]] == expected
    assert project.sent() == []


def test_retry_goes_on_after_a_failure(project: Project) -> None:
    project.model("labels", rows_sql([*tickets(3), {"id": 9, "body": "@systemic"}]), llm={})
    project.model(
        "by_category", "select category, count(*) as n from {{ ref('labels') }} group by 1"
    )
    failed = project.run("run")
    assert not failed.ok
    answered = len(project.sent()) - 1
    project.model("labels", rows_sql(tickets(4)), llm={})
    project.forget_sent()
    shutil.copytree(project.root / "target", project.root / "failed")
    retried = project.run("retry", "--state", str(project.root / "failed"))
    assert retried.ok, retried.output
    assert len(project.sent()) == 4 - answered
    assert project.target.one("select sum(n) from {schema}.by_category") == 4


def test_selects_of_every_shape_work_side_by_side(project: Project) -> None:
    bodies = {
        "trailing_comment": "select * from {{ ref('tickets') }} -- the end",
        "trailing_semicolon": "select * from {{ ref('tickets') }} ;\n\n",
        "trailing_both": "select * from {{ ref('tickets') }}; -- the end;",
        "leading_with": "-- first\nwith t as (select * from {{ ref('tickets') }})\nselect * from t",
        "upstream_ephemeral": "select * from {{ ref('ephemeral_tickets') }}",
        "ordered": "select * from {{ ref('tickets') }} order by id desc limit 2",
        "whole_union": "select * from {{ ref('tickets') }} where id = 1 union all select 2, 'b'",
    }
    project.model("tickets", rows_sql(tickets(3)))
    project.model("ephemeral_tickets", ALL_TICKETS, materialized="ephemeral")
    for name, select in bodies.items():
        project.model(name, select, llm={})
        merged = select.replace("order by id desc limit 2", "")
        project.model(f"{name}_merged", merged, llm={"incremental": True})
    project.model("elsewhere", ALL_TICKETS, llm={}, alias="other name", schema="marts")
    project.model(
        "reasoned", ALL_TICKETS,
        llm={"returns": {
            "why": {"type": "string", "hidden": True}, "category": {"enum": ["a", "b"]},
        }},
    )  # fmt: skip
    for _ in range(2):
        result = project.run("run", "--threads", "4")
        assert result.ok, result.output
    # Every model but one asks the same questions: three tickets, and one of the union's own.
    assert len(project.sent()) == len(set(project.sent())) == 3 + 1 + 3
    target = project.target
    for name in bodies:
        rows = 2 if name in ("ordered", "whole_union") else 3
        query = f"select count(*) from {{schema}}.{name} where llm_status = 'ok'"
        assert target.one(query) == rows, name
    assert (
        target.one("select count(*) from {schema}_marts.\"other name\" where llm_status = 'ok'")
        == 3
    )
    # A hidden output is asked for and kept in the ledger, but is no column.
    assert list(column_types(project, "reasoned")) == [
        "id", "body", "category", "llm_status", "llm_request_id"
    ]  # fmt: skip
    assert (
        target.one(
            "select count(*) from {ledger}.results r join {schema}.reasoned l on "
            "replace(r.request_key::varchar, '-', '') = l.llm_request_id where output->>'why' <> ''"
        )
        == 3
    )
    target.query('drop schema "{schema}_marts" cascade')
