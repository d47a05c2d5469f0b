"""Calls, requests and dbt models for the tests at a real vLLM."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from batchsql.backends.base import StreamBackend
from batchsql.declare.returns import parse_returns
from batchsql.types import Call, Completion, Message, ModelRef, Request, Role
from tests.support.project import Project, duckdb_target
from tests.support.tables import rows_sql

SLOTS = 4
ENGINE = {"max_model_len": 512, "max_num_seqs": SLOTS}
"""Options of the engine in this process; one that is asked for with the same is loaded once."""

LABEL = {"label": {"enum": ["bug", "billing", "how to"]}}
ALL_KEYWORDS = {
    "whole": {"type": "integer"},
    "bounded": {"type": "integer", "minimum": 1, "maximum": 5},
    "free": {"type": "number"},
    "text": {"type": "string", "minLength": 2, "maxLength": 12},
    "label": {"enum": ["a", "b", None]},
    "fixed": {"const": "x y"},
    "yes": {"type": ["boolean", "null"]},
    "day": {"type": "string", "format": "date"},
    "list": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
    "nested": {"type": "object", "properties": {"p": {"type": "integer"}}, "description": "any"},
}


def call_for(declared: dict[str, Any], max_tokens: int | None = None, **params: Any) -> Call:
    returns, mistakes = parse_returns(declared)
    assert mistakes == []
    tokens = max_tokens or returns.default_max_tokens()
    return Call(ModelRef("vllm", "tiny"), params, returns.object_schema(), tokens)


def ask(number: int, text: str) -> Request:
    return Request(f"{number:032x}", (Message(Role.SYSTEM, "Label."), Message(Role.USER, text)))


def complete(backend: StreamBackend, call: Call, *texts: str) -> list[Completion]:
    requests = [ask(number, text) for number, text in enumerate(texts)]
    stream = backend.complete(iter(requests), call, threading.Event())
    found = {c.request_key: c for c in stream if c is not None}
    return [found[request.request_key] for request in requests]


def labelling_project(
    folder: Path, model: str, engine: Mapping[str, Any], bodies: Sequence[str], **llm: Any
) -> Project:
    """Return a project on DuckDB whose model ``labels`` asks about each of these texts."""
    project = Project(folder / "project", duckdb_target(folder / "warehouse.duckdb"))
    rows = [{"id": number, "body": body} for number, body in enumerate(bodies, 1)]
    project.model("tickets", rows_sql(rows))
    declaration = {
        "model": model,
        "prompt": "prompts/label.md",
        "returns": {
            "category": {"enum": ["billing", "bug", "other"]},
            "urgency": {"type": "integer", "minimum": 1, "maximum": 5},
        },
        "engine": dict(engine),
        **llm,
    }
    meta = {"llm": declaration}
    project.write(
        "models/labels.sql",
        f"{{{{ config(materialized='llm', unique_key='id', meta={meta!r}) }}}}\n"
        "select * from {{ ref('tickets') }}\n",
    )
    return project
