import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchsql.declare.normalize import Normalize, normalize_text

TEXTS = st.text(
    st.one_of(st.sampled_from(" \t\r\n\x0b\x1c\x85\xa0\u2028eé\u0301\u212bß"), st.characters())
)

STANDARD_CASES = [
    ("", ""),
    ("plain", "plain"),
    ("  outer\n\n", "outer"),
    ("a\r\nb\rc\nd", "a\nb\nc\nd"),
    ("a \t\nb\t \r\nc", "a\nb\nc"),
    ("a\n \t \nb", "a\n\nb"),
    ("  a\n    indented", "a\n    indented"),
    ("two  spaces\tand a tab", "two  spaces\tand a tab"),
    ("cafe\u0301", "café"),
    ("\u212b", "Å"),
    ("ﬁ ² Ⅷ", "ﬁ ² Ⅷ"),
    ("a\u2028b", "a\u2028b"),
    ("nul\x00stays", "nul\x00stays"),
]


@pytest.mark.parametrize(("text", "expected"), STANDARD_CASES)
def test_standard_changes_only_what_has_no_meaning(text: str, expected: str) -> None:
    assert normalize_text(text, Normalize.STANDARD) == expected
    assert normalize_text(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [(" a \n\n b\t\tc\r\nd ", "a b c d"), ("e\u0301 \xa0\u2003x", "é x"), (" \n ", "")],
)
def test_whitespace_collapses_runs(text: str, expected: str) -> None:
    assert normalize_text(text, Normalize.WHITESPACE) == expected


def test_none_changes_nothing() -> None:
    text = " e\u0301 \r\n x\t\n"
    assert normalize_text(text, Normalize.NONE) == text


def test_mode_values_are_those_of_the_declaration() -> None:
    assert [mode.value for mode in Normalize] == ["none", "standard", "whitespace"]


@given(TEXTS, st.sampled_from(Normalize))
def test_second_pass_changes_nothing(text: str, mode: Normalize) -> None:
    once = normalize_text(text, mode)
    assert normalize_text(once, mode) == once


@given(TEXTS)
def test_standard_equals_its_plain_definition(text: str) -> None:
    plain = unicodedata.normalize("NFC", text).replace("\r\n", "\n").replace("\r", "\n")
    expected = "\n".join(line.rstrip(" \t") for line in plain.split("\n")).strip()
    assert normalize_text(text, Normalize.STANDARD) == expected
    collapsed = normalize_text(text, Normalize.WHITESPACE)
    assert collapsed == " ".join(expected.split())


def test_long_runs_of_blanks_take_linear_time() -> None:
    text = ("x" + " " * 500_000 + "y\n ") * 4
    started = time.perf_counter()
    normalize_text(text, Normalize.STANDARD)
    assert time.perf_counter() - started < 2
