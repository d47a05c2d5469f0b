"""What ``batchsql init`` writes into a dbt project: the package, a prompt and a first llm model.

No file that is there is overwritten. The one file that is changed is the list of packages, and of
that only a line is added.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from batchsql.errors import BatchsqlError
from batchsql.project_names import find_names
from batchsql.version import __version__

PROJECT_FILE = "dbt_project.yml"
PACKAGE_NAME = "batchsql"
DEFAULT_MODEL = "local/smollm2-135m"
FIRST_LIMIT = 100
"""New requests that a run of a scaffolded model over the user's own rows may send at most."""

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Fewer examples, or other orders of them, make the smallest model give one label to every row.
_PROMPT = """\
system:
Is the customer positive or negative? Answer with JSON.

user:
I love the new colours.

assistant:
{{"{output}":"positive"}}

user:
Thanks, the lamp is perfect!

assistant:
{{"{output}":"positive"}}

user:
It came early, great!

assistant:
{{"{output}":"positive"}}

user:
Nobody answers me. Third message!

assistant:
{{"{output}":"negative"}}

user:
The lid is missing.

assistant:
{{"{output}":"negative"}}

user:
My invoice is wrong and I am still waiting.

assistant:
{{"{output}":"negative"}}

user:
{text}
"""

_MODEL = """\
-- Written by `batchsql init`. The rows below get one more column, answered by a language model.
-- Rows that were answered before are never sent again. To change what is asked: {prompt}
{{{{ config(
    materialized = 'llm',
    unique_key = {key},
    meta = {{'llm': {{
        'model': {model},
        'prompt': {prompt_text},{limit}
        'returns': {{
            '{output}': {{'enum': ['negative', 'positive']}}
        }}
    }}}}
) }}}}

{select}
"""

_LITERAL_ROWS = """\
select * from (
    values
        (1, 'My parcel came a day early. Great service!'),
        (2, 'The app crashes whenever I open the settings.'),
        (3, 'I have been waiting for my refund for three weeks.')
) as tickets(ticket_id, body)"""


class ScaffoldError(BatchsqlError):
    """A project cannot be added to as asked."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Where a first model's rows come from: a model of the project, its key and its text."""

    model: str
    key: str
    text: str


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was done, or was not needed."""

    path: str
    what: str
    is_change: bool


@dataclass(frozen=True, slots=True)
class Scaffold:
    """What was done in a project, and the name of its first llm model.

    ``is_for_one_machine`` says that the package was added by a path that others do not have.
    """

    model: str
    steps: tuple[Step, ...]
    is_for_one_machine: bool


def find_project(start: Path) -> Path:
    """Return the nearest directory from ``start`` upwards that holds a dbt project.

    Raises:
        ScaffoldError: there is none.
    """
    for directory in (start.resolve(), *start.resolve().parents):
        if (directory / PROJECT_FILE).is_file():
            return directory
    raise ScaffoldError(
        f"there is no {PROJECT_FILE} in {start.resolve()} or above it; go to a dbt project, name "
        "one with --project-dir, or make one with: dbt init"
    )


def installed_package() -> Path:
    """Return the directory of the macros that belong to this copy of batchsql.

    Raises:
        ScaffoldError: the macros are not beside the Python code.
    """
    here = Path(__file__).resolve().parent
    for directory in (here / "dbt_package", here.parent):
        if (directory / PROJECT_FILE).is_file() and (directory / "macros").is_dir():
            return directory
    raise ScaffoldError(f"the macros are missing beside {here}; install batchsql again")


def write_scaffold(project: Path, *, model: str, rows: Rows | None, git: str | None) -> Scaffold:
    """Add batchsql to a project: its package, a prompt and a model.

    Args:
        project: the directory of ``dbt_project.yml``.
        model: ``provider/name`` of the language model.
        rows: where the first model's rows come from; None for three rows written into it.
        git: the repository to take the macros from; None for the installed copy.

    Raises:
        ScaffoldError: a file of the project cannot be read, a name is no name, or the project has
            no model of the name that the rows are to come from. Nothing is written then.
    """
    config = _read_yaml(project / PROJECT_FILE)
    paths = config.get("model-paths") or ["models"]
    if not (isinstance(paths, list) and paths and isinstance(paths[0], str)):
        raise ScaffoldError(
            f"{PROJECT_FILE}: model-paths is {paths!r}; wanted is a list of folders"
        )
    if rows is not None:
        _check_names(rows)
        _check_is_there(rows.model, find_names(project, config))
    name = "ticket_labels" if rows is None else f"{rows.model}_labels"
    files = {
        f"prompts/{name}.md": render_prompt(rows),
        f"{paths[0].rstrip('/')}/{name}.sql": render_model(name, model, rows),
    }
    for path in files:
        # A file of the same name may be a link or a folder: anything in the way is left alone.
        if not (project / path).parent.resolve().is_relative_to(project.resolve()):
            raise ScaffoldError(f"{path} is outside the project; nothing was written")
    steps = [add_package(project, git)]
    steps += [_write_new(project, path, text) for path, text in files.items()]
    package = _entry(project, git).get("local", "")
    return Scaffold(name, tuple(steps), steps[0].is_change and Path(package).is_absolute())


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ScaffoldError(f"{path.name} cannot be read as YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ScaffoldError(f"{path.name} holds no mapping; dbt could not read it either")
    return content


def _write_new(project: Path, path: str, text: str) -> Step:
    file = project / path
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with file.open("x", encoding="utf-8", newline="\n") as opened:
            opened.write(text)
    except FileExistsError:
        return Step(path, "is there already, left as it is", is_change=False)
    return Step(path, "written", is_change=True)


# --- the prompt and the model ---------------------------------------------------------------------


def _check_names(rows: Rows) -> None:
    if not _IDENTIFIER.fullmatch(rows.model):
        raise ScaffoldError(f"--from got {rows.model!r}; give a model's name as ref() takes it")
    for option, column in (("--key", rows.key), ("--text", rows.text)):
        if not column.strip() or any(character in column for character in '"\\{}\r\n\0'):
            raise ScaffoldError(f"{option} got {column!r}; give a column that {rows.model} has")


def _check_is_there(model: str, names: Collection[str]) -> None:
    if model in names:
        return
    near = difflib.get_close_matches(model, sorted(names), 3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ScaffoldError(
        f"nothing was written: --from got {model!r}, but the project has no model, seed or "
        f"snapshot of that name{hint}"
    )


def _output_name(rows: Rows | None) -> str:
    taken = set() if rows is None else {rows.key.casefold(), rows.text.casefold()}
    return "sentiment" if "sentiment" not in taken else "llm_sentiment"


def render_prompt(rows: Rows | None) -> str:
    """Return the text of a prompt that asks for the sentiment of a row's text."""
    column = "body" if rows is None else rows.text
    reference = column if _is_variable(column) else f"row[{_quoted(column)}]"
    return _PROMPT.format(output=_output_name(rows), text=f"{{{{ {reference} }}}}")


