"""Which columns a template refers to, and what of it is the same for every row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.idtracking import VAR_LOAD_ALIAS, VAR_LOAD_RESOLVE
from jinja2.visitor import NodeTransformer

from batchsql.declare.environment import ENVIRONMENT, GLOBALS
from batchsql.declare.roles import without_marks

INTERRUPTION_MIN_CHARS = 200
"""Static text after the first column that is worth a warning."""


@dataclass(frozen=True, slots=True)
class PrefixInterruption:
    """A column, first printed at ``line``, that ends the shared prefix early.

    ``static_chars`` is how much text that is equal for every row follows it.
    """

    name: str
    line: int
    static_chars: int


ROW = "row"
"""The name by which a template means the row as a whole, unless it gives it another meaning."""

_ROW_METHODS = frozenset({"items", "keys", "values", "get"})
_DEFINITIONS = (nodes.Assign, nodes.AssignBlock, nodes.Macro)


@dataclass(frozen=True, slots=True)
class Reference:
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
        super().__init__(ENVIRONMENT, "<prompt>", "<prompt>", optimized=False)
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
    return isinstance(node, nodes.Name) and node.name == ROW and id(node) in outer_names


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


def walk(node: nodes.Node) -> Iterator[nodes.Node]:
    """Yield a node and all below it, in the order of the source."""
    yield node
    for child in _children(node):
        yield from walk(child)


class References:
    """The uses of columns in a template, by node; ``row.x`` in the tree becomes ``row['x']``."""

    def __init__(self, tree: nodes.Template) -> None:
        resolver = _NameResolver()
        resolver.visit(tree)
        # A builtin's name is the builtin only where it is called; `{{ range }}` is a column.
        called = {id(node.node) for node in tree.find_all(nodes.Call)}
        self.outer_names = {
            id(name) for name in resolver.names if not (name.name in GLOBALS and id(name) in called)
        }
        _RowAttributes(self.outer_names).visit(tree)
        tree.set_environment(ENVIRONMENT)

    def within(self, node: nodes.Node) -> Iterator[Reference]:
        """Yield the references in ``node`` in the order of the source."""
        key = node.arg if isinstance(node, nodes.Getitem) else None
        if (
            isinstance(node, nodes.Getitem)
            and isinstance(key, nodes.Const)
            and isinstance(key.value, str)
            and _is_row(node.node, self.outer_names)
        ):
            yield Reference(key.value, node.lineno, by_row=True)
        elif isinstance(node, nodes.Name):
            if _is_row(node, self.outer_names):
                yield Reference(None, node.lineno, by_row=True)
            elif id(node) in self.outer_names:
                yield Reference(node.name, node.lineno, by_row=False)
        else:
            for child in _children(node):
                yield from self.within(child)

    def first_in(self, node: nodes.Node) -> Reference | None:
        """Return the first reference in ``node``, if there is one."""
        return next(self.within(node), None)


def _bound_names(node: nodes.Node) -> set[str]:
    """Return the names that a definition gives a value to."""
    if isinstance(node, nodes.Macro):
        return {node.name}
    target = node.target if isinstance(node, (nodes.Assign, nodes.AssignBlock)) else node
    return {name.name for name in walk(target) if isinstance(name, (nodes.Name, nodes.NSRef))}


def _loads(node: nodes.Node) -> set[str]:
    return {name.name for name in walk(node) if isinstance(name, nodes.Name) and name.ctx == "load"}


def static_start(tree: nodes.Template, references: References) -> nodes.Template:
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
        return not (own_names - set(GLOBALS)) and node.find(nodes.NSRef) is None

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
    start.set_environment(ENVIRONMENT)
    return start


def find_interruption(
    tree: nodes.Template, references: References
) -> tuple[PrefixInterruption, ...]:
    """Return the first printed column if much text follows it that does not depend on the row."""
    first: Reference | None = None
    tainted: dict[str, Reference] = {}
    static_chars = 0

    def reference_in(node: nodes.Node) -> Reference | None:
        found = references.first_in(node)
        if found is not None:
            return found
        for name in walk(node):
            if isinstance(name, nodes.Name) and name.ctx == "load" and name.name in tainted:
                return Reference(tainted[name.name].column, name.lineno, by_row=False)
        return None

    def visit(node: nodes.Node) -> None:
        nonlocal first, static_chars
        if isinstance(node, nodes.TemplateData):
            static_chars += len(without_marks(node.data)) if first else 0
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
    return (PrefixInterruption(first.column or ROW, first.line, static_chars),)
