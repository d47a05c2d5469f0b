"""What `batchsql init` writes into projects of other people, and what it leaves alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from batchsql import cli, scaffold
from batchsql.version import __version__
from tests.support.project import ROOT, Project, duckdb_target
from tests.support.tables import rows_sql, tickets

HERE = {"local": str(ROOT)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "dbt_project.yml").write_text("name: shop\nversion: '1.0'\nprofile: shop\n")
    return tmp_path


def init(folder: Path, *args: str) -> Result:
    return CliRunner().invoke(cli.main, ["init", "--project-dir", str(folder), *args])


def done(result: Result) -> str:
    assert result.exit_code == 0, result.stderr
    return result.stdout


def packages(file: Path) -> list[object]:
    listed: list[object] = yaml.safe_load(file.read_text())["packages"]
    return listed


def everything(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# --- the list of packages -------------------------------------------------------------------------

OTHER = {"package": "dbt-labs/dbt_utils", "version": ["1.0.0", "2.0.0"]}


@pytest.mark.parametrize(
    ("before", "others"),
    [
        ("", []),
        ("# nothing yet\n", []),
        ("packages:\n", []),
        ("packages:", []),
        ("packages: # ours\n# end\n", []),
        ("packages: []\n", []),
        ("packages: [ ]  # none\n", []),
        ("packages: [{local: ../a}]\n", [{"local": "../a"}]),
        ("packages: [\n  {local: ../a}, # first\n]\n", [{"local": "../a"}]),
        (
            "# top\npackages:\n  - package: dbt-labs/dbt_utils  # macros\n"
            '    version: ["1.0.0", "2.0.0"] # both\n\n# the end\n',
            [OTHER],
        ),
        (
            "packages:\n- local: ../a\n-   package: dbt-labs/dbt_utils\n    version:\n"
            "    - 1.0.0\n    - 2.0.0\n",
            [{"local": "../a"}, OTHER],
        ),
        ("packages:\r\n  - local: ../a\r\n", [{"local": "../a"}]),
        ("packages:\n      - local: ../a", [{"local": "../a"}]),
        ("packages:\n  -\n    local: ../a\n", [{"local": "../a"}]),
        (
            "packages:\n  - local: ../a-b\n  - local: 'c - d'\n",
            [{"local": "../a-b"}, {"local": "c - d"}],
        ),
        (
            "packages:\n  - git: \"https://{{ env_var('TOKEN') }}@example.com/x.git\"\n",
            [{"git": "https://{{ env_var('TOKEN') }}@example.com/x.git"}],
        ),
    ],
)
def test_package_is_added_and_every_line_kept(
    folder: Path, before: str, others: list[object]
) -> None:
    file = folder / "packages.yml"
    file.write_bytes(before.encode())
    done(init(folder))
    assert packages(file) == [*others, HERE]
    after = file.read_bytes().decode()
    for line in before.splitlines():
        kept = [
            line,
            line.replace("[]", "[{"),
            line.replace("[ ]", "[{"),
            line.replace("}]", "}, {"),
        ]
        # A flow list grows inside its line; every other line is there as it was.
        assert any(each.split("#")[0].rstrip(" ,]}") in after for each in kept), line
        assert line.partition("#")[2] in after
    if "\r\n" in before:
        assert "\n" not in after.replace("\r\n", "")


def test_missing_packages_file_is_written(folder: Path) -> None:
    assert "+ packages.yml: written" in done(init(folder))
    assert packages(folder / "packages.yml") == [HERE]


def test_dependencies_file_is_used_where_the_packages_are_there(folder: Path) -> None:
    file = folder / "dependencies.yml"
    file.write_text("projects:\n  - name: core\npackages:\n  - local: ../a # mine\n# end\n")
    done(init(folder))
    assert packages(file) == [{"local": "../a"}, HERE]
    assert file.read_text().startswith(
        "projects:\n  - name: core\npackages:\n  - local: ../a # mine\n"
    )
    assert not (folder / "packages.yml").exists()


def test_dependencies_file_without_packages_is_left_alone(folder: Path) -> None:
    (folder / "dependencies.yml").write_text("projects:\n  - name: core\n")
    done(init(folder))
    assert (folder / "dependencies.yml").read_text() == "projects:\n  - name: core\n"
    assert packages(folder / "packages.yml") == [HERE]


@pytest.mark.parametrize(
    ("listed", "is_there"),
    [
        (HERE, True),
        ({"local": "/gone/site-packages/batchsql/dbt_package"}, True),
        ({"git": "https://example.com/someone/batchsql.git", "revision": "v0.0.1"}, True),
        ({"package": "someone/batchsql", "version": "0.1.0"}, True),
        ({"git": "https://example.com/someone/not_batchsql.git"}, False),
        ({"local": "../batchsql_fork"}, False),
    ],
)
def test_package_that_is_there_is_not_added_again(
    folder: Path, listed: dict[str, str], is_there: bool
) -> None:
    file = folder / "packages.yml"
    file.write_text(yaml.safe_dump({"packages": [listed]}))
    before = file.read_bytes()
    output = done(init(folder))
    assert ("has batchsql already" in output) is is_there
    assert (file.read_bytes() == before) is is_there
    if is_there and listed != HERE:
        assert f"this copy would be local: {ROOT}" in output


def test_path_of_this_machine_is_told_where_it_is_added(folder: Path) -> None:
    note = "In a project that others share, take the entry out again and run: batchsql init --git"
    assert note in done(init(folder))
    assert note not in done(init(folder))


def test_git_adds_the_tag_of_this_version(folder: Path) -> None:
    output = done(init(folder, "--git", "https://example.com/batchsql.git"))
    assert "Note:" not in output
    assert packages(folder / "packages.yml") == [
        {"git": "https://example.com/batchsql.git", "revision": f"v{__version__}"}
    ]


def test_copy_inside_the_project_gets_a_relative_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = folder / ".venv" / "batchsql" / "dbt_package"
    copy.mkdir(parents=True)
    monkeypatch.setattr(scaffold, "installed_package", lambda: copy.resolve())
    assert "Note:" not in done(init(folder))
    assert packages(folder / "packages.yml") == [{"local": ".venv/batchsql/dbt_package"}]


@pytest.mark.parametrize(
    "text",
    [
        "- just\n- a list\n",
        "packages: text\n",
        "packages: {a: b}\n",
        "a: [\n",
        "packages: &x\n  - *x\n",
    ],
)
def test_file_that_cannot_be_added_to_is_left_alone(folder: Path, text: str) -> None:
    (folder / "packages.yml").write_text(text)
    before = everything(folder)
    result = init(folder)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: packages.yml")
    assert everything(folder) == before


# --- the prompt and the model ---------------------------------------------------------------------


def test_files_go_to_the_projects_own_model_path(folder: Path) -> None:
    (folder / "dbt_project.yml").write_text("name: shop\nmodel-paths: ['sql/marts/', 'models']\n")
    output = done(init(folder))
    assert (folder / "sql/marts/ticket_labels.sql").is_file()
    assert (folder / "prompts/ticket_labels.md").is_file()
    assert re.search(
        rf"Next:\n  dbt deps --project-dir {folder}\n  dbt run --select ticket_labels "
        rf"--project-dir {folder}\n\Z",
        output,
    )


def test_nothing_is_overwritten(folder: Path) -> None:
    done(init(folder))
    for path in ("prompts/ticket_labels.md", "models/ticket_labels.sql"):
        (folder / path).write_text("mine\n")
    before = everything(folder)
    output = done(init(folder, "--model", "local/other.gguf"))
    assert everything(folder) == before
    assert "= models/ticket_labels.sql: is there already, left as it is" in output


@pytest.mark.parametrize(
    "args",
    [
        ["--from", "stg_tickets"],
        ["--key", "id"],
        ["--text", "body"],
        ["--from", "stg_tickets", "--key", "id"],
        ["--model", "smollm2"],
        ["--model", "local/a'b"],
    ],
)
def test_half_an_answer_is_wrong_usage(folder: Path, args: list[str]) -> None:
    before = everything(folder)
    assert init(folder, *args).exit_code == 2
    assert everything(folder) == before


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--from", "a b"),
        ("--from", "a')}}"),
        ("--key", 'a"b'),
        ("--text", "{{ x }}"),
        ("--text", " "),
    ],
)
def test_name_that_is_no_name_writes_nothing(folder: Path, option: str, value: str) -> None:
    names = {"--from": "stg_tickets", "--key": "id", "--text": "body", option: value}
    before = everything(folder)
    result = init(folder, *(part for pair in names.items() for part in pair))
    assert result.exit_code == 1
    assert f"{option} got {value!r}" in result.stderr
    assert everything(folder) == before


@pytest.mark.parametrize(
    ("path", "text", "name"),
    [
        ("models/a/stg_tickets.sql", "select 1", "stg_tickets"),
        ("models/stg_tickets.py", "", "stg_tickets"),
        ("models/stg_tickets_v2.sql", "", "stg_tickets_v2"),
        ("models/any.yml", "models: [{name: stg_tickets}]\n", "stg_tickets"),
        ("seeds/stg_tickets.csv", "id\n1\n", "stg_tickets"),
        ("snapshots/all.sql", "{% snapshot stg_tickets %}{% endsnapshot %}", "stg_tickets"),
        ("snapshots/all.yml", "snapshots: [{name: stg_tickets}]\n", "stg_tickets"),
        ("dbt_packages/other/models/stg_tickets.sql", "select 1", "stg_tickets"),
    ],
)
def test_rows_may_come_from_whatever_ref_can_name(
    folder: Path, path: str, text: str, name: str
) -> None:
    (folder / path).parent.mkdir(parents=True)
    (folder / path).write_text(text)
    if path.startswith("dbt_packages"):
        (folder / "dbt_packages/other/dbt_project.yml").write_text("name: other\n")
    assert f"+ models/{name}_labels.sql: written" in done(
        init(folder, "--from", name, "--key", "id", "--text", "body")
    )


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("sql/stg_tickets.sql", "of that name; did you mean stg_tickets?\n"),
        ("sql/orders.sql", "of that name\n"),
        ("models/stg_tickets.sql", "of that name\n"),  # not among the model paths
        ("sql/any.yml", "of that name\n"),
    ],
)
def test_model_that_is_not_there_writes_nothing(folder: Path, path: str, told: str) -> None:
    (folder / "dbt_project.yml").write_text("name: shop\nmodel-paths: [sql]\n")
    (folder / path).parent.mkdir()
    (folder / path).write_text("sources: [{name: x, tables: [{name: stg_ticket}]}]\n")
    before = everything(folder)
    result = init(folder, "--from", "stg_ticket", "--key", "id", "--text", "body")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "nothing was written: --from got 'stg_ticket'" in result.stderr
    assert result.stderr.endswith(told)
    assert everything(folder) == before


def test_prompt_shows_each_label_three_times_and_no_row_that_is_asked(folder: Path) -> None:
    done(init(folder))
    prompt = (folder / "prompts/ticket_labels.md").read_text()
    for label in ("negative", "positive"):
        assert prompt.count(f'assistant:\n{{"sentiment":"{label}"}}\n') == 3
    examples = re.findall(r"user:\n(.+)\n", prompt)[:-1]
    assert len(set(examples)) == 6
    model = (folder / "models/ticket_labels.sql").read_text()
    assert not [each for each in examples if each in model]


@pytest.mark.parametrize(
    ("model", "is_told"), [(scaffold.DEFAULT_MODEL, True), ("openai/gpt-5-mini", False)]
)
def test_small_model_is_called_one_for_trying_out(folder: Path, model: str, is_told: bool) -> None:
    told = "the small model is for trying out; expect wrong labels"
    assert (told in done(init(folder, "--model", model))) is is_told


@pytest.mark.parametrize(
    ("columns", "key", "text"),
    [
        ("id, body", "id", "body"),
        ('id as "Ticket No", body as "it\'s"', "Ticket No", "it's"),
        ('id as "order", body as "select"', "order", "select"),
        ('id, body as "row"', "id", "row"),
        ("id, body as sentiment", "id", "sentiment"),
        ("body", "body", "body"),
    ],
)
def test_model_over_the_users_rows_runs_whatever_its_columns_are_called(
    tmp_path: Path, columns: str, key: str, text: str
) -> None:
    project = Project(tmp_path / "project", duckdb_target(tmp_path / "warehouse.duckdb"))
    project.model("tickets", rows_sql(tickets(120)))
    project.model("stg", f"select {columns} from {{{{ ref('tickets') }}}}")
    args = ["--from", "stg", "--key", key, "--text", text, "--model", "fake/x"]
    done(init(project.root, *args))
    result = project.run("run")
    assert result.ok, result.output
    response = result.response("stg_labels")
    assert (response["ok"], response["pending"]) == (scaffold.FIRST_LIMIT, 20)
    answers = project.target.query(
        f"select distinct {scaffold._output_name(scaffold.Rows('stg', key, text))} "
        "from {schema}.stg_labels where llm_status = 'ok' order by 1"
    )
    assert answers == [("negative",), ("positive",)]


def test_literal_rows_run_at_once_and_only_once(project: Project) -> None:
    done(init(project.root, "--model", "fake/x"))
    result = project.run("run")
    assert result.ok, result.output
    assert result.response("ticket_labels")["ok"] == 3
    again = project.run("run")
    assert (again.response("ticket_labels")["requests_sent"], again.ok) == (0, True)
