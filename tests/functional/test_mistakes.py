"""Mistakes are told all at once, before anything is sent, and leave the last table as it is."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.project import DbtResult, Project
from tests.support.tables import rows_sql, tickets

ALL_TICKETS = "select * from {{ ref('tickets') }}"

# A name for the model, what is wrong in its declaration, and texts that the message holds.
DECLARATIONS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("unknown_key", {"promt": "x"}, ["promt: unknown key", "did you mean prompt?"]),
    ("unknown_provider", {"model": "opnai/gpt"}, ["the provider 'opnai'", "fake, google, local"]),
    ("no_provider", {"model": "gpt"}, ["model: got 'gpt'; write provider/name"]),
    ("missing_file", {"prompt": "prompts/gone.md"}, ["there is no file 'prompts/gone.md'"]),
    ("outside_file", {"prompt": "../secret.md"}, ["'../secret.md'", "outside the project"]),
    ("absolute_file", {"prompt": "/etc/hostname"}, ["'/etc/hostname'", "outside the project"]),
    ("bad_syntax", {"prompt": "prompts/syntax.md"}, ["prompt prompts/syntax.md: ", "line 3"]),
    ("no_column", {"prompt": "prompts/constant.md"}, ["constant.md", "refers to no column"]),
    ("rendered_away", {"prompt": "Label this ticket: "}, ["in a YAML file dbt renders"]),
    ("rendered_long", {"prompt": "Label this ticket. " * 30},
     ["prompt: cannot read a file 'Label this", "in a YAML file dbt renders"]),
    ("directory", {"prompt": "prompts"}, ["there is no file 'prompts' in the project"]),
    ("nul_file", {"prompt": "a\0b"}, ["prompt: cannot read a file 'a"]),
    ("bad_keyword", {"returns": {"a": {"type": "string", "pattern": "x"}}},
     ["returns.a.pattern: unsupported schema keyword; supported: type"]),
    ("long_output", {"returns": {"ö" * 32: {"type": "string"}}}, ["64 bytes; at most 63"]),
    ("no_unique_key", {"incremental": True}, ["unique_key: is missing; an incremental model"]),
    ("wrong_types",
     {"limit": "five", "max_attempts": 0, "incremental": "yes", "returns": []},
     ["limit: got 'five'; wanted is a whole number", "max_attempts: got 0; wanted is a whole",
      "incremental: got 'yes'; wanted is true or false", "returns: got []"]),
    ("unknown_parameter", {"params": {"temprature": 1}},
     ["temprature: got 1, but nothing", "did you mean temperature?"]),
    ("unknown_limit", {"params": {"max_token": 5}},
     ["max_token: got 5, but nothing", "did you mean max_tokens?"]),
    ("bad_normalize", {"normalize": "lower"}, ["normalize: got 'lower'; accepted: none, standard"]),
]  # fmt: skip


def test_all_declarations_are_checked_at_once_before_anything_runs(project: Project) -> None:
    project.write("prompts/syntax.md", "one\ntwo\n{% if body %}\n")
    project.write("prompts/constant.md", "Say something nice.\n")
    project.model("tickets", rows_sql(tickets(2)))
    for name, wrong, _ in DECLARATIONS:
        config = {"unique_key": None} if name == "no_unique_key" else {}
        project.model(name, ALL_TICKETS, llm=wrong, **config)
    project.model(
        "bare_call", ALL_TICKETS + "{% if is_incremental() %} where false {% endif %}", llm={}
    )
    project.model("nothing", ALL_TICKETS, materialized="llm")
    project.model("right", ALL_TICKETS, llm={})
    for command in ("run", "compile"):
        result = project.run(command)
        assert not result.ok
        assert "Traceback" not in result.output
        for name, _, texts in DECLARATIONS:
            message = message_of(result, name)
            for text in texts:
                assert text in message, (name, text, message)
        assert "batchsql.is_incremental()" in message_of(result, "bare_call")
        assert "meta.llm: is missing" in message_of(result, "nothing")
        assert "right:" not in result.output
        told = re.findall(r"(\w+): \d+ mistakes? in the declaration", result.output)
        in_order = list(dict.fromkeys(told))  # the text may be printed more than once
        assert len(in_order) > len(DECLARATIONS)
        assert in_order == sorted(in_order)
    assert project.sent() == []
    assert (
        project.target.query(
            "select table_name from information_schema.tables "
            "where table_schema in ('{schema}', '{ledger}')"
        )
        == []
    )


def message_of(result: DbtResult, model: str) -> str:
    """Return the part of the output that is about one model."""
    start = result.output.index(f"{model}: ")
    lines = result.output[start:].splitlines()
    return "\n".join([lines[0], *_until_next(lines[1:])])


def _until_next(lines: list[str]) -> list[str]:
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("- "):
            return lines[:number]
    return lines


@pytest.mark.parametrize("target", ["duckdb"], indirect=True)
def test_prompt_in_yaml_that_dbt_renders_away_is_told(project: Project) -> None:
    project.model("tickets", rows_sql(tickets(2)))
    project.write("models/labels.sql", ALL_TICKETS)
    llm = {"model": "fake/labeller", "returns": {"category": {"enum": ["a", "b"]}}}
    config = {"materialized": "llm", "unique_key": "id", "meta": {"llm": llm}}
    llm["prompt"] = "Label\n{{ body }}\n"
    project.write_yaml("models/schema.yml", {"models": [{"name": "labels", "config": config}]})
    result = project.run("run")
    assert not result.ok
    assert "refers to no column" in result.output
    assert "in a YAML file dbt renders it to nothing" in " ".join(result.output.split())
    # The same declaration works from YAML once the prompt is a file; one mistake in --vars is told.
    llm["prompt"] = "prompts/label.md"
    project.write_yaml("models/schema.yml", {"models": [{"name": "labels", "config": config}]})
    wrong = project.run("run", "--vars", "{batchsql: {limt: 5, flush_rows: 0}}")
    assert not wrong.ok
    assert "limt: unknown key with value 5; did you mean limit?" in wrong.output
    assert "flush_rows: got 0" in wrong.output
    no_map = project.run("run", "--vars", "{batchsql: 5}")
    assert not no_map.ok
    assert "vars.batchsql: got 5, a mapping of keys is wanted" in no_map.output
    assert (
        project.target.query(
            "select table_name from information_schema.tables where table_schema = '{schema}'"
        )
        == []
    )
    right = project.run("run")
    assert right.ok, right.output


def test_mistakes_that_need_the_rows_leave_the_last_table_as_it_is(project: Project) -> None:
    models: list[tuple[str, str, dict[str, Any], dict[str, Any], list[str]]] = [
        ("missing_column", "select id, state from {{ ref('tickets') }}", {}, {},
         ["prompt: ", "body", "state"]),
        ("collision", "select *, 1 as Urgency from {{ ref('tickets') }}", {}, {},
         ["returns.urgency: the model selects a column", "already"]),
        ("own_column", "select *, 1 as llm_status from {{ ref('tickets') }}", {}, {},
         ["column llm_status", "batchsql adds a column of this name"]),
        ("missing_key", ALL_TICKETS, {}, {"unique_key": "nr"},
         ["unique_key: the model does not select 'nr'", "id"]),
        ("duplicate_key", "select 7 as id, body from {{ ref('tickets') }} where id < 3", {}, {},
         ["the unique key id is not unique, for example 7 (2 times)"]),
        ("duplicate_keys", "select 7 as id, 'x' as shop, body from {{ ref('tickets') }}", {},
         {"unique_key": ["id", "shop"]},
         ["the unique key id, shop is not unique, for example 7, x (3 times)"]),
        ("null_key", "select nullif(id, 2) as id, body from {{ ref('tickets') }}", {}, {},
         ["the unique key id is NULL in 1 rows"]),
        ("bad_row", "select * from {{ ref('tickets') }}", {"prompt": "prompts/divide.md"}, {},
         ["the prompt cannot be rendered for the row 2", "nothing was sent"]),
        ("urgent_column", ALL_TICKETS, {"urgent_when": "prio = 'high'"}, {},
         ["urgent_when: the warehouse refuses the condition: ", "prio"]),
        ("urgent_number", ALL_TICKETS, {"urgent_when": "id"}, {},
         ["urgent_when: the warehouse refuses the condition: "]),
        ("bad_sql", "select nothing from {{ ref('tickets') }}", {}, {}, ["nothing"]),
        ("late_error", "select *, cast(body as integer) as n from {{ ref('tickets') }}", {}, {},
         ["ticket 1"]),
    ]  # fmt: skip
    project.write("prompts/divide.md", "{{ body }} {{ 6 // (id - 2) }}")
    project.model("tickets", rows_sql(tickets(3, state="new")))
    for name, *_ in models:
        project.model(name, ALL_TICKETS, llm={})
    first = project.run("run")
    assert first.ok, first.output
    tables = "select table_name from information_schema.tables where table_schema = '{schema}'"
    before = sorted(project.target.query(tables))
    project.forget_sent()
    for name, select, llm, config, _ in models:
        project.model(name, select, llm=llm, **config)
    result = project.run("run")
    assert not result.ok
    assert "Traceback" not in result.output
    for name, _, _, _, texts in models:
        message = result.nodes[f"model.shop.{name}"]["message"]
        for text in texts:
            assert text in message, (name, text, message)
        # The table of the run before is still there, whole.
        assert project.target.query(
            f"select count(*), count(category) from {{schema}}.{name} where llm_status = 'ok'"
        ) == [(3, 3)]
    assert project.sent() == []
    assert sorted(project.target.query(tables)) == before
    leftovers = (
        "select table_name from information_schema.tables where table_name like '%candidate%'"
    )
    assert project.target.query(leftovers) == []
    assert project.target.one("select count(*) from {ledger}.runs where state = 'running'") == 0
