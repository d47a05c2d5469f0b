"""``openai_compatible/`` at a real ``vllm serve``, and beside the engines in this process.

This file comes before the others in the alphabet, so that the engine which it loads is still there
for the tests of ``vllm/``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("xllamacpp")

from batchsql.backends import registry
from batchsql.backends.base import Capabilities, StreamBackend
from batchsql.declare.returns import parse_returns
from batchsql.errors import SystemicError
from batchsql.types import Call, Completion, FinishReason, ModelRef, Outcome, Request
from batchsql.validate.structure import AnswerValidator
from tests.support import lean
from tests.support.project import Project, duckdb_target
from tests.vllm.asking import ALL_KEYWORDS, ENGINE, LABEL, call_for, complete, labelling_project
from tests.vllm.serving import VllmServer

pytestmark = pytest.mark.filterwarnings("ignore")

MODEL = f"openai_compatible/{VllmServer.name}"


@pytest.fixture(scope="module")
def starting_server(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    """A server of the tiny checkpoint that has been started; it takes half a minute to be ready."""
    started = VllmServer(checkpoint, tmp_path_factory.mktemp("server") / "log")
    started.start()
    yield started
    started.kill()


@pytest.fixture
def server(starting_server: VllmServer) -> VllmServer:
    """That server, ready."""
    starting_server.wait_ready()
    return starting_server


def engine_at(server: VllmServer) -> dict[str, Any]:
    return {"base_url": server.base_url, "internal": True, "max_concurrency": 4}


@pytest.fixture
def backend(server: VllmServer) -> StreamBackend:
    model = ModelRef("openai_compatible", VllmServer.name)
    return registry.open_backend(model, engine_at(server), Path())


def served(declared: dict[str, Any], max_tokens: int | None = None, **params: Any) -> Call:
    call = call_for(declared, max_tokens, **params)
    return Call(
        ModelRef("openai_compatible", VllmServer.name), params, call.schema, call.max_tokens
    )


# --- the same rows asked in three ways ------------------------------------------------------------
#
# By llama.cpp in the process (`local/`), by vLLM in the process (`vllm/`) and by `vllm serve`. The
# models differ, so answers do; everything else must not.

# Seven rows, five questions: two rows repeat one, and one is longer than any of the three windows.
BODIES = [
    "The invoice is wrong.",
    "It crashes.",
    "How do I log in?",
    "It crashes.",
    "word " * 1200,
    "Where is my parcel?",
    "It crashes.",
]
ROWS, QUESTIONS = len(BODIES), 5

NOT_COMPARED = frozenset(
    {
        # A prompt that is too long is measured by `vllm/` before anything is asked, at no time, and
        # a server that refuses it does not say which model it would have been for.
        ("attempts", "started_at"),
        ("attempts", "finished_at"),
        ("attempts", "model_reported"),
        # Only vLLM in the process tells how its engine does.
        ("shards", "figures"),
    }
)


@pytest.fixture(scope="module")
def projects(
    checkpoint: Path, starting_server: VllmServer, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Project]:
    """A project for each way, run once."""
    declared = {
        "local/smollm2-135m": {"slots": 2, "context": 512},
        f"vllm/{checkpoint}": ENGINE,
        f"openai_compatible/{VllmServer.name}": {"base_url": starting_server.base_url},
    }
    found = {}
    for model, engine in declared.items():
        way = model.partition("/")[0]
        folder = tmp_path_factory.mktemp(way)
        project = labelling_project(folder, model, engine, BODIES, params={"temperature": 0})
        if way == "openai_compatible":
            starting_server.wait_ready()
        result = project.run("run")
        assert result.ok, result.output
        found[way] = project
    return found


def test_counts_are_the_same(projects: Mapping[str, Project]) -> None:
    counted = {
        "total_rows": ROWS, "ok": ROWS - 1, "failed": 1, "pending": 0,
        "requests_sent": QUESTIONS, "requests_ok": QUESTIONS - 1, "requests_failed": 1,
    }  # fmt: skip
    for way, project in projects.items():
        ((*found,),) = project.target.query(
            "select total_rows, ok_rows, failed_rows, pending_rows, requests_sent, requests_ok,"
            " requests_failed from {ledger}.runs"
        )
        assert dict(zip(counted, found, strict=True)) == counted, way


def test_tables_have_the_same_columns_and_types(projects: Mapping[str, Project]) -> None:
    shapes = {way: shape(project) for way, project in projects.items()}
    local = shapes.pop("local")
    assert {"attempts", "dead_letters", "labels", "results", "shards"} <= {t for t, _ in local}
    assert shapes == {"vllm": local, "openai_compatible": local}


def test_the_same_values_are_filled_in(projects: Mapping[str, Project]) -> None:
    local, *others = (values_per_column(project) for project in projects.values())
    for other in others:
        differing = {name: (n, other[name]) for name, n in local.items() if n != other[name]}
        assert differing == {}


@pytest.mark.parametrize(
    "select",
    [
        "select state, requests, ok, failed, epoch from {ledger}.shards",
        "select attempt_number, outcome, is_final, finish_reason, shard_id is null,"
        " input_tokens > 0, output_tokens > 0, started_at <= finished_at"
        " from {ledger}.attempts where outcome = 'ok'",
        "select attempt_number, outcome, is_final, finish_reason, output_tokens, raw_output"
        " from {ledger}.attempts where outcome <> 'ok'",
        "select state, json_keys(output) from {ledger}.results",
        "select outcome, attempts from {ledger}.dead_letters",
        "select state, total_rows, new_rows, reused_rows, duplicate_rows, ok_rows, pending_rows,"
        " failed_rows, requests_sent, requests_ok, requests_failed, requests_borrowed, error,"
        " cost_usd from {ledger}.runs",
        "select template, params, returns, normalize from {ledger}.specs",
        "select unique_key from {ledger}.items",
        "select messages from {ledger}.requests",
        "select id, body, llm_status, category in ('billing', 'bug', 'other'),"
        " urgency between 1 and 5 from {schema}.labels",
    ],
    ids=lambda select: select.rpartition(".")[2].split()[0],
)
def test_states_and_outcomes_are_the_same(projects: Mapping[str, Project], select: str) -> None:
    rows = {
        way: sorted(project.target.query(select), key=repr) for way, project in projects.items()
    }
    local = rows.pop("local")
    assert local
    assert rows == {"vllm": local, "openai_compatible": local}


def test_route_says_whether_rows_left_the_process(projects: Mapping[str, Project]) -> None:
    for table in ("shards", "attempts"):
        select = f"select distinct route from {{ledger}}.{table}"
        found = {way: project.target.query(select) for way, project in projects.items()}
        engine = [("engine",)]
        assert found == {"local": engine, "vllm": engine, "openai_compatible": [("online",)]}


def shape(project: Project) -> dict[tuple[str, str], str]:
    """Return the type of each column of the ledger and of the built table."""
    found = project.target.query(
        "select table_name, column_name, data_type from information_schema.columns"
        " where table_schema = '{ledger}' or table_name = 'labels'"
    )
    return {(table, column): kind for table, column, kind in found}


def values_per_column(project: Project) -> dict[tuple[str, str], int]:
    """Return how many rows of each table have a value in each column."""
    schemas = {"labels": project.target.schema}
    counts: dict[tuple[str, str], int] = {}
    columns = [name for name in shape(project) if name not in NOT_COMPARED]
    for table in sorted({table for table, _ in columns}):
        names = [column for of, column in columns if of == table]
        listed = ", ".join(f'count("{name}")' for name in names)
        schema = schemas.get(table, project.target.ledger)
        ((*found,),) = project.target.query(f'select {listed} from {schema}."{table}"')
        counts |= {(table, name): n for name, n in zip(names, found, strict=True)}
    return counts


# --- the server by itself -------------------------------------------------------------------------


def test_every_schema_keyword_holds_without_white_space(backend: StreamBackend) -> None:
    # Such a server gets the schema as it is declared, and a model at random writes endless numbers.
    bounds = {"minimum": -1000, "maximum": 1000}
    declared = {
        **ALL_KEYWORDS,
        "whole": {"type": "integer", **bounds},
        "free": {"type": "number", **bounds},
        "nested": {"type": "object", "properties": {"p": {"type": "integer", **bounds}}},
    }
    returns, _ = parse_returns(declared)
    validator = AnswerValidator(returns)
    call = served(declared, 400, temperature=1.5, seed=3)
    for completion in complete(backend, call, *(f"Write record {n}." for n in range(8))):
        verdict = validator.check(completion)
        assert verdict.outcome is Outcome.OK, (verdict.error, completion.text)
        assert not set(" \t\n\r") & set(outside_of_texts(completion.text or " "))


def outside_of_texts(answer: str) -> str:
    """Return a JSON text without its strings, those that are values and those that are names."""
    kept, is_inside = [], False
    letters = iter(answer)
    for letter in letters:
        if is_inside and letter == "\\":
            next(letters)
        elif letter == '"':
            is_inside = not is_inside
        elif not is_inside:
            kept.append(letter)
    return "".join(kept)


def test_usage_reason_and_model_are_reported(backend: StreamBackend) -> None:
    text = "The same question over and over again, long enough to fill blocks of the cache. " * 3
    call = served(LABEL, temperature=0)
    first, again = (complete(backend, call, text)[0] for _ in range(2))
    assert first.text == again.text
    assert first.finish_reason is FinishReason.STOP
    assert first.model_reported == VllmServer.name
    assert first.usage.input_tokens == again.usage.input_tokens > len(text)
    assert first.usage.output_tokens > 3
    assert again.usage.cached_tokens >= 96  # as the server was told to report them
    (cut,) = complete(backend, served({"story": {"type": "string", "minLength": 60}}, 16), "Tell.")
    assert cut.finish_reason is FinishReason.LENGTH
    assert cut.usage.output_tokens == 16


def test_a_request_that_cannot_be_asked_fails_alone(backend: StreamBackend) -> None:
    long, huge, good = complete(
        backend, served(LABEL, 32), "word " * 200, "word " * 20_000, "It crashes."
    )
    assert long.failure is huge.failure is Outcome.TOO_LONG
    assert "maximum context length is 512 tokens" in (long.error or "")
    assert good.finish_reason is FinishReason.STOP


def test_an_answer_gets_what_room_the_prompt_leaves(backend: StreamBackend) -> None:
    """vLLM takes a prompt that leaves less than ``max_tokens``, and cuts the answer there."""
    call = served({"story": {"type": "string", "minLength": 60}}, 200)
    (short,) = complete(backend, call, "x")
    (full,) = complete(backend, call, "x" * (1 + 512 - 20 - short.usage.input_tokens))
    assert full.finish_reason is FinishReason.LENGTH
    assert full.usage.output_tokens == 20


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (Call(ModelRef("openai_compatible", "other"), {}, {"type": "object"}, 16), "not exist"),
        (served(LABEL, 600), "max_model_len=512"),
        (served(LABEL, stop=["a", "b", "c", "d", "e"]), "at most 4 items"),
        (served(LABEL, reasoning_effort="extreme"), "reasoning_effort"),
        (
            served({"all": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}}),
            "Grammar error",
        ),
    ],
    ids=["model", "max_tokens", "stop", "reasoning_effort", "schema"],
)
def test_what_all_requests_share_is_systemic_in_one_request(
    server: VllmServer, backend: StreamBackend, call: Call, part: str
) -> None:
    before = len(server.replies())
    with pytest.raises(SystemicError, match=part):
        complete(backend, call, "Hi.", "Ho.", "He.")
    assert len(server.replies()) == before + 1


def test_run_with_a_wrong_model_sends_one_request_and_kills_no_row(
    server: VllmServer, tmp_path: Path
) -> None:
    bodies = [f"ticket {number}" for number in range(20)]
    project = labelling_project(tmp_path, "openai_compatible/other", engine_at(server), bodies)
    before = server.replies()
    result = project.run("run")
    assert not result.ok
    assert "check the model's name" in result.output
    assert server.replies()[len(before) :] == [404]
    for table in ("attempts", "dead_letters", "results"):
        assert project.target.one(f"select count(*) from {{ledger}}.{table}") == 0


class KillingBackend:
    """Kills the server after some answers, and starts it again without waiting for it."""

    def __init__(self, backend: StreamBackend, server: VllmServer, after: int) -> None:
        self._backend = backend
        self._server = server
        self._left = after

    @property
    def capabilities(self) -> Capabilities:
        return self._backend.capabilities

    @property
    def version(self) -> str:
        return self._backend.version

    def identity(self) -> Any:
        return self._backend.identity()

    def complete(
        self, requests: Iterator[Request], call: Call, stop: threading.Event
    ) -> Iterator[Completion | None]:
        for completion in self._backend.complete(requests, call, stop):
            if completion is not None:
                self._left -= 1
                if self._left == 0:
                    self._server.kill()
                    self._server.start()
            yield completion


def test_server_killed_in_a_run_and_started_again_loses_no_row(
    server: VllmServer, backend: StreamBackend, tmp_path: Path
) -> None:
    # Each request is tried for some ten seconds before the run puts it off, four at once, so that
    # the last are not put off before the server is back.
    job = lean.Job(
        duckdb_target(tmp_path / "warehouse.duckdb"),
        "",
        [f"ticket {number}" for number in range(120)],
        model=MODEL,
        engine=engine_at(server),
    )
    killing = KillingBackend(backend, server, after=15)
    counts = lean.run_job(job, open_backend=lambda declaration: killing)
    server.wait_ready()
    assert killing._left < 0
    query, one = job.target.query, job.target.one
    assert (counts.ok, counts.failed, counts.requests_ok) == (120, 0, 120)
    assert counts.requests_sent == one("select count(*) from {ledger}.attempts") > 120
    assert query("select count(*), count(distinct request_key) from {ledger}.results") == [
        (120, 120)
    ]
    answered = query(
        "select request_key, count(*) filter (outcome = 'ok') from {ledger}.attempts group by 1"
    )
    assert [ok for _, ok in answered] == [1] * 120
    assert query("select distinct outcome from {ledger}.attempts order by 1") == [
        ("ok",),
        ("transient",),
    ]
    assert query("select count(*) from {schema}.labels where llm_status = 'ok'") == [(120,)]
    assert (
        one(
            "select count(*) from {ledger}.attempts"
            " where outcome = 'ok' and (input_tokens < 20 or output_tokens < 3)"
        )
        == 0
    )
    assert counts.input_tokens > 120 * 20
