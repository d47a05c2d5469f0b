from __future__ import annotations

import importlib.machinery
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchsql.backends import registry, vllm_options
from batchsql.backends.vllm import open_vllm
from batchsql.backends.vllm_options import (
    answer_options,
    check_vllm,
    engine_arguments,
    structured_output,
)
from batchsql.declare.returns import parse_returns
from batchsql.errors import MissingExtraError, SpecError, SystemicError
from batchsql.types import Call, ModelRef, Request

MODEL = ModelRef("vllm", "models/tiny")
SOURCE = """
class EngineArgs:
    model: str = "x"
    max_num_seqs: int | None = None
    swap_space: float = 4
    _private: int = 0
    not_an_argument = 1

    def method(self) -> None:
        local: int = 1
"""


@pytest.fixture
def vllm_is(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", "installed"))


@pytest.fixture(autouse=True)
def some_vllm(vllm_is: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package of that name whose engine takes few arguments, or none at all."""
    spec = None
    if vllm_is == "installed":
        (tmp_path / "vllm" / "engine").mkdir(parents=True)
        (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(SOURCE)
        spec = importlib.machinery.ModuleSpec("vllm", None, is_package=True)
        spec.submodule_search_locations = [str(tmp_path / "vllm")]
    monkeypatch.setattr(importlib.util, "find_spec", {"vllm": spec}.get)
    engine_arguments.cache_clear()
    yield
    engine_arguments.cache_clear()


either = pytest.mark.parametrize("vllm_is", ["installed", "missing"], indirect=True)
missing = pytest.mark.parametrize("vllm_is", ["missing"], indirect=True)


def test_arguments_are_those_of_the_installed_vllm() -> None:
    assert engine_arguments() == {"model", "max_num_seqs", "swap_space"}


@missing
def test_arguments_are_unknown_without_vllm() -> None:
    assert engine_arguments() == frozenset()
    assert check_vllm({"anything": 1}) == []


@either
@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("max_model_len", "4k", "a whole number from 16"),
        ("max_num_seqs", 0, "a whole number from 1"),
        ("gpu_memory_utilization", 1.5, "a number from 0.01 to 1"),
        ("trust_remote_code", "yes", "true or false"),
        ("lora", "", "a text"),
        ("model", "x", "vllm/<folder or hub id>"),
        ("hf_token", "hf_secret", "HF_TOKEN"),
        ("enable_lora", True, "engine.lora"),
        ("structured_outputs_config", {}, "batchsql sets it"),
    ],
)
def test_wrong_option_is_a_mistake_with_or_without_vllm(name: str, value: Any, part: str) -> None:
    (mistake,) = check_vllm({name: value})
    assert mistake.where == f"engine.{name}"
    assert part in mistake.message
    assert "hf_secret" not in mistake.message


def test_unknown_option_is_answered_with_the_list() -> None:
    (mistake,) = check_vllm({"swap_spaces": 1, "swap_space": 1, "lora": "x"})
    assert "did you mean swap_space?" in mistake.message
    accepted = "executor, lora, max_num_seqs, ray_actors, ray_address, swap_space"
    assert f"Accepted: {accepted}" in mistake.message


def test_registry_checks_options_and_parameters() -> None:
    mistakes = registry.check_model(MODEL, {"temperature": 3, "logprobs": 1}, {"swap": 1})
    assert [m.where for m in mistakes] == ["params.temperature", "params.logprobs", "engine.swap"]
    assert registry.is_engine(MODEL)
    assert registry.stays_inside(MODEL, {})


@missing
def test_missing_vllm_names_the_extra_once_a_request_is_asked(tmp_path: Path) -> None:
    (tmp_path / MODEL.name).mkdir(parents=True)
    (tmp_path / MODEL.name / "model.safetensors").write_bytes(bytes(8))
    backend = registry.open_backend(MODEL, {}, tmp_path)
    call = Call(MODEL, {}, {}, 10)
    with pytest.raises(MissingExtraError, match=r"batchsql\[vllm\]"):
        list(backend.complete(iter([Request("0" * 32, ())]), call, threading.Event()))


def test_commit_of_the_hub_is_known_without_fetching_it(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    model = ModelRef("vllm", "organisation/model")
    backend = open_vllm(model, {"revision": commit, "dtype": "half"}, tmp_path)
    assert backend.identity() == {"hub_commit": commit, "dtype": "half"}
    other = open_vllm(model, {"revision": commit[::-1], "dtype": "half"}, tmp_path)
    assert other.identity() != backend.identity()


def test_opening_refuses_what_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="swap_space"):
        open_vllm(MODEL, {"swap": 1}, tmp_path)
    folder = tmp_path / MODEL.name
    folder.mkdir(parents=True)
    with pytest.raises(SystemicError, match=r"no \.safetensors file"):
        open_vllm(MODEL, {}, tmp_path)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(SystemicError, match="has no revisions"):
        open_vllm(MODEL, {"revision": "main"}, tmp_path)
    with pytest.raises(SystemicError, match=r"no adapter_config\.json"):
        open_vllm(MODEL, {"lora": "adapter"}, tmp_path)
    with pytest.raises(SystemicError, match="there is no folder"):
        open_vllm(ModelRef("vllm", "../../etc"), {}, tmp_path)


def test_slots_are_the_declared_ones_until_the_engine_is_loaded(tmp_path: Path) -> None:
    (tmp_path / MODEL.name).mkdir(parents=True)
    (tmp_path / MODEL.name / "model.safetensors").write_bytes(b"")
    backend = open_vllm(MODEL, {"max_num_seqs": 12}, tmp_path)
    assert backend.capabilities.slots == 12
    assert backend.capabilities.is_engine
    assert backend.capabilities.stays_inside
    assert backend.figures() == {}


def schema_of(declared: dict[str, Any]) -> dict[str, Any]:
    returns, mistakes = parse_returns(declared)
    assert mistakes == []
    return returns.object_schema()


@pytest.mark.parametrize(
    ("declared", "choices"),
    [
        ({"a": {"enum": ["x", 'say "é"']}}, ['{"a":"x"}', '{"a":"say \\"é\\""}']),
        ({"a": {"enum": [1, 2.5, None]}}, ['{"a":1}', '{"a":2.5}', '{"a":null}']),
    ],
)
def test_single_enum_becomes_a_choice(declared: dict[str, Any], choices: list[str]) -> None:
    assert structured_output(schema_of(declared)) == {"choice": choices}


@pytest.mark.parametrize(
    "schema",
    [
        schema_of({"a": {"enum": ["x"]}, "b": {"enum": ["y"]}}),
        schema_of({"a": {"type": "string"}}),
        {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": []},
    ],
    ids=["two properties", "no enum", "optional"],
)
def test_everything_else_is_a_schema(schema: dict[str, Any]) -> None:
    assert set(structured_output(schema)) == {"json"}


def test_endless_numbers_are_bounded_in_the_schema() -> None:
    (schema,) = structured_output(schema_of({"a": {"type": "integer"}})).values()
    assert schema["properties"]["a"]["maximum"] == 10**18


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"dtype": "auto"}),
        ({"max_num_seqs": 1, "gpu_memory_utilization": 0.5}, {"dtype": "auto"}),
        (
            {"dtype": "half", "quantization": "awq", "kv_cache_dtype": "fp8", "tokenizer": "t"},
            {"dtype": "half", "quantization": "awq", "kv_cache_dtype": "fp8", "tokenizer": "t"},
        ),
    ],
)
def test_identity_has_what_makes_answers(options: dict[str, Any], expected: dict[str, Any]) -> None:
    assert answer_options(options) == expected


def test_parameters_are_those_of_vllms_sampling() -> None:
    assert set(vllm_options.PARAMS) == {
        "temperature", "max_tokens", "seed", "top_p", "top_k", "min_p", "repetition_penalty",
        "stop",
    }  # fmt: skip
