"""Prompt templates: parse once, bind to a model's columns, render one row after another."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.runtime import Context

from batchsql.declare.environment import ENVIRONMENT, GLOBALS, MAX_RENDERED_CHARS
from batchsql.declare.normalize import Normalize
from batchsql.declare.printing import in_utc, print_value
from batchsql.declare.references import (
    ROW,
    PrefixInterruption,
    References,
    find_interruption,
    static_start,
    walk,
)
from batchsql.declare.roles import MARK, mark_role_lines, split_messages, without_marks
from batchsql.errors import BatchsqlError
from batchsql.types import Message

_NEED_A_LOADER = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block)


class PromptSyntaxError(BatchsqlError):
    """A prompt template does not parse, or uses something that a prompt cannot have."""

    def __init__(self, message: str, line: int) -> None:
        self.line = line
        super().__init__(f"line {line} of the prompt: {message}")


class UnknownColumnsError(BatchsqlError):
    """A prompt refers to columns that the model does not select."""

    def __init__(self, names: Sequence[str], all_columns: Sequence[str]) -> None:
        self.names = tuple(names)
        listed = ", ".join(repr(name) for name in names)
        selected = ", ".join(all_columns) or "none"
        super().__init__(
            f"the prompt refers to {listed}, which the model does not select (or selects more than "
            f"once, differing only in case). The model's columns: {selected}"
        )


class RenderError(BatchsqlError):
    """A row could not be rendered: the template asks for something that its values do not have."""

    def __init__(self, message: str, line: int | None = None) -> None:
        self.line = line
        where = f"line {line} of the prompt: " if line is not None else ""
        super().__init__(f"{where}{message}")


def parse_prompt(source: str) -> Prompt:
    """Return the compiled template of a prompt file's text.

    A line holding just ``system:``, ``user:`` or ``assistant:`` starts a message; with none, the
    whole text is one user message. Role lines are read from the template only, never from a
    row's values. The same values always render to the same messages.

    Raises:
        PromptSyntaxError: the template is empty, does not parse, or uses what a prompt cannot
            have; ``line`` is the line in ``source``.
    """
    source = re.sub(r"\r\n?", "\n", source.removeprefix("\ufeff"))
    if not source.strip():
        raise PromptSyntaxError("the prompt is empty; write what the model should do", 1)
    try:
        # The first pass, over the text as it is, is for the messages of its errors.
        _check(ENVIRONMENT.parse(source))
        tree = ENVIRONMENT.parse(mark_role_lines(source))
        _check_printed_text(tree)
        references = References(tree)
        found = tuple(references.within(tree))
        _check_names(tree)
        template = _compile(tree)
        start = _compile(static_start(tree, references))
    except TemplateSyntaxError as error:
        raise PromptSyntaxError(error.message or "does not parse", error.lineno) from error
    except (RecursionError, SyntaxError) as error:
        raise PromptSyntaxError("the template is nested too deeply", 1) from error
    return Prompt(
        source=source,
        columns=_distinct(ref.column for ref in found),
        uses_all_columns=any(ref.column is None for ref in found),
        _variables=_distinct(ref.column for ref in found if not ref.by_row),
        _row_keys=_distinct(ref.column for ref in found if ref.by_row),
        _interruptions=find_interruption(tree, references),
        _template=template,
        _plain=_plain_parts(tree),
        _prefix_text=_render_prefix_text(start, is_whole=not found),
    )


def _plain_parts(tree: nodes.Template) -> tuple[str | nodes.Name, ...] | None:
    """Return the texts and names that a template prints one after the other, if that is all.

    Most prompts are no more than that, and joining the texts takes a third of rendering them.
    """
    parts: list[str | nodes.Name] = []
    for output in tree.body:
        if not isinstance(output, nodes.Output):
            return None
        for child in output.nodes:
            if isinstance(child, nodes.TemplateData):
                parts.append(child.data)
            elif isinstance(child, nodes.Name):
                parts.append(child)
            else:
                return None
    return tuple(parts)


def _distinct(names: Iterable[str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names if name is not None))


def _check(tree: nodes.Template) -> None:
    for node in walk(tree):
        if isinstance(node, _NEED_A_LOADER):
            tag = {"FromImport": "from"}.get(type(node).__name__, type(node).__name__.lower())
            raise PromptSyntaxError(
                f"{{% {tag} %}} is not possible: a prompt is one file. "
                "Put the text into this file, or into a {% macro %} in it",
                node.lineno,
            )
        if isinstance(node, nodes.Filter) and node.name not in ENVIRONMENT.filters:
            raise PromptSyntaxError(f"there is no filter named {node.name!r}", node.lineno)
        if isinstance(node, nodes.Test) and node.name not in ENVIRONMENT.tests:
            raise PromptSyntaxError(f"there is no test named {node.name!r}", node.lineno)
        if isinstance(node, nodes.Name) and node.name == "self":
            raise PromptSyntaxError(
                "'self' is a name of the template language; "
                "if it is meant to be a column, write row['self']",
                node.lineno,
            )


def _check_printed_text(tree: nodes.Template) -> None:
    prints = any(
        not isinstance(child, nodes.TemplateData) or without_marks(child.data).strip()
        for output in tree.find_all(nodes.Output)
        for child in output.nodes
    )
    if not prints:
        raise PromptSyntaxError("the prompt has no text; write what the model should do", 1)
    for block in tree.find_all((nodes.FilterBlock, nodes.AssignBlock)):
        # A filter could cut the mark in two, and the set text need not be printed as it is.
        if any(MARK in data.data for data in block.find_all(nodes.TemplateData)):
            tag = "filter" if isinstance(block, nodes.FilterBlock) else "set"
            raise PromptSyntaxError(
                f"a role line cannot stand inside {{% {tag} %}}; "
                "move it out, or into a {% macro %}",
                block.lineno,
            )


def _check_names(tree: nodes.Template) -> None:
    """Refuse two names that Python takes for one, since one would print the other's value."""
    seen: dict[str, str] = {}
    for name in walk(tree):
        if isinstance(name, nodes.Name):
            other = seen.setdefault(unicodedata.normalize("NFKC", name.name), name.name)
            if other != name.name:
                raise PromptSyntaxError(
                    f"the names {other!r} and {name.name!r} cannot be told apart; "
                    f"write row[{name.name!r}] for the column",
                    name.lineno,
                )


