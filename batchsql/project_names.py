"""What ``ref()`` can name in a dbt project, as far as its files tell without dbt."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

_DEFAULT_PATHS = {
    "model-paths": ["models"],
    "seed-paths": ["seeds"],
    "snapshot-paths": ["snapshots"],
}
_SUFFIXES = {".sql", ".py", ".csv"}
_SNAPSHOT = re.compile(r"\{%-?\s*snapshot\s+(\w+)")


def find_names(project: Path, config: Mapping[str, Any]) -> set[str]:
    """Return the names of the models, seeds and snapshots of a project and of its packages.

    Where a file cannot be read, its own name counts. A name may be there that dbt would not take,
    such as that of a disabled model.

    Args:
        project: the directory of ``dbt_project.yml``.
        config: what that file holds.
    """
    names = set(_names_of(project, config))
    packages = project / str(config.get("packages-install-path") or "dbt_packages")
    for file in packages.glob("*/dbt_project.yml"):
        names.update(_names_of(file.parent, _read_mapping(file)))
    return names


def _names_of(project: Path, config: Mapping[str, Any]) -> Iterator[str]:
    for key, default in _DEFAULT_PATHS.items():
        folders = config.get(key)
        for folder in folders if isinstance(folders, list) else default:
            for file in (project / str(folder)).rglob("*"):
                yield from _names_in(file)


def _names_in(file: Path) -> Iterable[str]:
    if file.suffix in (".yml", ".yaml"):
        content = _read_mapping(file)
        entries = [each for key in ("models", "seeds", "snapshots") for each in _list(content, key)]
        return [str(each["name"]) for each in entries if isinstance(each, dict) and "name" in each]
    if file.suffix not in _SUFFIXES:
        return []
    return [file.stem, *(_SNAPSHOT.findall(_read(file)) if file.suffix == ".sql" else ())]


def _list(content: Mapping[str, Any], key: str) -> list[Any]:
    found = content.get(key)
    return found if isinstance(found, list) else []


def _read_mapping(file: Path) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(_read(file))
    except yaml.YAMLError:
        return {}
    return content if isinstance(content, dict) else {}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
