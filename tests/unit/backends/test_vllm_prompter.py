"""What becomes of a request before vLLM sees it, with a tokenizer whose tokens are characters."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest

from batchsql.backends.vllm import _Prompter
from batchsql.errors import SystemicError
from batchsql.types import Call, Message, ModelRef, Outcome, Request, Role

MODEL = ModelRef("vllm", "tiny")
CALL = Call(MODEL, {}, {}, max_tokens=10)


@dataclass
class Tokenizer:
    chat_template: str | None = "some"
    all_special_tokens: tuple[str, ...] = ("<s>",)
    added_tokens_decoder: dict[int, Any] = field(default_factory=dict)
    refused: frozenset[str] = frozenset()

    def apply_chat_template(self, turns: list[dict[str, str]], **options: Any) -> str:
        assert options["add_generation_prompt"] is True
        assert options["tokenize"] is False
        if refused := self.refused & {turn["role"] for turn in turns}:
            raise jinja2.TemplateError(f"{min(refused)} role not supported")
        return "".join(turn["content"] for turn in turns) + ">"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert add_special_tokens is False  # the template has written them
        text.encode()
        return [ord(character) for character in text]


@dataclass
class Core:
    tokenizer: Tokenizer
    max_model_len: int = 50
    made: int = 0

    def make_sampling(self, call: Call) -> object:
        self.made += 1
        return f"sampling {self.made}"


def request(text: str, role: Role = Role.USER) -> Request:
    return Request("key", (Message(role, text),))


def test_prompts_of_a_call_share_their_sampling() -> None:
    core, prompter = Core(Tokenizer()), _Prompter(MODEL, CALL)
    prompts: list[Any] = [prompter(core, request(text)) for text in ("a", "bc")]  # type: ignore[arg-type]
    assert [p.token_ids for p in prompts] == [[97, 62], [98, 99, 62]]
    assert [p.sampling for p in prompts] == ["sampling 1"] * 2
    again: Any = prompter(Core(Tokenizer(), made=6), request("a"))  # type: ignore[arg-type]
    assert again.sampling == "sampling 7"  # another engine, after a restart


@pytest.mark.parametrize(
    ("text", "outcome", "part"),
    [
        ("x" * 39, None, ""),
        ("x" * 40, Outcome.TOO_LONG, "41 tokens; 40 fit"),
        ("\ud800", Outcome.REJECTED, "no Unicode"),
    ],
)
def test_what_cannot_be_asked_is_said_before(text: str, outcome: Outcome | None, part: str) -> None:
    made: Any = _Prompter(MODEL, CALL)(Core(Tokenizer()), request(text))  # type: ignore[arg-type]
    assert getattr(made, "failure", None) is outcome
    assert part in (getattr(made, "error", None) or "")


@pytest.mark.parametrize(
    ("tokenizer", "max_model_len", "part"),
    [
        (Tokenizer(chat_template=None), 50, "has no chat template"),
        (Tokenizer(refused=frozenset({"system"})), 50, "refuses messages with the roles system"),
        (Tokenizer(), 10, "max_tokens is 10"),
    ],
)
def test_what_stops_every_request_is_systemic(
    tokenizer: Tokenizer, max_model_len: int, part: str
) -> None:
    prompter = _Prompter(MODEL, CALL)
    with pytest.raises(SystemicError, match=part):
        prompter(Core(tokenizer, max_model_len), request("x", Role.SYSTEM))  # type: ignore[arg-type]


class Added(SimpleNamespace):
    def __str__(self) -> str:
        return str(self.content)


def test_special_tokens_are_broken_apart_and_other_added_ones_kept() -> None:
    added = [
        Added(content="<end>", special=True),
        Added(content="<|tool|>", special=False),
        Added(content="    ", special=False),
    ]
    core = Core(Tokenizer(added_tokens_decoder=dict(enumerate(added))), 100)
    made: Any = _Prompter(MODEL, CALL)(core, request("<s> <end> <|tool|>     <b>"))  # type: ignore[arg-type]
    text = "".join(map(chr, made.token_ids))
    assert text == "<\u200bs> <\u200bend> <\u200b|tool|>     <b>>"
