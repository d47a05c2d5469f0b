"""Prompt templates: parse once, find the columns they refer to, render one row after another."""

from __future__ import annotations

import re
import secrets
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from types import NoneType, TracebackType
from typing import Any
from uuid import UUID

import orjson
from jinja2 import StrictUndefined, Template, TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.idtracking import VAR_LOAD_ALIAS, VAR_LOAD_RESOLVE
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from batchsql.declare.normalize import Normalize, normalize_text
from batchsql.errors import BatchsqlError
from batchsql.types import Message, Role

MAX_RENDERED_CHARS = 16 * 1024 * 1024
"""More than any model reads; a template that prints more is taken for a runaway loop."""

INTERRUPTION_MIN_CHARS = 200
"""Static text after the first column that is worth a warning."""


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


@dataclass(frozen=True, slots=True)
class PrefixInterruption:
    """A column, first printed at ``line``, that ends the shared prefix early.

    ``static_chars`` is how much text that is equal for every row follows it.
    """

    name: str
    line: int
    static_chars: int


# --- How values are printed -------------------------------------------------------------------

_JSON_OPTIONS = orjson.OPT_PASSTHROUGH_DATETIME


def print_value(value: Any) -> str:
    """Return the text that ``{{ value }}`` prints; the same in every process and time zone.

    Raises:
        TypeError: the value has no text of its own, such as a function or a lazy filter's result.
    """
    if type(value) is str:
        return value
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, UUID, timedelta)):
        return str(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, (date, time)):
        return _print_time(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return value.hex()
    if isinstance(value, (dict, list, tuple, range)):
        return print_json(value)
    if isinstance(value, Undefined):
        return str(value)  # raises, and names what is undefined
    # The default text of other objects holds a memory address: a new prompt in every process.
    raise TypeError(
        f"a {type(value).__name__} cannot be printed; "
        "after map, select, batch and the like add `| list` or `| join`"
    )


def print_json(value: Any, indent: int | None = None) -> str:
    """Return ``value`` as compact JSON, keys in their own order, nothing escaped for HTML.

    ``indent`` may be 2 for one line per entry.
    """
    if indent not in (None, 2):
        raise ValueError(f"tojson takes indent=2 or none, not indent={indent!r}")
    options = _JSON_OPTIONS | (orjson.OPT_INDENT_2 if indent else 0)
    try:
        return orjson.dumps(value, default=_json_default, option=options).decode()
    except TypeError:
        # Integers beyond 64 bits and keys that are no text, as in a warehouse's MAP.
        return orjson.dumps(_plain_json(value), default=_json_default, option=options).decode()


def _json_default(value: Any) -> Any:
    if isinstance(value, Decimal):
        # A fragment, since a float would lose digits.
        return orjson.Fragment(format(value, "f")) if value.is_finite() else None
    if isinstance(value, range):
        return list(value)
    return print_value(value)


def _plain_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {print_value(key): _plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_json(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return orjson.Fragment(str(value))
    return value


def _print_time(value: date | time) -> str:
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(timezone.utc).replace(tzinfo=None).isoformat() + "Z"
    return value.isoformat()


_UNCHANGED = frozenset({str, int, float, bool, NoneType, Decimal, date, UUID, bytes})


def _in_utc(value: Any) -> Any:
    """Return ``value`` with every aware time in UTC: a client's time zone must not show."""
    if isinstance(value, datetime):
        return value if value.tzinfo is None else value.astimezone(timezone.utc)
    if isinstance(value, dict):
        return {key: _in_utc(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_in_utc(item) for item in value]
    return value


# --- The environment --------------------------------------------------------------------------

# Attributes of dates whose answer depends on the clock or on the machine's time zone.
_CLOCK_ATTRIBUTES = frozenset(
    {"now", "today", "utcnow", "fromtimestamp", "timestamp", "astimezone"}
)


class _PromptEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr in _CLOCK_ATTRIBUTES and isinstance(obj, date):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if (
            operator == "**"
            and isinstance(left, int)
            and isinstance(right, int)
            and left.bit_length() * right > 4096
        ):
            raise SecurityError("the exponent is too large for a prompt")
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                if (
                    isinstance(text, (str, bytes, list, tuple))
                    and isinstance(times, int)
                    and len(text) * times > MAX_RENDERED_CHARS
                ):
                    raise SecurityError(f"a text repeated {times} times is too long for a prompt")
        return super().call_binop(context, operator, left, right)


def _make_environment() -> _PromptEnvironment:
    environment = _PromptEnvironment(
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=print_value,
    )
    # The same row must always give the same prompt.
    del environment.globals["lipsum"]
    del environment.filters["random"]
    environment.filters["tojson"] = print_json
    environment.filters["string"] = print_value
    return environment


_ENVIRONMENT = _make_environment()
_GLOBALS = dict(_ENVIRONMENT.globals)


# --- Role lines -------------------------------------------------------------------------------

_ROLE_LINE = re.compile(r"^(system|user|assistant):[ \t]*$", re.MULTILINE)
_ROLES = tuple(Role)

# No row can hold the mark, since it is drawn anew in each process. Only digits, so that a filter
# over a macro's text, such as upper, leaves it whole; \x02 is no white space, so trim does too.
_NONCE = str(secrets.randbits(160))
_MARK = f"\x02{_NONCE}\x02"
_PROBE = f"role{_NONCE}_"


def _mark_role_lines(source: str) -> str:
    """Return ``source`` with each role line in its text replaced by a mark of one line.

    A line that looks like one inside ``{{ }}``, ``{% %}`` or ``{# #}`` is left alone. To tell
    them apart each is first replaced by a name and a colon, which the lexer reads as it would read
    the role itself, and then looked for in the tokens of plain text.
    """
    probes = iter(range(len(source)))
    probed = _ROLE_LINE.sub(lambda match: f"{_PROBE}{next(probes)}:", source)
    text = "".join(value for _, kind, value in _ENVIRONMENT.lex(probed) if kind == "data")
    in_text = {int(number) for number in re.findall(rf"{_PROBE}(\d+):", text)}
    numbers = iter(range(len(source)))

    def replace(match: re.Match[str]) -> str:
        if next(numbers) not in in_text:
            return match.group()
        return f"{_MARK}{_ROLES.index(Role(match.group(1)))}"

    return _ROLE_LINE.sub(replace, source)


def _without_marks(text: str) -> str:
    return re.sub(rf"{_MARK}\d\n?", "", text)


def _split_messages(text: str, mode: Normalize) -> tuple[Message, ...]:
    head, *rest = text.split(_MARK)
    messages = []
    content = normalize_text(head, mode)
    if content and not content.isspace():
        messages.append(Message(Role.USER, content))
    for part in rest:
        # The role line's own line end is no part of the message.
        content = normalize_text(part[2:] if part[1:2] == "\n" else part[1:], mode)
        if content and not content.isspace():
            messages.append(Message(_ROLES[int(part[0])], content))
    return tuple(messages)


# --- What a template refers to ----------------------------------------------------------------

_ROW = "row"
_ROW_METHODS = frozenset({"items", "keys", "values", "get"})
_DEFINITIONS = (nodes.Assign, nodes.AssignBlock, nodes.Macro)
_NEED_A_LOADER = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block)


@dataclass(frozen=True, slots=True)
class _Reference:
    """One use of a row's value: ``column`` is None where all columns are meant."""

    column: str | None
    line: int
    by_row: bool


class _NameResolver(CodeGenerator):
    """Finds the names that come from outside the template, as Jinja's own compiler sees them.

    ``jinja2.meta`` does the same but returns names only; here each occurrence is needed, since a
    name can be a column in one place and a loop's variable in another.
    """

    def __init__(self) -> None:
        super().__init__(_ENVIRONMENT, "<prompt>", "<prompt>", optimized=False)
        self.names: list[nodes.Name] = []

    def write(self, x: str) -> None:
        pass

    def visit_Name(self, node: nodes.Name, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        if node.ctx == "load":
            load = frame.symbols.find_load(frame.symbols.ref(node.name))
            while load is not None and load[0] == VAR_LOAD_ALIAS and load[1] is not None:
                load = frame.symbols.find_load(load[1])
            if load is not None and load[0] == VAR_LOAD_RESOLVE:
                self.names.append(node)
        super().visit_Name(node, frame)


class _RowAttributes(NodeTransformer):
    """Turns ``row.items`` into ``row['items']``: a column, not the method of the mapping."""

    def __init__(self, outer_names: set[int]) -> None:
        self._outer_names = outer_names

    def visit_Call(self, node: nodes.Call) -> nodes.Node:  # noqa: N802 - Jinja's name
        callee = node.node
        if (
            isinstance(callee, nodes.Getattr)
            and callee.attr in _ROW_METHODS
            and _is_row(callee.node, self._outer_names)
        ):
            # Without its own name in the way, visit only what stands between the parentheses.
            node.node = nodes.Const(None)
            self.generic_visit(node)
            node.node = callee
            return node
        return self.generic_visit(node)

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:  # noqa: N802 - Jinja's name
        if _is_row(node.node, self._outer_names):
            key = nodes.Const(node.attr, lineno=node.lineno)
            return nodes.Getitem(node.node, key, "load", lineno=node.lineno)
        return self.generic_visit(node)


def _is_row(node: nodes.Node, outer_names: set[int]) -> bool:
    return isinstance(node, nodes.Name) and node.name == _ROW and id(node) in outer_names


def _children(node: nodes.Node) -> Iterable[nodes.Node]:
    """Return a node's children in the order of the source, which is not always Jinja's own."""
    if isinstance(node, nodes.CondExpr):
        return [child for child in (node.expr1, node.test, node.expr2) if child is not None]
    if isinstance(node, nodes.For):
        head: tuple[str, ...] = ("target", "iter", "test")
    elif isinstance(node, nodes.FilterBlock):
        head = ("filter",)
    else:
        return node.iter_child_nodes()
    return [*node.iter_child_nodes(only=head), *node.iter_child_nodes(exclude=head)]


def _walk(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    for child in _children(node):
        yield from _walk(child)


class _References:
    """The uses of columns in a tree, by node."""

    def __init__(self, tree: nodes.Template) -> None:
        resolver = _NameResolver()
        resolver.visit(tree)
        # A builtin's name is the builtin only where it is called; `{{ range }}` is a column.
        called = {id(node.node) for node in tree.find_all(nodes.Call)}
        self.outer_names = {
            id(name)
            for name in resolver.names
            if not (name.name in _GLOBALS and id(name) in called)
        }
        _RowAttributes(self.outer_names).visit(tree)
        tree.set_environment(_ENVIRONMENT)

    def within(self, node: nodes.Node) -> Iterator[_Reference]:
        """Yield the references in ``node`` in the order of the source."""
        key = node.arg if isinstance(node, nodes.Getitem) else None
        if (
            isinstance(node, nodes.Getitem)
            and isinstance(key, nodes.Const)
            and isinstance(key.value, str)
            and _is_row(node.node, self.outer_names)
        ):
            yield _Reference(key.value, node.lineno, by_row=True)
        elif isinstance(node, nodes.Name):
            if _is_row(node, self.outer_names):
                yield _Reference(None, node.lineno, by_row=True)
            elif id(node) in self.outer_names:
                yield _Reference(node.name, node.lineno, by_row=False)
        else:
            for child in _children(node):
                yield from self.within(child)

    def first_in(self, node: nodes.Node) -> _Reference | None:
        return next(self.within(node), None)


def _bound_names(node: nodes.Node) -> set[str]:
    """Return the names that a definition gives a value to."""
    if isinstance(node, nodes.Macro):
        return {node.name}
    target = node.target if isinstance(node, (nodes.Assign, nodes.AssignBlock)) else node
    return {name.name for name in _walk(target) if isinstance(name, (nodes.Name, nodes.NSRef))}


def _loads(node: nodes.Node) -> set[str]:
    return {
        name.name for name in _walk(node) if isinstance(name, nodes.Name) and name.ctx == "load"
    }


def _static_start(tree: nodes.Template, references: _References) -> nodes.Template:
    """Return the part of the template, from its start, that prints the same for every row.

    A definition that depends on a column prints nothing, so it is left out rather than ending
    the part; its name is then as good as a column.
    """
    tainted: set[str] = set()
    body: list[nodes.Node] = []

    def depends_on_row(node: nodes.Node) -> bool:
        return references.first_in(node) is not None or bool(tainted & _loads(node))

    def can_be_left_out(node: nodes.Node) -> bool:
        # A macro sees the last value of a name, so one further up may depend on this one.
        if any(_bound_names(node) & _loads(earlier) for earlier in body):
            return False
        if isinstance(node, nodes.Macro):
            return True  # a definition runs nothing
        # Names of the template's own may hold state, such as a cycler, that this would move on.
        own_names = {
            name.name
            for name in node.find_all(nodes.Name)
            if name.ctx == "load" and id(name) not in references.outer_names
        }
        return not (own_names - set(_GLOBALS)) and node.find(nodes.NSRef) is None

    for node in tree.body:
        if not depends_on_row(node):
            body.append(node)
        elif isinstance(node, _DEFINITIONS) and can_be_left_out(node):
            tainted |= _bound_names(node)
        else:
            if isinstance(node, nodes.Output):
                static = []
                for child in node.nodes:
                    if depends_on_row(child):
                        break
                    static.append(child)
                body.append(nodes.Output(static, lineno=node.lineno))
            break
    start = nodes.Template(body, lineno=1)
    start.set_environment(_ENVIRONMENT)
    return start


def _find_interruption(
    tree: nodes.Template, references: _References
) -> tuple[PrefixInterruption, ...]:
    """Return the first printed column if much text follows it that does not depend on the row."""
    first: _Reference | None = None
    tainted: dict[str, _Reference] = {}
    static_chars = 0

    def reference_in(node: nodes.Node) -> _Reference | None:
        found = references.first_in(node)
        if found is not None:
            return found
        for name in _walk(node):
            if isinstance(name, nodes.Name) and name.ctx == "load" and name.name in tainted:
                return _Reference(tainted[name.name].column, name.lineno, by_row=False)
        return None

    def visit(node: nodes.Node) -> None:
        nonlocal first, static_chars
        if isinstance(node, nodes.TemplateData):
            static_chars += len(_without_marks(node.data)) if first else 0
            return
        if isinstance(node, _DEFINITIONS):
            found = reference_in(node)
            if found is not None:
                tainted.update(dict.fromkeys(_bound_names(node), found))
            return
        # The text in a branch or loop that the row decides on could not be shared anyway.
        is_chosen = isinstance(node, nodes.If) and any(
            reference_in(branch.test) for branch in (node, *node.elif_)
        )
        is_repeated = isinstance(node, nodes.For) and reference_in(node.iter) is not None
        if isinstance(node, nodes.Expr) or is_chosen or is_repeated:
            first = first or reference_in(node)
            return
        for child in _children(node):
            visit(child)

    visit(tree)
    if first is None or static_chars < INTERRUPTION_MIN_CHARS:
        return ()
    return (PrefixInterruption(first.column or _ROW, first.line, static_chars),)


# --- Parsing ----------------------------------------------------------------------------------


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
        _check(_ENVIRONMENT.parse(source))
        tree = _ENVIRONMENT.parse(_mark_role_lines(source))
        _check_printed_text(tree)
        references = _References(tree)
        found = tuple(references.within(tree))
        _check_names(tree)
        template = _compile(tree)
        start = _compile(_static_start(tree, references))
    except TemplateSyntaxError as error:
        raise PromptSyntaxError(error.message or "does not parse", error.lineno) from error
    except (RecursionError, SyntaxError) as error:
        raise PromptSyntaxError("the template is nested too deeply", 1) from error

    named = dict.fromkeys(ref.column for ref in found if ref.column is not None)
    return Prompt(
        source=source,
        columns=tuple(named),
        uses_all_columns=any(ref.column is None for ref in found),
        _variables=_distinct(ref.column for ref in found if not ref.by_row),
        _row_keys=_distinct(ref.column for ref in found if ref.by_row),
        _interruptions=_find_interruption(tree, references),
        _template=template,
        _prefix_text=_render_prefix_text(start, is_whole=not found),
    )


def _distinct(names: Iterable[str | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names if name is not None))


def _check(tree: nodes.Template) -> None:
    for node in _walk(tree):
        if isinstance(node, _NEED_A_LOADER):
            tag = {"FromImport": "from"}.get(type(node).__name__, type(node).__name__.lower())
            raise PromptSyntaxError(
                f"{{% {tag} %}} is not possible: a prompt is one file. "
                "Put the text into this file, or into a {% macro %} in it",
                node.lineno,
            )
        if isinstance(node, nodes.Filter) and node.name not in _ENVIRONMENT.filters:
            raise PromptSyntaxError(f"there is no filter named {node.name!r}", node.lineno)
        if isinstance(node, nodes.Test) and node.name not in _ENVIRONMENT.tests:
            raise PromptSyntaxError(f"there is no test named {node.name!r}", node.lineno)
        if isinstance(node, nodes.Name) and node.name == "self":
            raise PromptSyntaxError(
                "'self' is a name of the template language; "
                "if it is meant to be a column, write row['self']",
                node.lineno,
            )


def _check_printed_text(tree: nodes.Template) -> None:
    prints = any(
        not isinstance(child, nodes.TemplateData) or _without_marks(child.data).strip()
        for output in tree.find_all(nodes.Output)
        for child in output.nodes
    )
    if not prints:
        raise PromptSyntaxError("the prompt has no text; write what the model should do", 1)
    for block in tree.find_all((nodes.FilterBlock, nodes.AssignBlock)):
        # A filter could cut the mark in two, and the set text need not be printed as it is.
        if any(_MARK in data.data for data in block.find_all(nodes.TemplateData)):
            tag = "filter" if isinstance(block, nodes.FilterBlock) else "set"
            raise PromptSyntaxError(
                f"a role line cannot stand inside {{% {tag} %}}; "
                "move it out, or into a {% macro %}",
                block.lineno,
            )


def _check_names(tree: nodes.Template) -> None:
    """Refuse two names that Python takes for one, since one would print the other's value."""
    seen: dict[str, str] = {}
    for name in _walk(tree):
        if isinstance(name, nodes.Name):
            other = seen.setdefault(unicodedata.normalize("NFKC", name.name), name.name)
            if other != name.name:
                raise PromptSyntaxError(
                    f"the names {other!r} and {name.name!r} cannot be told apart; "
                    f"write row[{name.name!r}] for the column",
                    name.lineno,
                )


def _compile(tree: nodes.Template) -> Template:
    code = _ENVIRONMENT.compile(tree, name="<prompt>", filename="<prompt>")
    return Template.from_code(_ENVIRONMENT, code, _GLOBALS)


def _render_prefix_text(start: Template, is_whole: bool) -> str:
    """Return what the template prints before the first message that refers to a column."""
    try:
        text = _render_text(start, {})
    except RenderError:
        return ""  # the row that meets the fault will report it
    return text if is_whole else text[: max(text.rfind(_MARK), 0)]


# --- Rendering --------------------------------------------------------------------------------


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
    context = Context(_ENVIRONMENT, {**_GLOBALS, **variables}, "<prompt>", {})
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
            prefix=_split_messages(self._prefix_text, mode),
            _variables=tuple((name, position[actual[name]]) for name in self._variables),
            _row_keys=row_keys,
            _template=self._template,
            _prefix_text=self._prefix_text,
        )


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
        if isinstance(values, Mapping):
            missing = [name for name in self.inputs if name not in values]
            if missing:
                raise RenderError(f"the row has no value for {', '.join(missing)}")
            values = [values[name] for name in self.inputs]
        elif len(values) != len(self.inputs):
            raise RenderError(
                f"the row has {len(values)} values, the prompt reads {len(self.inputs)}"
            )
        try:
            cells = [cell if type(cell) in _UNCHANGED else _in_utc(cell) for cell in values]
        except OverflowError as error:
            raise RenderError(f"a time does not fit into UTC: {error}") from error
        variables = {name: cells[index] for name, index in self._variables}
        if self._row_keys:
            variables[_ROW] = _Row((name, cells[index]) for name, index in self._row_keys)
        text = _render_text(self._template, variables)
        # Rendering the static text again costs next to nothing and keeps the template's state,
        # so that the rest is what a whole rendering gives.
        if not text.startswith(self._prefix_text):
            raise RenderError("the start of the prompt is not the same for every row")
        return _split_messages(text[len(self._prefix_text) :], self.mode)
