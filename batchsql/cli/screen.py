"""What the command line prints: lines, tables, JSON, and what it is busy with."""

from __future__ import annotations

import contextlib
import io
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from batchsql.progress import format_seconds

if TYPE_CHECKING:
    from rich.progress import TaskID

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_BIDI = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_LEAST_USD = 0.0001
_WHITE = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def clean(text: str, *, one_line: bool = True) -> str:
    """Return text without what a terminal would obey: escapes, control and direction characters.

    Line ends and tabs become visible (``\\n``), or stay where the text may have lines.
    """
    plain = _BIDI.sub("", _ESCAPE.sub("", text))
    kept = []
    for character in plain:
        if character in _WHITE:
            kept.append(_WHITE[character] if one_line or character == "\r" else character)
        elif unicodedata.category(character) not in ("Cc", "Cs"):
            kept.append(character)
    return "".join(kept)


def say(text: str) -> None:
    """Print lines of our own that may hold text of others."""
    click.echo(clean(text, one_line=False))


def print_json(document: object) -> None:
    """Print one JSON document in ASCII, so that it holds no control character."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table: fitted to a terminal, one row a line elsewhere.

    A column whose name starts with ``>`` holds numbers and is set to the right.
    """
    screen = Console(markup=False, highlight=False, emoji=False)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    cells = [[_cell(value) for value in row] for row in rows]
    for number, name in enumerate(columns):
        # A narrow window folds the long texts, not names, numbers and words.
        widest = max((len(row[number]) for row in cells), default=0)
        word = max(map(len, name.removeprefix(">").split()))
        table.add_column(
            name.removeprefix(">"),
            justify="right" if name.startswith(">") else "left",
            overflow="fold",
            min_width=max(word, min(widest, 30 if name == "model" else 10)),
        )
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    if screen.is_terminal:
        # Where even folding is not enough, the terminal breaks lines; nothing is cut off.
        needed = Console(width=1_000).measure(table).minimum + len(columns)  # and the gaps
        screen.width = max(screen.width, needed)
        screen.print(table)
        return
    # However long the lines: they may be for a program or a log.
    lines = io.StringIO()
    Console(file=lines, width=100_000, markup=False, highlight=False, emoji=False).print(table)
    click.echo("\n".join(line.rstrip() for line in lines.getvalue().rstrip("\n").split("\n")))


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else clean(str(value))


@contextlib.contextmanager
def working() -> Iterator[Callable[[str], None]]:
    """Show what is being done, on stderr and only where that is a terminal."""
    screen = Console(stderr=True, markup=False, highlight=False, emoji=False)
    if not screen.is_terminal:
        yield lambda message: None
        return
    with screen.status("") as status:
        yield lambda message: status.update(Text(clean(message)))


@contextlib.contextmanager
def bars() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar for each thing that is told of, on stderr and only where that is a terminal.

    What is yielded takes a name, how much of it is done, and of how much.
    """
    screen = Console(stderr=True, markup=False, highlight=False, emoji=False)
    if not screen.is_terminal:
        yield lambda name, done, total: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=screen) as progress:
        tasks: dict[str, TaskID] = {}

        def show(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total)
            progress.update(tasks[name], completed=done, total=total)

        yield show


def ago(seconds: float) -> str:
    return f"{format_seconds(max(0.0, seconds))} ago"


def usd(cost_usd: float) -> str:
    """Return a cost to a hundredth of a cent, never as nothing where something was paid."""
    if 0 < cost_usd < _LEAST_USD:
        return f"under {_LEAST_USD:.4f} USD"
    return f"{cost_usd:.4f} USD"


def number(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun, which gets an s unless its plural is given."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
