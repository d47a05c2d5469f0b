"""Names of every kind, as inputs, as unique keys and as outputs."""

from __future__ import annotations

import pytest

from tests.support.project import Project
from tests.support.tables import quoted, rows_sql

INPUTS = {
    "select": "a reserved word",
    "Order": "a reserved word in mixed case",
    "userName": "mixed case",
    "with space": "a space",
    'User "Name"': "quotes",
    "it's": "an apostrophe",
    "Größe": "letters beyond ASCII",
    "a.b": "a dot",
    "100%": "a percent sign",
    "request_key": "a name in the ledger",
    "unique_key": "another one",
    "item_key": "a third",
    "k": "an alias in our SQL",
}
OUTPUTS = [
    "$x", "/x", "a.b.c", "when it", "Höhe", "group", "it''s", 'the "x"', "back\\slash", "$.x",
    "x[0]", "output", "*", "日本", "100 %",
]  # fmt: skip
PROMPT = """{{ select }} {{ Order }} {{ userName }} {{ row['with space'] }}
{{ row['User "Name"'] }} {{ row["it's"] }} {{ Größe }} {{ row['a.b'] }} {{ row['100%'] }} {{ n }}
{{ request_key }} {{ unique_key }} {{ item_key }} {{ k }}"""


@pytest.mark.parametrize("is_incremental", [False, True], ids=["table", "incremental"])
def test_names_of_every_kind_work(project: Project, is_incremental: bool) -> None:
    inputs, outputs, key, prompt = INPUTS, OUTPUTS, 'Key "1"', PROMPT
    if is_incremental:  # dbt's own merge fails on a name with quotes inside
        inputs = {name: value for name, value in INPUTS.items() if '"' not in name}
        outputs = [name for name in OUTPUTS if '"' not in name]
        key, prompt = "Key 1", PROMPT.replace("""{{ row['User "Name"'] }}""", "")
    project.write("prompts/label.md", prompt)
    project.model("tickets", rows_sql([{**inputs, "n": n, key: f"row {n}"} for n in range(4)]))
    project.model(
        "labels", "select * from {{ ref('tickets') }}",
        llm={
            "incremental": is_incremental,
            "returns": {name: {"type": "integer", "minimum": n} for n, name in enumerate(outputs)},
        },
        # dbt writes a unique key into its merge as it is, so an odd one is given in quotes.
        unique_key=quoted(key) if is_incremental else key,
    )  # fmt: skip
    first = project.run("run")
    assert first.ok, first.output
    assert len(project.sent()) == 4
    project.forget_sent()
    second = project.run("run")
    assert second.ok, second.output
    assert project.sent() == []
    target = project.target
    selected = ", ".join(quoted(name) for name in outputs)
    assert (
        target.query(f"select {selected} from {{schema}}.labels")
        == [tuple(range(len(outputs)))] * 4
    )
    assert target.query("select llm_status, count(*) from {schema}.labels group by 1") == [
        ("ok", 4)
    ]
    text = target.one("select min(messages) from {ledger}.requests")
    for value in inputs.values():
        assert value in text
    assert sorted(target.query("select unique_key from {ledger}.items")) == [
        (f"row {n}",) for n in range(4)
    ]
