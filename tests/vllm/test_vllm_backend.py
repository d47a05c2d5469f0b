"""The vLLM backend on a real engine, with a model that answers at random but within the schema."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from batchsql.backends import vllm as vllm_backend
from batchsql.backends.engine_host import in_flight_limit
from batchsql.backends.vllm import VllmBackend, open_vllm
from batchsql.backends.vllm_core import VllmCore
from batchsql.backends.vllm_options import engine_arguments
from batchsql.declare.returns import parse_returns
from batchsql.errors import SpecError, SystemicError
from batchsql.types import Call, Completion, FinishReason, ModelRef, Outcome, Request
from batchsql.validate.structure import AnswerValidator
from tests.support import lean
from tests.support.project import duckdb_target
from tests.vllm.asking import (
    ALL_KEYWORDS,
    ENGINE,
    LABEL,
    SLOTS,
    ask,
    call_for,
    complete,
    labelling_project,
)
from tests.vllm.conftest import SPECIAL, write_adapter

# Raised by vLLM, torch and transformers as they are imported.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def backend(checkpoint: Path) -> Iterator[VllmBackend]:
    yield open_vllm(model_at(checkpoint), ENGINE, Path())
    vllm_backend._close_all()


def model_at(folder: Path) -> ModelRef:
    return ModelRef("vllm", str(folder))


def test_every_schema_keyword_holds_without_white_space(backend: VllmBackend) -> None:
    returns, _ = parse_returns(ALL_KEYWORDS)
    validator = AnswerValidator(returns)
    # A hot temperature makes the model try whatever the grammar leaves open.
    call = call_for(ALL_KEYWORDS, max_tokens=400, temperature=1.5, seed=3)
    for completion in complete(backend, call, *(f"Write record {n}." for n in range(8))):
        verdict = validator.check(completion)
        assert verdict.outcome is Outcome.OK, (verdict.error, completion.text)
        assert completion.text is not None
        assert (
            completion.text
            == json.dumps(json.loads(completion.text), ensure_ascii=False, separators=(",", ":"))
            or "." in completion.text
        )  # a number's digits may be written in several ways


def test_single_enum_is_a_choice_of_finished_texts(backend: VllmBackend) -> None:
    call = call_for(LABEL, temperature=2)
    texts = {c.text for c in complete(backend, call, *(f"text {n}" for n in range(24)))}
    assert texts <= {'{"label":"bug"}', '{"label":"billing"}', '{"label":"how to"}'}
    assert len(texts) > 1


def test_completion_reports_usage_reason_and_model(backend: VllmBackend, checkpoint: Path) -> None:
    first, again = complete(backend, call_for(LABEL), "The invoice is wrong. " * 9, "Hi.")
    assert first.finish_reason is FinishReason.STOP
    assert first.usage.input_tokens > again.usage.input_tokens > 20
    assert first.usage.output_tokens > 3
    assert first.model_reported == str(model_at(checkpoint))
    assert first.started_at is not None
    assert first.finished_at is not None
    assert first.started_at < first.finished_at


def test_greedy_answers_repeat_and_hit_the_prefix_cache(backend: VllmBackend) -> None:
    text = "The same question over and over again, long enough to fill blocks of the cache. " * 3
    first, again = (complete(backend, call_for(LABEL), text)[0] for _ in range(2))
    assert first.text == again.text
    assert again.usage.cached_tokens >= 96


def test_length_finish_is_reported(backend: VllmBackend) -> None:
    call = call_for({"story": {"type": "string", "minLength": 60}}, 16)
    (completion,) = complete(backend, call, "Tell a story.")
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.usage.output_tokens == 16


def test_bad_requests_fail_alone(backend: VllmBackend) -> None:
    call = call_for(LABEL, 32)
    long, broken, good = complete(backend, call, "word " * 200, "half \ud800", "It crashes.")
    assert long.failure is Outcome.TOO_LONG
    assert "engine.max_model_len" in (long.error or "")
    assert broken.failure is Outcome.REJECTED
    assert good.finish_reason is FinishReason.STOP


def test_prompt_that_just_fits_is_asked(backend: VllmBackend) -> None:
    call = call_for(LABEL, 32)
    (short,) = complete(backend, call, "x")
    room = 512 - 32 - short.usage.input_tokens
    fits, too_long = complete(backend, call, "x" * (1 + room), "x" * (2 + room))
    assert fits.usage.input_tokens == 512 - 32
    assert fits.failure is None
    assert too_long.failure is Outcome.TOO_LONG


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (call_for(LABEL, 512), "max_tokens is 512"),
        (Call(ModelRef("vllm", "t"), {}, {"type": "object", "allOf": [{"$ref": "#/no"}]}, 16), ""),
    ],
    ids=["no room for a prompt", "schema that cannot be enforced"],
)
def test_what_all_requests_share_is_systemic(backend: VllmBackend, call: Call, part: str) -> None:
    with pytest.raises(SystemicError, match=part):
        complete(backend, call, "Hi.", "Ho.")


def test_engine_is_fed_before_it_drains(backend: VllmBackend) -> None:
    """Several shards' worth of requests: at no answer but the last is there room left unused."""
    total, taken, answered = 60, 0, 0

    def feed() -> Iterator[Request]:
        nonlocal taken
        for number in range(total):
            taken += 1
            yield ask(number, f"text {number}")

    for completion in backend.complete(feed(), call_for(LABEL), threading.Event()):
        if completion is None:
            continue
        in_flight = taken - answered
        assert in_flight <= in_flight_limit(SLOTS) + 1
        if taken < total:
            assert in_flight > SLOTS
        answered += 1
    assert answered == total


