"""A backend for tests that counts what reaches it in a file, across processes and crashes."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from batchsql.backends import local, registry
from batchsql.backends.base import Capabilities
from batchsql.errors import SystemicError
from batchsql.types import Call, Completion, FinishReason, ModelRef, Outcome, Request, Usage
from tests.support import points

PROVIDER = "fake"
_GATE_POLL_SECONDS = 0.02


class FakeBackend:
    """Answers by the schema alone, and misbehaves where a request's text asks for it.

    Directives inside the text of the last message:
    ``@truncate``, ``@invalid``, ``@refuse``, ``@filter``, ``@too-long``, ``@transient``: that
    outcome, always. ``@flaky``: invalid at the first try of this process, good afterwards.
    ``@systemic``: the whole backend fails. ``@raw:<json text>``: exactly this output.

    Engine options: ``log`` is the file that counts; ``identity`` stands for the weights;
    ``shard_requests`` is the size of a shard; ``is_engine`` makes it an engine; ``gate`` is a
    file it waits for once it has answered ``gate_after`` requests, and beside which it then makes
    one with ``.reached`` added.
    """

    def __init__(self, engine: Mapping[str, Any]) -> None:
        self._log = Path(engine["log"]) if engine.get("log") else None
        self._identity = str(engine.get("identity", "1"))
        self._shard_requests = int(engine.get("shard_requests", 20))
        self._is_engine = bool(engine.get("is_engine", False))
        self._gate = Path(engine["gate"]) if engine.get("gate") else None
        self._gate_after = int(engine.get("gate_after", 0))
        self._tries: Counter[str] = Counter()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(4, self._shard_requests, stays_inside=True, is_engine=self._is_engine)

    @property
    def version(self) -> str:
        return "fake 1"

    def identity(self) -> Mapping[str, Any]:
        return {"identity": self._identity}

    def complete(
        self, requests: Iterator[Request], call: Call, stop: threading.Event
    ) -> Iterator[Completion | None]:
        for number, request in enumerate(requests):
            if number == self._gate_after:
                yield from self._wait_at_gate(stop)
            if stop.is_set():
                return
            self._count(request)
            points.reach("answer")
            yield self._answer(request, call)

    def _wait_at_gate(self, stop: threading.Event) -> Iterator[None]:
        gate, self._gate = self._gate, None
        if gate is None:
            return
        gate.with_name(gate.name + ".reached").touch()
        while not gate.exists() and not stop.wait(_GATE_POLL_SECONDS):
            yield None

    def _count(self, request: Request) -> None:
        if self._log is None:
            return
        # One append is one write: lines of several processes do not mix.
        file = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, f"{request.request_key}\n".encode())
        finally:
            os.close(file)

    def _answer(self, request: Request, call: Call) -> Completion:
        text = request.messages[-1].content
        key = request.request_key
        self._tries[key] += 1
        if "@systemic" in text:
            raise SystemicError("the fake backend refuses everything")
        for directive, failure in (
            ("@too-long", Outcome.TOO_LONG),
            ("@transient", Outcome.TRANSIENT),
        ):
            if directive in text:
                return Completion(key, None, None, failure=failure, error=f"told to by {directive}")
        reason = FinishReason.STOP
        output = orjson.dumps(answer_for(call.schema, key)).decode()
        if "@raw:" in text:
            output = orjson.loads(text.partition("@raw:")[2])
        elif "@truncate" in text:
            reason, output = FinishReason.LENGTH, output[:-2]
        elif "@invalid" in text or ("@flaky" in text and self._tries[key] == 1):
            output = '{"nothing": "that was asked for"}'
        elif "@refuse" in text:
            reason = FinishReason.REFUSAL
        elif "@filter" in text:
            reason = FinishReason.CONTENT_FILTER
        return Completion(key, output, reason, usage=Usage(10, 5), model_reported=str(call.model))


def answer_for(schema: Mapping[str, Any], key: str) -> Any:
    """Return a value that matches a schema and depends on the request's key alone."""
    if "enum" in schema:
        options = [option for option in schema["enum"] if option is not None]
        return options[int(key, 16) % len(options)]
    kind = schema.get("type", "null")
    if isinstance(kind, list):
        kind = next(each for each in kind if each != "null")
    if kind == "object":
        return {name: answer_for(child, key) for name, child in schema["properties"].items()}
    if kind == "array":
        return [answer_for(schema["items"], key)]
    if kind == "string":
        if schema.get("format") == "date":
            return "2026-01-31"
        if schema.get("format") == "date-time":
            return "2026-01-31T12:00:00Z"
        return key[: schema.get("maxLength", 8)]
    return {"integer": schema.get("minimum", 1), "number": 1.5, "boolean": True}[kind]


def sent(log: Path) -> list[str]:
    """Return the request keys that reached the backend, in order."""
    return log.read_text().split() if log.exists() else []


def register() -> None:
    """Make ``fake/<name>`` a model, in this process."""
    registry.register(PROVIDER, open_fake, local.PARAMS)


def open_fake(model: ModelRef, engine: Mapping[str, Any], project_root: Path) -> FakeBackend:
    return FakeBackend(engine)
