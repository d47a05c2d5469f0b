"""Models that merge only what their SELECT returns, into the table of earlier runs."""

from __future__ import annotations

import uuid

from batchsql.types import Outcome
from batchsql.warehouse.duckdb import DuckDBWarehouse
from batchsql.warehouse.postgres import PostgresWarehouse, connect_adbc
from batchsql.warehouse.report import LedgerReport
from batchsql.warehouse.tables import LedgerTables
from tests.support.project import Project, Target
from tests.support.tables import rows_sql, tickets

NEW_TICKETS = """select * from {{ ref('tickets') }}
{% if batchsql.is_incremental() %}
where id > (select max(id) from {{ this }})
{% endif %}"""


def run(project: Project, *args: str) -> int:
    """Run dbt, which has to succeed; return how many requests it sent."""
    project.forget_sent()
    result = project.run("run", *args)
    assert result.ok, result.output
    return len(project.sent())


def table(project: Project, columns: str = "id, llm_status") -> list[tuple[object, ...]]:
    return project.target.query(f"select {columns} from {{schema}}.labels order by id")


def replay_dead_letters(target: Target) -> int:
    """Give every dead letter of the target's ledger a new budget."""
    if target.kind == "duckdb":
        import duckdb

        connection = duckdb.connect(target.profile["path"])
        warehouse = DuckDBWarehouse(connection.cursor(), "warehouse", connection.close)
    else:
        uri = f"host={target.profile['host']} user=postgres dbname=postgres"
        warehouse = PostgresWarehouse(lambda: connect_adbc(uri, None), "postgres")
    try:
        report = LedgerReport(LedgerTables(warehouse, target.ledger))
        return report.replay(str(uuid.uuid4()), None, None)
    finally:
        warehouse.close()


def test_older_rows_get_their_answers_though_the_select_skips_them(project: Project) -> None:
    project.model("tickets", rows_sql(tickets(6)))
    project.model("labels", NEW_TICKETS, llm={"incremental": True})
    assert run(project, "--vars", "{batchsql: {limit: 4}}") == 4
    assert sorted(status for _, status in table(project)) == ["ok"] * 4 + ["pending"] * 2
    project.model("tickets", rows_sql(tickets(8)))
    assert run(project) == 4
    assert table(project) == [(n, "ok") for n in range(1, 9)]
    # Nothing new: nothing is asked, nothing merged, nothing lost.
    project.forget_sent()
    result = project.run("run")
    assert result.ok, result.output
    assert project.sent() == []
    assert result.response("labels")["rows"] == 0
    assert table(project) == [(n, "ok") for n in range(1, 9)]
    # Rows that vanish from the source stay until a full refresh, which pays nothing.
    project.model("tickets", rows_sql(tickets(7, start=2)))
    assert run(project) == 0
    assert len(table(project)) == 8
    assert run(project, "--full-refresh") == 0
    assert table(project) == [(n, "ok") for n in range(2, 9)]


def test_model_that_is_not_incremental_keeps_all_rows(project: Project) -> None:
    project.model("tickets", rows_sql(tickets(3)))
    project.model("labels", NEW_TICKETS, llm={})
    assert run(project) == 3
    assert run(project) == 0
    assert table(project) == [(n, "ok") for n in (1, 2, 3)]
    # Where it is declared does not matter: here it comes from one run's vars.
    project.model("tickets", rows_sql(tickets(4)))
    assert run(project, "--vars", "{batchsql: {incremental: true}}") == 1
    assert table(project) == [(n, "ok") for n in (1, 2, 3, 4)]


def test_replayed_rows_come_back_by_themselves(project: Project) -> None:
    target = project.target
    project.model("tickets", rows_sql([*tickets(2), {"id": 3, "body": "@invalid"}]))
    project.model("labels", NEW_TICKETS, llm={"incremental": True})
    assert run(project) == 2 + 3
    assert table(project) == [(1, "ok"), (2, "ok"), (3, "failed")]
    assert run(project) == 0
    assert replay_dead_letters(target) == 1
    assert run(project) == 3
    assert table(project) == [(1, "ok"), (2, "ok"), (3, "failed")]
    assert (
        target.one(
            f"select count(*) from {{ledger}}.attempts where outcome = '{Outcome.INVALID.value}'"
        )
        == 6
    )
    # An answer that comes late, from whichever run, is built in the next one.
    target.query(
        "insert into {ledger}.results "
        "(request_key, output, checksum, attempt_id, state, created_at) "
        """select request_key, '{"category": "bug", "urgency": 4}', 'late', request_key, """
        "'accepted', now() from {ledger}.dead_letters"
    )
    assert run(project) == 0
    assert table(project, "id, llm_status, urgency = 4")[2] == (3, "ok", True)


def test_schema_change_and_two_unique_keys(project: Project) -> None:
    rows = [{"shop": shop, **row} for row in tickets(3) for shop in ("north", "south")]
    select = "select shop, id, body || shop as body{more} from {{{{ ref('tickets') }}}}"
    config = {"unique_key": ["shop", "id"], "on_schema_change": "append_new_columns"}
    project.model("tickets", rows_sql(rows))
    project.model("labels", select.format(more=""), llm={"incremental": True}, **config)
    assert run(project) == 6
    project.model("tickets", rows_sql([{**row, "body": "changed"} for row in rows[:2]]))
    project.model(
        "labels", select.format(more=", 'high' as priority"), llm={"incremental": True}, **config
    )
    assert run(project) == 2
    assert project.target.query(
        "select shop, id, body, priority, llm_status from {schema}.labels order by id, shop"
    ) == [
        ("north", 1, "changednorth", "high", "ok"),
        ("south", 1, "changedsouth", "high", "ok"),
        ("north", 2, "ticket 2north", None, "ok"),
        ("south", 2, "ticket 2south", None, "ok"),
        ("north", 3, "ticket 3north", None, "ok"),
        ("south", 3, "ticket 3south", None, "ok"),
    ]
    # A new output joins the table; older rows keep the answers they have.
    project.model(
        "labels", select.format(more=", 'high' as priority"),
        llm={"incremental": True, "returns": {
            "category": {"enum": ["billing", "bug", "other"]},
            "urgency": {"type": "integer", "minimum": 1, "maximum": 5},
            "language": {"enum": ["de", "en"]},
        }}, **config,
    )  # fmt: skip
    assert run(project) == 2
    assert project.target.query(
        "select count(*), count(category), count(language) from {schema}.labels"
    ) == [(6, 6, 2)]


def test_table_that_was_not_built_by_batchsql_is_not_merged_into(project: Project) -> None:
    project.model("labels", rows_sql(tickets(3)))
    assert run(project) == 0
    project.model("labels", rows_sql(tickets(3)), llm={"incremental": True})
    refused = project.run("run")
    assert not refused.ok
    assert "has no column llm_status" in refused.output
    assert "--full-refresh" in refused.output
    assert project.sent() == []
    assert len(table(project, "id")) == 3
    assert run(project, "--full-refresh") == 3
    assert table(project) == [(n, "ok") for n in range(1, 4)]