def _is_variable(column: str) -> bool:
    """Whether a template reaches the column by its bare name."""
    reserved = {
        "row",
        "true",
        "false",
        "none",
        "and",
        "or",
        "not",
        "is",
        "in",
        "if",
        "else",
        "loop",
    }
    return bool(_IDENTIFIER.fullmatch(column)) and column.casefold() not in reserved


def render_model(name: str, model: str, rows: Rows | None) -> str:
    """Return the text of a model whose rows get one answered column."""
    if rows is None:
        key, select, limit = "ticket_id", _LITERAL_ROWS, ""
    else:
        key = rows.key
        columns = list(dict.fromkeys(_column_sql(column) for column in (rows.key, rows.text)))
        listed = "".join(f"\n    {column}," for column in columns).rstrip(",")
        select = (
            f"-- A run asks for at most {FIRST_LIMIT} new rows; take the limit out when you like "
            f"what you see.\nselect{listed}\nfrom {{{{ ref('{rows.model}') }}}}"
        )
        limit = f"\n        'limit': {FIRST_LIMIT},"
    prompt = f"prompts/{name}.md"
    return _MODEL.format(
        key=_quoted(key), model=_quoted(model), prompt=prompt, prompt_text=_quoted(prompt),
        limit=limit, output=_output_name(rows), select=select,
    )  # fmt: skip


def _column_sql(column: str) -> str:
    # An upper-case name may be meant for the lower-case column that PostgreSQL makes of it.
    from sqlglot.dialects.postgres import Postgres

    is_plain = bool(_IDENTIFIER.fullmatch(column))
    words = {word for keyword in Postgres.Tokenizer.KEYWORDS for word in keyword.split()}
    is_word = column.upper() in words
    return column if is_plain and not is_word else f'"{column}"'


