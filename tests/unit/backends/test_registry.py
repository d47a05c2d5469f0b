from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from batchsql.backends import registry
from batchsql.backends.params import Param
from batchsql.errors import SpecError, SystemicError
from batchsql.types import ModelRef

LOCAL = ModelRef("local", "smollm2-135m")


@pytest.fixture(autouse=True)
def restore_providers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_PROVIDERS", {"local": registry._PROVIDERS["local"]})
    yield


def test_unknown_provider_lists_the_known_ones() -> None:
    with pytest.raises(SpecError, match=r"'openai' is not known; known: local"):
        registry.open_backend(ModelRef("openai", "gpt"), {}, Path())
    assert "known: local" in registry.check_model(ModelRef("openai", "gpt"), {}, {})[0].message


def test_registered_provider_is_opened_with_what_was_given() -> None:
    seen = []

    def opener(*args: object) -> object:
        seen.append(args)
        return "backend"

    registry.register("fake", opener, {"temperature": Param("number", 0, 1)})  # type: ignore[arg-type]
    model = ModelRef("fake", "m")
    assert registry.open_backend(model, {"slots": 1}, Path("p")) == "backend"
    assert seen == [(model, {"slots": 1}, Path("p"))]
    assert registry.known_providers() == ("fake", "local")
    assert registry.check_model(model, {"temperature": 0.5}, {"any": 1}) == []


@pytest.mark.parametrize(
    ("params", "where", "part"),
    [
        ({"temperature": 3}, "params.temperature", "a number from 0 to 2"),
        ({"temperature": "warm"}, "params.temperature", "a number"),
        ({"temperature": float("nan")}, "params.temperature", "a number"),
        ({"top_k": 1.5}, "params.top_k", "a whole number"),
        ({"seed": True}, "params.seed", "a whole number"),
        ({"stop": []}, "params.stop", "a text, or a list of at most 16"),
        ({"stop": ["a", 1]}, "params.stop", "a text"),
        ({"temprature": 1}, "params.temprature", "accepted: max_tokens"),
    ],
)
def test_wrong_param_is_a_mistake(params: dict[str, object], where: str, part: str) -> None:
    mistakes = registry.check_model(LOCAL, params, {})
    assert [m.where for m in mistakes] == [where]
    assert part in mistakes[0].message


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("max_token", 5, "got 5"),
        ("temprature", "warm", "got 'warm'"),
        ("max_token", "abc", "got a value that is not shown"),
        ("api_key", 5, "got a value that is not shown"),
    ],
)
def test_unknown_param_is_shown_unless_it_may_be_a_secret(
    name: str, value: object, shown: str
) -> None:
    (mistake,) = registry.check_model(LOCAL, {name: value}, {})
    assert mistake.message.startswith(f"{shown}, but nothing of that name is known")


@pytest.mark.parametrize(
    ("params", "engine", "hint"),
    [
        ({"max_token": 5}, {}, "did you mean max_tokens? accepted: max_tokens"),
        ({}, {"slot": 2}, "did you mean slots? accepted: context"),
        ({"frobnicate": 1}, {}, "is known; accepted: max_tokens"),
    ],
)
def test_typo_gets_the_name_that_comes_close(
    params: dict[str, object], engine: dict[str, object], hint: str
) -> None:
    (mistake,) = registry.check_model(LOCAL, params, engine)
    assert hint in mistake.message


def test_good_params_pass() -> None:
    good = {"temperature": 0, "top_p": 0.9, "seed": 7, "stop": ["\n"], "max_tokens": 64}
    assert registry.check_model(LOCAL, good, {"slots": 2}) == []


def test_local_refuses_unknown_options_names_and_files(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"engine\.slot: .*accepted: context, gpu_layers, slots"):
        registry.open_backend(ModelRef("local", "smollm2-135m"), {"slot": 4}, tmp_path)
    with pytest.raises(SystemicError, match="accepted: local/smollm2-135m"):
        registry.open_backend(ModelRef("local", "llama"), {}, tmp_path)
    with pytest.raises(SystemicError, match=str(tmp_path / "no.gguf")):
        registry.open_backend(ModelRef("local", "no.gguf"), {}, tmp_path)


def test_wrong_engine_option_is_a_mistake() -> None:
    (mistake,) = registry.check_model(LOCAL, {}, {"slot": 2})
    assert mistake.where == "engine.slot"
    assert "slots" in mistake.message


def test_secret_in_a_wrong_place_is_not_shown() -> None:
    (mistake,) = registry.check_model(LOCAL, {}, {"api_key": "sk-planted"})
    assert "sk-planted" not in mistake.message
    (mistake,) = registry.check_model(LOCAL, {"max_tokens": 0}, {})
    assert "got 0;" in mistake.message
