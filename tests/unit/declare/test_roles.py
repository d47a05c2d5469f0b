import subprocess
import sys

import pytest

from batchsql.declare import roles
from batchsql.declare.normalize import Normalize
from batchsql.declare.prompt import PromptSyntaxError, parse_prompt
from batchsql.types import Message, Role
from tests.support.prompts import Pairs, render

ROLE_CASES: list[tuple[str, Pairs]] = [
    ("Label {{ body }}", [("user", "Label B")]),
    ("system:\nBe brief.\nuser:\n{{ body }}\n", [("system", "Be brief."), ("user", "B")]),
    ("system: \t\nS\nuser:\n{{ body }}", [("system", "S"), ("user", "B")]),
    ("\n\nuser:\n{{ body }}\n\n", [("user", "B")]),
    ("hello\nsystem:\n{{ body }}", [("user", "hello"), ("system", "B")]),
    ("{# note #}\nuser:\n{{ body }}", [("user", "B")]),
    (
        "user:\nQ\nassistant:\nA\nuser:\n{{ body }}",
        [("user", "Q"), ("assistant", "A"), ("user", "B")],
    ),
    (
        "{% if body %}\nsystem:\nyes\n{% endif %}\nuser:\n{{ body }}",
        [("system", "yes"), ("user", "B")],
    ),
    ("{% if not body %}\nsystem:\nyes\n{% endif %}\nuser:\n{{ body }}", [("user", "B")]),
    (
        "{% for n in [1, 2] %}\nuser:\n{{ n }}\nassistant:\n{{ body }}\n{% endfor %}",
        [("user", "1"), ("assistant", "B"), ("user", "2"), ("assistant", "B")],
    ),
    (
        "{% macro shot(q) %}\nuser:\n{{ q }}\n{% endmacro %}"
        "{{ shot('x') | upper }}{{ shot(body) | trim }}",
        [("user", "X"), ("user", "B")],
    ),
    ("{#\nsystem:\nhidden\n#}\nuser:\n{{ body }}", [("user", "B")]),
    (
        "{% raw %}\nsystem:\n{{ x }}\n{% endraw %}\nuser:\n{{ body }}",
        [("system", "{{ x }}"), ("user", "B")],
    ),
    ("system:\n   \nuser:\n{{ body }}", [("user", "B")]),
    ("system:\nonly {{ body }}", [("system", "only B")]),
    (" user:\n{{ body }}", [("user", "user:\nB")]),
    ("User:\n{{ body }}", [("user", "User:\nB")]),
    ("user: hi\n{{ body }}", [("user", "user: hi\nB")]),
    ("user:\nthe user:\n{{ body }}", [("user", "the user:\nB")]),
    ("{% set user = 'k' %}{{ {\nuser:\nbody}['k'] }}", [("user", "B")]),
    ("user:\n{{ 'a\nsystem:\nb' }}{{ body }}", [("user", "a\nsystem:\nbB")]),
    ("\ufeffsystem:\r\nS\r\nuser:\r\n{{ body }}\r\n", [("system", "S"), ("user", "B")]),
    ("system:\n{%- if true %}\nS{% endif -%}\nuser:\n{{ body }}", [("system", "S"), ("user", "B")]),
]


@pytest.mark.parametrize(("source", "expected"), ROLE_CASES)
def test_role_lines_split_the_source_into_messages(source: str, expected: Pairs) -> None:
    assert render(source, body="B") == expected


def test_role_line_keeps_the_text_of_mode_none_whole() -> None:
    rendered = render("system:\n S \nuser:\n{{ body }}\n\n", Normalize.NONE, body=" B\r\n")
    assert rendered == [("system", " S \n"), ("user", " B\r\n\n")]


def test_mode_normalises_prefix_and_row() -> None:
    source = "system:\na  b\nuser:\n{{ body }}"
    assert render(source, Normalize.WHITESPACE, body="c \n d") == [
        ("system", "a b"),
        ("user", "c d"),
    ]


@pytest.mark.parametrize(
    "source",
    [
        "{% filter upper %}\nuser:\n{{ body }}{% endfilter %}",
        "x{% set t %}\nuser:\n{{ body }}{% endset %}",
    ],
)
def test_role_line_inside_filtered_text_is_refused(source: str) -> None:
    with pytest.raises(PromptSyntaxError, match="role line") as caught:
        parse_prompt(source)
    assert caught.value.line == 1


def test_mark_of_role_lines_differs_between_processes() -> None:
    program = "from batchsql.declare import roles; print(repr(roles.MARK))"
    outputs = {
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout
        for _ in range(2)
    } | {repr(roles.MARK).encode() + b"\n"}
    assert len(outputs) == 3


def test_mark_of_role_lines_is_in_no_message() -> None:
    messages = parse_prompt("a\nuser:\nb {{ x }}\nassistant:\nc").bind(["x"]).render(["v"])
    assert all(roles._NONCE not in message.content for message in messages)


def test_message_roles_are_the_shared_enum() -> None:
    message = parse_prompt("system:\n{{ a }}").bind(["a"]).render(["x"])[0]
    assert message == Message(Role.SYSTEM, "x")