def _compile(tree: nodes.Template) -> Template:
    code = ENVIRONMENT.compile(tree, name="<prompt>", filename="<prompt>")
    return Template.from_code(ENVIRONMENT, code, GLOBALS)


def _render_prefix_text(start: Template, is_whole: bool) -> str:
    """Return what the template prints before the first message that refers to a column."""
    try:
        text = _render_text(start, {})
    except RenderError:
        return ""  # the row that meets the fault will report it
    return text if is_whole else text[: max(text.rfind(MARK), 0)]


class _Row(dict[str, Any]):
    """The columns by name; a name that differs in case only finds its column too."""

    def __missing__(self, key: Any) -> Any:
        matches = _matches(key, self) if isinstance(key, str) else []
        if len(matches) == 1:
            return self[matches[0]]
        raise KeyError(key)


def _fold(name: str) -> str:
    return unicodedata.normalize("NFC", name).lower()


def _matches(name: str, columns: Iterable[str]) -> list[str]:
    folded = _fold(name)
    return [column for column in columns if _fold(column) == folded]


def _render_text(template: Template, variables: Mapping[str, Any]) -> str:
    """Return the template's text, marks included.

    Raises:
        RenderError: whatever went wrong, with the line of the template.
    """
    context = Context(ENVIRONMENT, {**GLOBALS, **variables}, "<prompt>", {})
    parts: list[str] = []
    size = 0
    try:
        for part in template.root_render_func(context):
            size += len(part)
            if size > MAX_RENDERED_CHARS:
                raise RenderError(f"the prompt is longer than {MAX_RENDERED_CHARS} characters")
            parts.append(part)
    except RenderError:
        raise
    except Exception as error:
        line = _find_line(template, error.__traceback__)
        raise RenderError(f"{error} ({type(error).__name__})", line) from error
    return "".join(parts)


def _find_line(template: Template, traceback: TracebackType | None) -> int | None:
    line = None
    while traceback is not None:
        if traceback.tb_frame.f_globals.get("__jinja_template__") is template:
            line = template.get_corresponding_lineno(traceback.tb_lineno)
        traceback = traceback.tb_next
    return line


