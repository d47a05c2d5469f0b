"""Imports go one way, and nothing heavy is imported before it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import batchsql

PACKAGE = Path(batchsql.__file__).parent
RANKS = {
    "types": 0, "errors": 0, "version": 0, "garbage": 0, "behind": 0,
    "declare": 1,
    "validate": 2, "plan": 2,
    "backends": 3, "warehouse": 3, "emulate": 3,
    "progress": 4, "judging": 4, "carrying": 4, "figures": 4, "sizing": 4, "rendering": 4,
    "project_names": 4,
    "counting": 5, "ingest": 5, "pricing": 5, "placement": 5, "asking": 5,
    "batches": 6,
    "collecting": 7,
    "recovering": 8,
    "context": 8,
    "shipping": 9, "candidate": 9,
    "dispatch": 10, "rounds": 10, "completion": 10, "working": 10,
    "runner": 11,
    "dbt": 12, "scaffold": 12, "replaying": 12,
    "dbt_project": 13,
    "cli": 14,
}  # fmt: skip
SIBLINGS = [
    {"warehouse.duckdb", "warehouse.postgres"},
    {
        "backends.local", "backends.openai", "backends.anthropic", "backends.google",
        "backends.bedrock", "backends.vllm",
    },
    {
        "backends.local", "backends.openai_batch", "backends.anthropic_batch",
        "backends.google_batch", "backends.bedrock_batch", "backends.vllm",
    },
    {"backends.local", "backends.openai", "backends.anthropic_batch"},
    {"backends.local", "backends.openai", "backends.vllm_ray"},
]  # fmt: skip


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        if not name.endswith("__init__"):
            yield name, ast.parse(path.read_text())


def imports(tree: ast.Module) -> Iterator[str]:
    """Yield the batchsql modules that a module imports anywhere, by name within the package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("batchsql."):
            module = node.module.removeprefix("batchsql.")
            names = [f"{module}.{alias.name}" for alias in node.names]
            known = {name for name, _ in ALL}
            yield from (name if name in known else module for name in names)
        elif isinstance(node, ast.ImportFrom) and node.module == "batchsql":
            yield from (alias.name for alias in node.names)


ALL = list(modules())


def test_every_module_has_a_rank() -> None:
    assert {name.split(".")[0] for name, _ in ALL} == set(RANKS)


def test_imports_go_only_down() -> None:
    wrong = [
        f"{name} imports {imported}"
        for name, tree in ALL
        for imported in imports(tree)
        if imported in RANKS or "." in imported
        if name.split(".")[0] != imported.split(".")[0]
        if RANKS[imported.split(".")[0]] >= RANKS[name.split(".")[0]]
    ]
    assert wrong == []


def test_adapters_do_not_import_each_other() -> None:
    wrong = [
        f"{name} imports {imported}"
        for name, tree in ALL
        for imported in imports(tree)
        if any(name in group and imported in group for group in SIBLINGS)
    ]
    assert wrong == []


def test_importing_the_plugin_brings_in_nothing_heavy() -> None:
    code = (
        "import sys, dbt.plugins.manager, dbt.adapters.base.impl; before = set(sys.modules); "
        "import dbt_batchsql; assert dbt_batchsql.plugins; new = set(sys.modules) - before; "
        "print(sorted(m for m in new if m.split('.')[0] in "
        "('duckdb', 'pyarrow', 'pydantic', 'sqlglot', 'xllamacpp', 'jsonschema_rs')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    assert done.stdout.strip() == "[]"