def _quoted(text: str) -> str:
    """Write a text in the quotes of Jinja."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


# --- the list of packages -------------------------------------------------------------------------


def add_package(project: Path, git: str | None) -> Step:
    """Add the package to ``packages.yml``, or to ``dependencies.yml`` where the packages are.

    Comments, order and line ends of the file stay.

    Raises:
        ScaffoldError: the file cannot be read, or its form leaves no safe place for a line.
    """
    file = project / "packages.yml"
    dependencies = project / "dependencies.yml"
    if not file.exists() and dependencies.exists() and "packages" in _read_yaml(dependencies):
        file = dependencies
    entry = _entry(project, git)
    if not file.exists():
        file.write_text("packages:\n" + _block_lines(entry, "  ", "\n"), encoding="utf-8")
        return Step(file.name, f"written, with {_shown(entry)}", is_change=True)
    content = _read_yaml(file)
    packages = content.get("packages") or []
    if not (isinstance(packages, list) and all(isinstance(each, dict) for each in packages)):
        raise ScaffoldError(f"{file.name}: packages is {packages!r}; wanted is a list of mappings")
    for package in packages:
        if _is_batchsql(project, package):
            note = "" if package == entry else f"; this copy would be {_shown(entry)}"
            return Step(
                file.name, f"has batchsql already ({_shown(package)}){note}", is_change=False
            )
    with file.open(encoding="utf-8", newline="") as opened:
        text = opened.read()
    changed = _insert(text, entry)
    if changed is None or yaml.safe_load(changed) != {**content, "packages": [*packages, entry]}:
        raise ScaffoldError(
            f"{file.name} is written in a form that cannot be added to; add under packages:\n"
            + _block_lines(entry, "  ", "\n").rstrip()
        )
    with file.open("w", encoding="utf-8", newline="") as opened:
        opened.write(changed)
    return Step(file.name, f"added {_shown(entry)}", is_change=True)


def _entry(project: Path, git: str | None) -> dict[str, str]:
    if git is not None:
        return {"git": git, "revision": f"v{__version__}"}
    package = installed_package()
    # Inside the project, as in its own virtual environment, the path is the same for everyone.
    inside = package.is_relative_to(project.resolve())
    return {"local": os.path.relpath(package, project.resolve()) if inside else str(package)}


def _is_batchsql(project: Path, package: dict[str, Any]) -> bool:
    if isinstance(package.get("local"), str):
        path = project / package["local"]
        if not path.is_dir():  # of another machine, or gone
            return PACKAGE_NAME in Path(package["local"]).parts
        try:
            return _read_yaml(path / PROJECT_FILE).get("name") == PACKAGE_NAME
        except (ScaffoldError, OSError):
            return False
    source = str(package.get("git") or package.get("package") or "").rstrip("/")
    return source.removesuffix(".git").rpartition("/")[2] == PACKAGE_NAME


def _shown(package: dict[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in package.items())


def _scalar(value: str) -> str:
    """Write a text as YAML on one line, quoted only where it must be."""
    dumped: str = yaml.safe_dump(value, allow_unicode=True, width=100_000)
    return dumped.removesuffix("...\n").strip()


def _block_lines(entry: dict[str, str], indent: str, line_end: str) -> str:
    lines = [f"{key}: {_scalar(value)}" for key, value in entry.items()]
    first, *rest = lines
    return "".join(
        [f"{indent}- {first}{line_end}", *(f"{indent}  {line}{line_end}" for line in rest)]
    )


def _insert(text: str, entry: dict[str, str]) -> str | None:
    """Return the text with the entry as the last package, or None where no place was found."""
    line_end = "\r\n" if "\r\n" in text else "\n"
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is None or (isinstance(root, yaml.MappingNode) and not root.value):
        return _append(text, "packages:" + line_end + _block_lines(entry, "  ", line_end), line_end)
    if not isinstance(root, yaml.MappingNode):
        return None
    for key, value in root.value:
        if key.value != "packages":
            continue
        if isinstance(value, yaml.ScalarNode):  # `packages:` and nothing after it
            lines = _block_lines(entry, "  ", line_end)
            return _insert_after_line(text, key.end_mark.index, lines, line_end)
        if value.flow_style:
            flow = ", ".join(f"{name}: {_flow_scalar(each)}" for name, each in entry.items())
            if not value.value:
                start = value.start_mark.index + 1
                return f"{text[:start]}{{{flow}}}{text[start:]}"
            end = value.value[-1].end_mark.index
            return f"{text[:end]}, {{{flow}}}{text[end:]}"
        # The column of the first key tells the dash's: they are on one line.
        start = text.rfind("-", 0, value.value[0].start_mark.index)
        indent = " " * (start - (text.rfind("\n", 0, start) + 1))
        end = _last_leaf_end(value.value)
        return _insert_after_line(text, end, _block_lines(entry, indent, line_end), line_end)
    return _append(text, "packages:" + line_end + _block_lines(entry, "  ", line_end), line_end)


def _flow_scalar(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _last_leaf_end(nodes: Sequence[yaml.Node]) -> int:
    """Return where the last written value ends; a mapping's own end lies behind its comments."""
    node = nodes[-1]
    while not isinstance(node, yaml.ScalarNode) and node.value and not node.flow_style:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return int(node.end_mark.index)


def _insert_after_line(text: str, index: int, lines: str, line_end: str) -> str:
    end = text.find("\n", index)
    if end == -1:
        return _append(text, lines, line_end)
    return text[: end + 1] + lines + text[end + 1 :]


def _append(text: str, lines: str, line_end: str) -> str:
    gap = "" if not text or text.endswith("\n") else line_end
    return text + gap + lines