@dataclass(frozen=True)
class Prompt:
    """A compiled prompt template, not yet tied to a model's columns.

    ``columns`` are the columns it names, in order of first appearance, as the template spells
    them. ``uses_all_columns`` says that it uses ``row`` as a whole, and so every column.
    """

    source: str
    columns: tuple[str, ...]
    uses_all_columns: bool
    _variables: tuple[str, ...] = field(repr=False)
    _row_keys: tuple[str, ...] = field(repr=False)
    _interruptions: tuple[PrefixInterruption, ...] = field(repr=False)
    _template: Template = field(repr=False, compare=False)
    _plain: tuple[str | nodes.Name, ...] | None = field(repr=False, compare=False)
    _prefix_text: str = field(repr=False, compare=False)

    @property
    def refers_to_columns(self) -> bool:
        """Whether the prompt can differ between rows at all."""
        return self.uses_all_columns or bool(self.columns)

    def interrupts(self) -> list[PrefixInterruption]:
        """Return where a column ends the shared prefix although much static text follows it.

        Moving the column behind that text would let all rows share it.
        """
        return list(self._interruptions)

    def bind(self, all_columns: Sequence[str], mode: Normalize = Normalize.STANDARD) -> BoundPrompt:
        """Return the prompt tied to the columns that a model selects.

        A name means the column spelled exactly so, or else the only one that differs in case.

        Raises:
            UnknownColumnsError: names without such a column, all of them.
        """
        actual: dict[str, str] = {}
        for name in self.columns:
            matches = [name] if name in all_columns else _matches(name, all_columns)
            if len(matches) == 1:
                actual[name] = matches[0]
        unknown = [name for name in self.columns if name not in actual]
        if unknown:
            raise UnknownColumnsError(unknown, all_columns)
        used = all_columns if self.uses_all_columns else actual.values()
        inputs = tuple(dict.fromkeys(used))
        position = {column: index for index, column in enumerate(inputs)}
        row_keys = (
            tuple(position.items())
            if self.uses_all_columns
            else tuple((name, position[actual[name]]) for name in self._row_keys)
        )
        return BoundPrompt(
            inputs=inputs,
            mode=mode,
            prefix=split_messages(self._prefix_text, mode),
            _variables=tuple((name, position[actual[name]]) for name in self._variables),
            _row_keys=row_keys,
            _template=self._template,
            _plain=self._bind_plain({name: position[actual[name]] for name in self._variables}),
            _prefix_text=self._prefix_text,
        )

    def _bind_plain(self, position: Mapping[str, int]) -> tuple[str | int, ...] | None:
        """Return the parts after the prefix, each a text or the number of an input."""
        parts: list[str | int] = []
        for part in self._plain or ():
            if isinstance(part, str):
                parts.append(part)
            elif part.name in position:
                parts.append(position[part.name])
            else:  # something of the template language
                return None
        if not parts or not isinstance(parts[0], str):
            return tuple(parts) if parts and not self._prefix_text else None
        if not parts[0].startswith(self._prefix_text):
            return None
        parts[0] = parts[0][len(self._prefix_text) :]
        return tuple(parts)


@dataclass(frozen=True)
class BoundPrompt:
    """A prompt that renders rows. Safe to use from several threads.

    ``inputs`` are the columns it reads, in the order in which ``render`` takes their values.
    ``prefix`` holds the messages before the first one that refers to a column: every row's
    messages start with them.
    """

    inputs: tuple[str, ...]
    mode: Normalize
    prefix: tuple[Message, ...]
    _variables: tuple[tuple[str, int], ...] = field(repr=False)
    _row_keys: tuple[tuple[str, int], ...] = field(repr=False)
    _template: Template = field(repr=False, compare=False)
    _plain: tuple[str | int, ...] | None = field(repr=False, compare=False)
    _prefix_text: str = field(repr=False, compare=False)

    def render(self, values: Sequence[Any] | Mapping[str, Any]) -> tuple[Message, ...]:
        """Return one row's messages, normalised; those without text are left out.

        Args:
            values: in the order of ``inputs``, or by the name of the column.

        Raises:
            RenderError: the template fails on these values.
        """
        return self.prefix + self.render_suffix(values)

    def render_suffix(self, values: Sequence[Any] | Mapping[str, Any]) -> tuple[Message, ...]:
        """Return the row's own messages: those that ``render`` returns after ``prefix``."""
        # A tuple is told at once; to ask whether something is a mapping takes longer than all this.
        if not isinstance(values, (tuple, list)) and isinstance(values, Mapping):
            missing = [name for name in self.inputs if name not in values]
            if missing:
                raise RenderError(f"the row has no value for {', '.join(missing)}")
            values = [values[name] for name in self.inputs]
        elif len(values) != len(self.inputs):
            raise RenderError(
                f"the row has {len(values)} values, the prompt reads {len(self.inputs)}"
            )
        try:
            cells = [in_utc(cell) for cell in values]
        except OverflowError as error:
            raise RenderError(f"a time does not fit into UTC: {error}") from error
        if self._plain is not None:
            text = self._join(cells)
            if text is not None:
                return split_messages(text, self.mode)
        variables = {name: cells[index] for name, index in self._variables}
        if self._row_keys:
            variables[ROW] = _Row((name, cells[index]) for name, index in self._row_keys)
        text = _render_text(self._template, variables)
        # Rendering the static text again costs next to nothing and keeps the template's state,
        # so that the rest is what a whole rendering gives.
        if not text.startswith(self._prefix_text):
            raise RenderError("the start of the prompt is not the same for every row")
        return split_messages(text[len(self._prefix_text) :], self.mode)

    def _join(self, cells: Sequence[Any]) -> str | None:
        """Return what follows the prefix, None where only a rendering can say what is wrong."""
        try:
            text = "".join(
                [
                    part if isinstance(part, str) else print_value(cells[part])
                    for part in self._plain or ()
                ]
            )
        except Exception:  # noqa: BLE001  rendered once more, for the line to name
            return None
        return text if len(text) + len(self._prefix_text) <= MAX_RENDERED_CHARS else None
