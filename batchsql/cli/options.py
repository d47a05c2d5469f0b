"""What the commands share: options, the dbt project they open, errors, exit codes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import yaml  # type: ignore[import-untyped]

from batchsql import scaffold
from batchsql.cli.screen import clean
from batchsql.declare.durations import parse_seconds
from batchsql.errors import BatchsqlError

EXIT_OPEN_WORK = 3


class ReadableFailure(click.ClickException):
    """An error told in one message on stderr, exit code 1."""

    def show(self, file: Any = None) -> None:
        click.echo(f"Error: {clean(self.message, one_line=False)}", err=True)


def reports_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn every error into one message, unless ``--debug`` wants the stack trace."""

    @functools.wraps(command)
    def wrapper(*args: Any, debug: bool, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except Exception as error:
            if debug:
                raise
            raise ReadableFailure(_explain(error)) from error

    return click.option("--debug", is_flag=True, help="Show the stack trace of an error.")(wrapper)


def _explain(error: Exception) -> str:
    if isinstance(error, BatchsqlError):
        return str(error)
    # Only now, since what failed may be the import of dbt itself.
    try:
        from batchsql.dbt_project import explain_error
    except ImportError:
        return f"{type(error).__name__}: {error}"
    return explain_error(error)


def _read_vars(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    try:
        content = {} if value is None else yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise click.BadParameter(f"is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise click.BadParameter(f"got {value!r}; give a mapping such as '{{key: value}}'")
    return value


class Duration(click.ParamType):  # type: ignore[type-arg]
    """A time such as ``6h``, in seconds."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> float:
        seconds = parse_seconds(value)
        if seconds is None:
            self.fail(f"got {value!r}; write a duration such as 90s, 30m, 6h or 2d", param, context)
        return seconds


_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
project_dir_option = click.option(
    "--project-dir", type=_FOLDER, default=".",
    help="The dbt project: this folder or the nearest above it. Default: the current one.",
)  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def exit_code_option(when: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        "--exit-code", "use_exit_code", is_flag=True,
        help=f"End with {EXIT_OPEN_WORK} when {when}.",
    )  # fmt: skip


def opens_project(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command dbt's options for finding a project, as one ``options`` argument."""

    @functools.wraps(command)
    def wrapper(
        *args: Any, project_dir: Path, profiles_dir: Path | None, profile: str | None,
        target: str | None, variables: str | None, **kwargs: Any,
    ) -> None:  # fmt: skip
        root = scaffold.find_project(project_dir)
        from batchsql.dbt_project import ProjectOptions

        options = ProjectOptions(root, profiles_dir, profile, target, variables)
        command(*args, options=options, **kwargs)

    for option in (
        click.option("--vars", "variables", metavar="YAML", callback=_read_vars,
                     help="dbt variables, as a YAML mapping."),
        click.option("--target", "-t", help="The target of the profile. Default: as in dbt."),
        click.option("--profile", help="The profile. Default: the project's."),
        click.option("--profiles-dir", type=_FOLDER, envvar="DBT_PROFILES_DIR",
                     help="The folder of profiles.yml. Default: as in dbt."),
        project_dir_option,
    ):  # fmt: skip
        wrapper = option(wrapper)
    return reports_errors(wrapper)
