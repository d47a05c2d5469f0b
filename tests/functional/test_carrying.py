"""Exports and imports of a ledger, and what is recovered without one: nothing is paid for twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from batchsql import cli
from batchsql.carrying import exporting
from batchsql.carrying.exporting import Exported, export_ledger
from batchsql.carrying.importing import Imported, import_ledger
from batchsql.carrying.manifest import CarryingError
from batchsql.emulate import Behaviour, Emulator, Rule
from batchsql.errors import LedgerVersionError
from batchsql.warehouse.ledger import Ledger
from batchsql.warehouse.tables import LEDGER_VERSION
from tests.support import points
from tests.support.lean import Forks, Job, connect, run_job
from tests.support.ledger_fixture import fixture_folder, load_ledger
from tests.support.project import Project, Target, duckdb_target, postgres_target
from tests.support.tables import rows_sql, tickets

pytest.importorskip("openai")

BODIES = ["printer on fire", "bill too high", 'a "quote"', "@filter", "@flaky late", "naïve 漢"]
KEY = "sk-rehearsal-0123456789"
BATCH_MODELS = ["openai/gpt-5-mini", "anthropic/claude-haiku-4-5", "google/gemini-2.5-flash"]
TABLES = ("specs", "items", "requests", "attempts", "results", "shards", "runs")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REHEARSAL_API_KEY", KEY)


@pytest.fixture
def duck(tmp_path: Path) -> Target:
    return duckdb_target(tmp_path / "warehouse.duckdb")


@pytest.fixture
def other_duck(tmp_path: Path) -> Target:
    return duckdb_target(tmp_path / "other.duckdb")


@pytest.fixture(params=["duckdb to duckdb", "duckdb to postgres", "postgres to duckdb"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Target, Target]]:
    """A warehouse to export from and an empty one to import into."""
    made = [
        duckdb_target(tmp_path / f"{number}.duckdb")
        if kind == "duckdb"
        else postgres_target(request.getfixturevalue("postgres_uri"))
        for number, kind in enumerate(request.param.split(" to "))
    ]
    yield made[0], made[1]
    for each in made:
        if each.kind == "postgres":
            each.drop()


def job_on(target: Target, tmp_path: Path, bodies: list[str] | None = None, **more: Any) -> Job:
    return Job(target, str(tmp_path / "sent.log"), bodies or BODIES, **more)


def export_from(target: Target, folder: Path, **options: Any) -> Exported:
    with connect(Job(target, "", [])) as (_, warehouse, _, _):
        return export_ledger(Ledger(warehouse, target.ledger), folder, **options)


def import_into(target: Target, folder: Path) -> Imported:
    with connect(Job(target, "", [])) as (_, warehouse, _, _):
        return import_ledger(Ledger(warehouse, target.ledger), folder)


def sent(tmp_path: Path) -> list[str]:
    log = tmp_path / "sent.log"
    return log.read_text().split() if log.exists() else []


def counts(target: Target) -> dict[str, int]:
    return {name: target.one(f"select count(*) from {{ledger}}.{name}") for name in TABLES}


def make_old(target: Target) -> None:
    """Let all that the ledger holds have been written two days ago."""
    for table, column in (
        ("specs", "first_used_at"), ("items", "first_seen_at"), ("requests", "created_at"),
        ("attempts", "recorded_at"), ("results", "created_at"),
    ):  # fmt: skip
        target.query(f"update {{ledger}}.{table} set {column} = {column} - interval '2 days'")


# --- export and import ----------------------------------------------------------------------------


def test_imported_ledger_sends_nothing(pair: tuple[Target, Target], tmp_path: Path) -> None:
    source, target = pair
    run_job(job_on(source, tmp_path))
    before = sent(tmp_path)
    export_from(source, tmp_path / "export")
    done = import_into(target, tmp_path / "export")
    assert done.open_batches == 0
    assert counts(target) == counts(source)
    answers = (
        "select cast(request_key as text), checksum, cast(attempt_id as text), state "
        "from {ledger}.results order by 1"
    )
    tries = (
        "select cast(attempt_id as text), attempt_number, outcome, is_final, error, raw_output, "
        "input_tokens, cast(round(extract(epoch from recorded_at) * 1000) as bigint) "
        "from {ledger}.attempts order by 1"
    )
    for query in (answers, tries, "select count(*) from {ledger}.dead_letters"):
        assert target.query(query) == source.query(query)
    labels = "select id, category, urgency, llm_status from {schema}.labels order by id"
    result = run_job(job_on(target, tmp_path))
    assert (result.ok, result.failed, result.pending) == (len(BODIES) - 1, 1, 0)
    assert target.query(labels) == source.query(labels)
    assert sent(tmp_path) == before


def test_import_can_be_repeated_and_keeps_what_is_there(
    pair: tuple[Target, Target], tmp_path: Path
) -> None:
    source, target = pair
    run_job(job_on(source, tmp_path))
    export_from(source, tmp_path / "export")
    run_job(job_on(target, tmp_path, ["printer on fire", "only here"]))
    own = target.query("select cast(attempt_id as text) from {ledger}.results order by 1")
    import_into(target, tmp_path / "export")
    first = counts(target)
    # The one question that both had asked has one answer: the target's own.
    assert first["results"] == len(BODIES) - 1 + 1
    kept = target.query("select cast(attempt_id as text) from {ledger}.results")
    assert set(own) <= set(kept)
    assert not any(import_into(target, tmp_path / "export").rows.values())
    assert counts(target) == first


def test_later_export_writes_only_what_is_new(target: Target, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    run_job(job_on(target, tmp_path, ["one", "two"]))
    make_old(target)
    first = export_from(target, folder)
    assert first.is_first
    assert (first.rows["results"], first.rows["runs"]) == (2, 1)
    run_job(job_on(target, tmp_path, ["one", "two", "three"]))
    later = export_from(target, folder)
    assert not later.is_first
    assert {name: later.rows[name] for name in ("results", "requests", "items", "attempts")} == {
        "results": 1, "requests": 1, "items": 1, "attempts": 1,
    }  # fmt: skip
    assert later.rows["runs"] == 2, "runs change, so they are written whole"
    names = [each.name for each in folder.iterdir()]
    assert [name for name in sorted(names) if name.startswith(("results", "runs"))] == [
        "results.00001.0001.parquet", "results.00002.0001.parquet", "runs.00002.0001.parquet",
    ]  # fmt: skip
    other = duckdb_target(tmp_path / "copy.duckdb")
    import_into(other, folder)
    assert counts(other) == counts(target)


def test_first_export_can_leave_out_old_rows(duck: Target, tmp_path: Path) -> None:
    run_job(job_on(duck, tmp_path, ["one", "two"]))
    make_old(duck)
    run_job(job_on(duck, tmp_path, ["three"]))
    done = export_from(duck, tmp_path / "export", since_seconds=3600.0)
    assert (done.rows["results"], done.rows["runs"]) == (1, 2)


def test_large_table_is_split_into_files(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "_FILE_ROWS", 3)
    monkeypatch.setattr(exporting, "_FILE_BYTES", 1)
    monkeypatch.setattr(exporting, "_READ_ROWS", 2)
    run_job(job_on(target, tmp_path, [f"ticket {n}" for n in range(7)]))
    told = []
    export_from(target, tmp_path / "export", on_rows=lambda *args: told.append(args))
    if target.kind == "duckdb":  # the other driver gives so few rows in one piece
        assert len(list((tmp_path / "export").glob("results.*"))) > 1
    assert ("results", 7, 7) in told
    other = duckdb_target(tmp_path / "copy.duckdb")
    import_into(other, tmp_path / "export")
    assert counts(other) == counts(target)


def test_folder_of_an_export_that_died_is_as_before(
    duck: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "export"
    run_job(job_on(duck, tmp_path, ["one", "two"]))
    export_from(duck, folder)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    run_job(job_on(duck, tmp_path, ["one", "two", "three"]))
    publish = exporting.publish
    for fatal in range(1, 9):
        left = [fatal]

        def die(temporary: Path, name: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            publish(temporary, name)

        monkeypatch.setattr(exporting, "publish", die)
        with pytest.raises(KeyboardInterrupt):
            export_from(duck, folder)
        assert {name: (folder / name).read_bytes() for name in whole} == whole
        copy = duckdb_target(tmp_path / f"copy{fatal}.duckdb")
        assert import_into(copy, folder).rows["results"] == 2
    monkeypatch.undo()
    export_from(duck, folder)
    named = json.loads((folder / "manifest.json").read_text())["tables"]
    listed = {file["name"] for table in named.values() for file in table["files"]}
    assert {path.name for path in folder.iterdir()} == {"manifest.json", *listed}
    copy = duckdb_target(tmp_path / "copy.duckdb")
    assert import_into(copy, folder).rows["results"] == 3


def _import_killed(target: Target, folder: str, kill_at: str) -> None:
    points.watch()
    points.arm(kill_at)
    import_into(target, Path(folder))


def test_killed_import_goes_on(
    forks: Forks, duck: Target, emulator: Emulator, tmp_path: Path
) -> None:
    folder = tmp_path / "export"
    run_job(job_on(duck, tmp_path))
    run_job(batch_job(duck, tmp_path, emulator, ["in flight", "in flight too"]))
    export_from(duck, folder)
    killed = 0
    for number in range(1, 40, 3):
        target = duckdb_target(tmp_path / f"target{number}.duckdb")
        if forks.start(_import_killed, target, str(folder), f"ledger:{number}").wait() == 0:
            break
        killed += 1
        import_into(target, folder)
        assert counts(target) == counts(duck)
        claims = (
            "select c.request_key, s.state, s.requests from {ledger}.claims c "
            "join {ledger}.shards s on s.shard_id = c.shard_id order by 1"
        )
        assert target.query(claims) == duck.query(claims)
    assert killed >= 6, "the points were not reached"


@pytest.mark.parametrize("kind", ["duckdb", "postgres"])
def test_older_ledger_is_exported_as_it_is(
    kind: str, duck: Target, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    old = duck if kind == "duckdb" else postgres_target(request.getfixturevalue("postgres_uri"))
    load_ledger(fixture_folder(1), old)
    export_from(old, tmp_path / "export")
    assert old.one("select max(ledger_version) from {ledger}.meta") == 1
    new = duckdb_target(tmp_path / "new.duckdb")
    import_into(new, tmp_path / "export")
    assert new.one("select max(ledger_version) from {ledger}.meta") == LEDGER_VERSION
    assert counts(new) == counts(old)
    assert counts(new)["results"] > 0
    assert new.one("select count(route) from {ledger}.attempts") == 0
    if kind == "postgres":
        old.drop()


# --- what is refused ------------------------------------------------------------------------------


def exported(duck: Target, tmp_path: Path) -> Path:
    run_job(job_on(duck, tmp_path, ["one"]))
    export_from(duck, tmp_path / "export")
    return tmp_path / "export"


def test_export_of_a_newer_ledger_is_refused(
    duck: Target, other_duck: Target, tmp_path: Path
) -> None:
    folder = exported(duck, tmp_path)
    document = json.loads((folder / "manifest.json").read_text())
    changed = {**document, "ledger_version": LEDGER_VERSION + 1, "batchsql_version": "9.9"}
    (folder / "manifest.json").write_text(json.dumps({**changed, "news": 1}))
    with pytest.raises(LedgerVersionError, match=r"written by batchsql 9\.9|by batchsql 9\.9"):
        import_into(other_duck, folder)
    with pytest.raises(LedgerVersionError):
        export_from(duck, folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("manifest.json", b"{", "is not the manifest"),
        ("manifest.json", b"[]", "is not the manifest"),
        ("manifest.json", b'{"ledger_version": 1}', "is not the manifest"),
        ("results.00001.0001.parquet", b"PAR1", "results.00001.0001.parquet cannot be read"),
        ("results.00001.0001.parquet", None, "results.00001.0001.parquet cannot be read"),
    ],
)
def test_damaged_export_is_refused_before_anything_is_written(
    duck: Target, other_duck: Target, tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    folder = exported(duck, tmp_path)
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    with pytest.raises(CarryingError, match=message):
        import_into(other_duck, folder)
    with connect(Job(other_duck, "", [])) as (_, warehouse, _, _):
        assert not Ledger(warehouse, other_duck.ledger).exists()


def test_file_that_lacks_rows_is_refused(duck: Target, other_duck: Target, tmp_path: Path) -> None:
    folder = exported(duck, tmp_path)
    (file,) = folder.glob("results.*")
    pq.write_table(pq.read_table(file).slice(0, 0), file)
    with pytest.raises(CarryingError, match=r"has 0 rows, manifest\.json says 1"):
        import_into(other_duck, folder)


def test_manifest_that_names_a_file_elsewhere_is_refused(
    duck: Target, other_duck: Target, tmp_path: Path
) -> None:
    folder = exported(duck, tmp_path)
    text = (folder / "manifest.json").read_text()
    moved = text.replace("results.00001.0001.parquet", "../results.00001.0001.parquet")
    (folder / "manifest.json").write_text(moved)
    with pytest.raises(CarryingError, match="is not the manifest"):
        import_into(other_duck, folder)


def test_folder_with_other_things_is_left_alone(duck: Target, tmp_path: Path) -> None:
    run_job(job_on(duck, tmp_path, ["one"]))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(CarryingError, match=r"holds notes\.txt but no manifest\.json"):
        export_from(duck, tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_two_ledgers_do_not_share_a_folder(
    duck: Target, other_duck: Target, tmp_path: Path
) -> None:
    folder = exported(duck, tmp_path)
    run_job(job_on(other_duck, tmp_path, ["one"]))
    with pytest.raises(CarryingError, match="holds an export of another ledger"):
        export_from(other_duck, folder)


# --- batches in flight ----------------------------------------------------------------------------


def batch_job(target: Target, tmp_path: Path, emulator: Emulator, bodies: list[str]) -> Job:
    return job_on(
        target, tmp_path, bodies, model="openai/gpt-5-mini",
        engine={"base_url": emulator.openai_base_url, "api_key_env": "REHEARSAL_API_KEY"},
        options={"route": "batch"},
    )  # fmt: skip


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    with Emulator() as started:
        yield started


def test_batches_in_flight_are_collected_by_the_new_ledger(
    pair: tuple[Target, Target], emulator: Emulator, tmp_path: Path
) -> None:
    source, target = pair
    bodies = [f"ticket {n}" for n in range(12)]
    submitted = run_job(batch_job(source, tmp_path, emulator, bodies))
    assert submitted.pending == 12
    # As if another process were looking after it just now; nobody of the new ledger can be.
    source.query(
        "update {ledger}.shards set owner = 'other', "
        "lease_expires_at = lease_expires_at + interval '1 day'"
    )
    export_from(source, tmp_path / "export")
    done = import_into(target, tmp_path / "export")
    assert (done.open_batches, done.in_batches) == (1, 12)
    assert import_into(target, tmp_path / "export").open_batches == 0
    waiting = run_job(batch_job(target, tmp_path, emulator, bodies))
    assert waiting.pending == 12, "they are in a batch already"
    emulator.advance(stage="end")
    result = run_job(batch_job(target, tmp_path, emulator, bodies))
    assert (result.ok, result.pending) == (12, 0)
    assert len(emulator.bill.charges) == 12
    assert target.one("select state from {ledger}.shards where route = 'batch'") == "collected"


def test_answers_that_are_there_are_not_waited_for(
    duck: Target, other_duck: Target, emulator: Emulator, tmp_path: Path
) -> None:
    bodies = [f"ticket {n}" for n in range(6)]
    job = batch_job(other_duck, tmp_path, emulator, bodies[:2])
    run_job(job)
    emulator.advance(stage="end")
    run_job(job)
    run_job(batch_job(duck, tmp_path, emulator, bodies))
    export_from(duck, tmp_path / "export")
    done = import_into(other_duck, tmp_path / "export")
    assert (done.open_batches, done.in_batches) == (1, 4)
    submitted = "select requests from {ledger}.shards where state = 'submitted'"
    assert other_duck.one(submitted) == 4
    emulator.advance(stage="end")
    result = run_job(batch_job(other_duck, tmp_path, emulator, bodies))
    assert (result.ok, result.pending) == (6, 0)


def test_export_says_that_work_goes_on(duck: Target, tmp_path: Path) -> None:
    run_job(job_on(duck, tmp_path, ["one"]))
    assert export_from(duck, tmp_path / "export").working == 0
    duck.query(
        "update {ledger}.shards set state = 'running', lease_expires_at = now() + interval '1 hour'"
    )
    assert export_from(duck, tmp_path / "export").working == 1


# --- the commands ---------------------------------------------------------------------------------


def call(project: Project, *args: str) -> Result:
    place = ["--project-dir", str(project.root), "--profiles-dir", str(project.root)]
    return CliRunner().invoke(cli.main, [*args, *place])


def test_commands_carry_a_project_to_another_target(
    project: Project, other_duck: Target, tmp_path: Path
) -> None:
    folder = str(tmp_path / "backup")
    missing = call(project, "export", folder)
    assert missing.exit_code == 1
    assert "there is no ledger in the schema" in missing.stderr
    project.model("tickets", rows_sql(tickets(4)))
    project.model("labels", "select * from {{ ref('tickets') }}", llm={})
    assert project.run("run").ok
    document = json.loads(call(project, "export", folder, "--json").stdout)
    assert (document["rows"]["results"], document["is_first"]) == (4, True)
    assert "Added to the export" in call(project, "export", folder).stdout
    profile = {"dev": dict(project.target.profile), "new": dict(other_duck.profile)}
    project.write_yaml("profiles.yml", {"shop": {"target": "dev", "outputs": profile}})
    result = call(project, "import", folder, "--target", "new")
    assert result.exit_code == 0, result.output
    lines = dict(line.split() for line in result.stdout.splitlines() if len(line.split()) == 2)
    assert lines["results"] == "4"
    project.forget_sent()
    assert project.run("run", "--target", "new").ok
    assert project.sent() == []
    empty = call(project, "import", str(tmp_path / "project" / "models"))
    assert empty.exit_code == 1
    assert "no export" in empty.stderr


def test_several_ledgers_ask_which_one(project: Project, tmp_path: Path) -> None:
    project.model("tickets", rows_sql(tickets(1)))
    place = f"{project.target.schema}_elsewhere"
    project.model("labels", "select * from {{ ref('tickets') }}", llm={"ledger_schema": place})
    assert project.run("run").ok
    result = call(project, "export", str(tmp_path / "backup"))
    assert result.exit_code == 1
    assert place in result.stderr and "--ledger-schema" in result.stderr
    named = call(project, "export", str(tmp_path / "backup"), "--ledger-schema", place, "--json")
    assert json.loads(named.stdout)["rows"]["results"] == 1
    project.target.query(f'drop schema "{place}" cascade')


# --- recover --------------------------------------------------------------------------------------


@pytest.fixture
def shop(duck: Target, emulator: Emulator, tmp_path: Path) -> Project:
    project = Project(tmp_path / "project", duck)
    project.model("tickets", rows_sql(tickets(8)))
    declare(project, emulator)
    return project


def declare(
    project: Project, emulator: Emulator, name: str = "labels", model: str = BATCH_MODELS[0]
) -> None:
    url = getattr(emulator, f"{model.partition('/')[0]}_base_url")
    llm = {
        "model": model, "prompt": "prompts/label.md", "route": "batch",
        "returns": {"category": {"enum": ["billing", "bug", "other"]}},
        "engine": {"base_url": url, "api_key_env": "REHEARSAL_API_KEY"},
    }  # fmt: skip
    config = f"materialized='llm', unique_key='id', meta={ {'llm': llm}!r}"
    select = "select * from {{ ref('tickets') }}"
    project.write(f"models/{name}.sql", f"{{{{ config({config}) }}}}\n{select}\n")


def lose_ledger(project: Project) -> None:
    project.target.query("drop schema if exists {ledger} cascade")
    assert project.run("run", "--select", "tickets").ok


def recovered(project: Project, *args: str) -> dict[str, Any]:
    result = call(project, "recover", "--select", "labels", "--json", *args)
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return {name: value for name, value in document.items() if value}


@pytest.mark.parametrize("model", BATCH_MODELS)
def test_recover_brings_back_answers_once(shop: Project, emulator: Emulator, model: str) -> None:
    declare(shop, emulator, model=model)
    assert shop.run("run").ok
    emulator.advance(stage="end")
    lose_ledger(shop)
    first = recovered(shop)
    assert first == {"models": ["labels"], "batches": 1, "recovered": 1, "answers": 8}
    reasons = shop.target.query("select state, route, route_reason from {ledger}.shards")
    assert [(state, route) for state, route, _ in reasons] == [("collected", "batch")]
    assert reasons[0][2] == f"recovered from {emulator.bill.charges[0].batch_id}"
    tries = shop.target.one("select count(*) from {ledger}.attempts")
    assert recovered(shop) == {"models": ["labels"], "batches": 1, "known": 1}
    assert shop.target.one("select count(*) from {ledger}.attempts") == tries == 8
    calls = len(emulator.calls)
    result = shop.run("run")
    assert result.ok, result.output
    assert result.response("labels")["ok"] == 8
    assert len(emulator.calls) == calls
    assert len(emulator.bill.charges) == 8


def test_recover_tells_what_it_leaves(shop: Project, emulator: Emulator) -> None:
    declare(shop, emulator, "others", model="openai/gpt-5-nano")
    assert shop.run("run").ok  # two batches
    emulator.advance(stage="end")
    shop.model("tickets", rows_sql(tickets(10, start=7)))
    shop.target.drop()
    assert shop.run("run", "--select", "tickets others").ok  # one that is running
    shop.target.query("delete from {ledger}.shards")
    found = recovered(shop)
    assert found == {
        "models": ["labels"], "batches": 3, "recovered": 1, "foreign": 1, "open": 1,
        "answers": 2, "claimed": 2, "unmatched": 6 + 6,
    }  # fmt: skip
    text = call(shop, "recover", "--select", "labels").stdout
    assert "1 not over yet" in text
    assert "1 in the ledger already" in text


def test_recover_records_failures_as_tries(shop: Project, emulator: Emulator) -> None:
    emulator.misbehave(Rule(behaviour=Behaviour.REFUSAL, text="ticket 3"))
    assert shop.run("run").ok
    emulator.advance(stage="end")
    lose_ledger(shop)
    found = recovered(shop)
    assert (found["answers"], found["failures"]) == (7, 1)
    assert (
        shop.target.one("select outcome from {ledger}.attempts where outcome <> 'ok'") == "refused"
    )


def test_killed_recover_goes_on(
    shop: Project, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchsql.collecting import Collector

    assert shop.run("run").ok
    emulator.advance(stage="end")
    lose_ledger(shop)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Collector, "look_after", die)
        assert call(shop, "recover", "--select", "labels").exit_code != 0
    assert shop.target.one("select state from {ledger}.shards") == "ended"
    found = recovered(shop)
    assert (found["known"], found["answers"]) == (1, 8)
    assert shop.target.one("select count(*) from {ledger}.results") == 8


def test_recover_says_when_results_are_deleted(shop: Project, emulator: Emulator) -> None:
    assert shop.run("run").ok
    emulator.advance(stage="end")
    emulator.advance(31 * 24 * 3600)
    lose_ledger(shop)
    found = recovered(shop, "--since", "60d")
    assert found == {"models": ["labels"], "batches": 1, "gone": 1}


def test_recover_looks_back_as_far_as_it_is_told(shop: Project, emulator: Emulator) -> None:
    assert shop.run("run").ok
    emulator.advance(stage="end")
    lose_ledger(shop)
    assert recovered(shop, "--since", "0s") == {"models": ["labels"]}


def test_recover_names_models_without_batches(shop: Project) -> None:
    shop.model("labels", "select * from {{ ref('tickets') }}", llm={})
    lose_ledger(shop)
    result = call(shop, "recover", "--select", "labels")
    assert result.exit_code == 0
    assert "labels: its provider offers no batches" in result.stdout