def test_stop_ends_within_a_second_and_aborts(backend: VllmBackend) -> None:
    call = call_for({"story": {"type": "string", "minLength": 300}}, 400)
    stop = threading.Event()
    endless = (ask(number, "Tell a story.") for number in range(1000))
    threading.Timer(0.3, stop.set).start()
    stream = backend.complete(endless, call, stop)
    stop.wait()
    started = time.monotonic()
    list(stream)
    assert time.monotonic() - started < 1
    complete(backend, call_for(LABEL), "The slots are free again.")
    assert backend.figures()["running"] + backend.figures()["waiting"] == 0


def test_closed_stream_leaves_the_engine_free(backend: VllmBackend) -> None:
    stream = backend.complete(
        (ask(number, "Tell.") for number in range(100)), call_for(LABEL), threading.Event()
    )
    assert next(c for c in stream if c is not None)
    stream.close()  # type: ignore[attr-defined]
    assert complete(backend, call_for(LABEL), "Hi.")[0].failure is None


def test_two_streams_share_one_engine(backend: VllmBackend, checkpoint: Path) -> None:
    other = open_vllm(model_at(checkpoint), ENGINE, Path())
    found: dict[str, list[Completion]] = {}

    def run(name: str, asked: VllmBackend, call: Call) -> None:
        found[name] = complete(asked, call, *(f"{name} {n}" for n in range(30)))

    threads = [
        threading.Thread(target=run, args=("labels", backend, call_for(LABEL))),
        threading.Thread(target=run, args=("scores", other, call_for({"score": {"enum": [1, 2]}}))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("label" in json.loads(c.text or "") for c in found["labels"])
    assert all("score" in json.loads(c.text or "") for c in found["scores"])
    assert len(found["labels"]) == len(found["scores"]) == 30
    engines = [t for t in threading.enumerate() if t.name == "batchsql-engine"]
    assert len(engines) == 1


@pytest.mark.parametrize("token", SPECIAL)
def test_special_token_in_a_row_is_plain_text(backend: VllmBackend, token: str) -> None:
    bare, marked = complete(backend, call_for(LABEL), "a  b", f"a {token} b")
    # Bytes are this model's tokens: a special one would be one, broken text one for each byte.
    added = len(token) + len("\u200b".encode())
    assert marked.usage.input_tokens - bare.usage.input_tokens == added


def test_figures_tell_how_the_engine_does(backend: VllmBackend) -> None:
    text = "Long enough to fill some blocks of the prefix cache. " * 3
    complete(backend, call_for(LABEL), text)
    before = backend.figures()
    (completion,) = complete(backend, call_for(LABEL), text)
    after = backend.figures()
    assert after["prompt_tokens"] - before["prompt_tokens"] == completion.usage.input_tokens
    assert after["generated_tokens"] - before["generated_tokens"] == completion.usage.output_tokens
    hits = after["prefix_hit_tokens"] - before["prefix_hit_tokens"]
    assert hits == completion.usage.cached_tokens > 0
    assert 0 < after["prefix_hit_rate"] < 1
    assert after["load_seconds"] > 1
    assert after["prompt_tokens_per_second"] > 0
    assert {"kv_cache_use", "preemptions"} <= set(after)


def test_run_builds_a_table_and_the_next_asks_nothing(checkpoint: Path, tmp_path: Path) -> None:
    job = lean.Job(
        duckdb_target(tmp_path / "warehouse.duckdb"),
        "",
        [f"ticket {number}" for number in range(40)],
        model=str(model_at(checkpoint)),
        engine=ENGINE,
    )
    first = lean.run_job(job)
    assert (first.ok, first.requests_sent, first.requests_failed) == (40, 40, 0)
    assert first.cached_tokens > 0
    again = lean.run_job(job)
    assert (again.ok, again.requests_sent) == (40, 0)


def test_prompt_that_kills_the_engine_is_a_dead_letter_and_all_others_are_answered(
    backend: VllmBackend, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's process is killed as soon as that prompt is on board, beside others."""
    add = VllmCore.add
    asked: list[str] = []

    def add_and_kill(core: VllmCore, engine_id: str, token_ids: Any, sampling: Any) -> None:
        add(core, engine_id, token_ids, sampling)
        asked.append(core.tokenizer.decode(list(token_ids)))
        if "poison" in asked[-1]:
            kill_engine()

    monkeypatch.setattr(VllmCore, "add", add_and_kill)
    deaths, slots = backend.figures().get("deaths", 0), backend.capabilities.slots
    bodies = [f"ticket {number}" for number in range(30)]
    bodies[10] = "poison"
    project = labelling_project(tmp_path, str(model_at(checkpoint)), ENGINE, bodies)
    result = project.run("run")
    assert result.ok, result.output
    counts = result.response("labels")
    assert [counts[name] for name in ("ok", "failed", "pending", "requests_sent")] == [29, 1, 0, 30]
    query = project.target.query
    assert query("select llm_status, count(*) from {schema}.labels group by 1 order by 1") == [
        ("failed", 1),
        ("ok", 29),
    ]
    assert query("select body from {schema}.labels where llm_status = 'failed'") == [("poison",)]
    ((outcome, error, attempts),) = query(
        "select outcome, error, attempts from {ledger}.dead_letters"
    )
    assert (outcome, attempts) == ("rejected", 1)
    assert "the engine died on this prompt 2 times" in error
    assert query("select state, requests, ok, failed from {ledger}.shards") == [
        ("finished", 30, 29, 1)
    ]
    assert query("select outcome, count(*) from {ledger}.attempts group by 1 order by 1") == [
        ("ok", 29),
        ("rejected", 1),
    ]
    assert sum("poison" in text for text in asked) == 2
    assert backend.figures()["deaths"] == deaths + 2
    assert backend.capabilities.slots == slots
    asked.clear()
    again = project.run("run")
    assert (again.ok, again.response("labels")["failed"], asked) == (True, 1, [])


def kill_engine() -> None:
    import multiprocessing

    (engine,) = (c for c in multiprocessing.active_children() if c.name.startswith("EngineCore"))
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    engine.join()


def test_identity_changes_with_what_makes_answers(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    original = open_vllm(model_at(checkpoint), ENGINE, Path()).identity()
    assert open_vllm(model_at(copy), {"max_num_seqs": 2}, Path()).identity() == original
    (copy / "README.md").write_text("about")
    assert open_vllm(model_at(copy), {}, Path()).identity() == original
    quantised = open_vllm(model_at(copy), {"quantization": "fp8"}, Path()).identity()
    assert quantised == {**original, "quantization": "fp8"}
    template = copy / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert (
        open_vllm(model_at(copy), {}, Path()).identity()["chat_template_sha256"]
        != original["chat_template_sha256"]
    )


def test_unknown_option_is_refused_with_vllms_own_list(checkpoint: Path) -> None:
    with pytest.raises(SpecError, match=r"did you mean max_num_seqs\?") as caught:
        open_vllm(model_at(checkpoint), {"max_num_sequences": 2, "swap": 1}, Path())
    assert len(caught.value.mistakes) == 2
    assert "enable_chunked_prefill" in str(caught.value)


def test_arguments_read_from_the_source_are_vllms_own() -> None:
    import dataclasses

    from vllm.engine.arg_utils import EngineArgs

    own = {f.name for f in dataclasses.fields(EngineArgs) if not f.name.startswith("_")}
    assert engine_arguments() == own


def test_adapter_changes_answers_and_identity(
    backend: VllmBackend, checkpoint: Path, tmp_path: Path
) -> None:
    call = call_for({"story": {"type": "string", "minLength": 20, "maxLength": 20}})
    (plain,) = complete(backend, call, "Tell a story.")
    write_adapter(tmp_path / "adapter")
    # Both engines fit this machine, but the one that has nothing to do is closed.
    adapted = open_vllm(model_at(checkpoint), {**ENGINE, "lora": "adapter"}, tmp_path)
    (changed,) = complete(adapted, call, "Tell a story.")
    assert changed.failure is None
    assert changed.text != plain.text
    assert backend.figures() == {}
    assert adapted.identity().keys() - backend.identity().keys() == {"lora_sha256"}


def test_process_with_an_engine_ends_by_itself_and_leaves_stdout_alone(checkpoint: Path) -> None:
    code = f"""
        import threading
        from pathlib import Path
        from batchsql.backends.vllm import open_vllm
        from batchsql.types import Call, Message, ModelRef, Request, Role

        model = ModelRef("vllm", {str(checkpoint)!r})
        schema = {{
            "type": "object", "properties": {{"a": {{"enum": [1]}}}}, "required": ["a"]
        }}
        backend = open_vllm(model, {ENGINE!r}, Path())
        asked = Request("k", (Message(Role.USER, "Hi."),))
        stream = backend.complete(iter([asked]), Call(model, {{}}, schema, 16), threading.Event())
        print([completion.text for completion in stream if completion is not None])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "['{\"a\":1}']\n"), done.stderr[-3000:]
