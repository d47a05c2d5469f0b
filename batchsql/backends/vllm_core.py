"""vLLM's offline engine behind the protocol of ``engine_owner``: every line that calls it.

Written against vLLM 0.32, whose names are used here and nowhere else.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchsql.backends.checkpoint import Checkpoint
from batchsql.backends.engine_owner import Finished, RefusedError
from batchsql.backends.vllm_options import structured_output
from batchsql.errors import SystemicError
from batchsql.types import Call, FinishReason, Outcome, Usage

# Set before vLLM is imported, and only where the user has not.
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",  # it would report to its makers
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout belongs to dbt
    # A process with threads and database connections must not be forked.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
_KV_CACHE_ENV = "VLLM_CPU_KVCACHE_SPACE"
_CPU_KV_CACHE_BYTES = 1 << 30
_CPU_DEFAULTS: Mapping[str, Any] = {
    "enforce_eager": True,
    "dtype": "bfloat16",
    "block_size": 32,  # the default of 128 gives short prompts no prefix hits
}
_OURS: Mapping[str, Any] = {
    "runner": "generate",
    "disable_log_stats": False,  # or there are no metrics
    "use_tqdm_on_load": False,
    # White space can be forbidden here only, not in a request; small models loop on it.
    "structured_outputs_config": {"backend": "guidance", "disable_any_whitespace": True},
}
_MEMORY_FACTOR = 0.9
_WATCH_SECONDS = 0.5
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)

_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_AGAIN = frozenset({"abort", "error"})  # the engine's doing, not the prompt's

_FIGURES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_use",
    "vllm:prefix_cache_queries": "prefix_queried_tokens",
    "vllm:prefix_cache_hits": "prefix_hit_tokens",
    "vllm:num_preemptions": "preemptions",
    "vllm:prompt_tokens": "prompt_tokens",
    "vllm:generation_tokens": "generated_tokens",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What is loaded: a checkpoint, vLLM's arguments as declared, and an adapter or None."""

    checkpoint: Checkpoint
    options: Mapping[str, Any]
    lora: Path | None


class VllmStart:
    """Loads vLLM for one model, with a smaller appetite after deaths that no request explains."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._first: tuple[int, float] | None = None  # sequences and share of memory

    def __call__(self, deaths: int) -> VllmCore:
        """Load the engine.

        Raises:
            SystemicError: vLLM refuses the model, an argument, or finds too little memory.
        """
        folder = self._settings.checkpoint.folder()
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            from vllm import LLM
            from vllm.platforms import current_platform

            is_cpu = current_platform.is_cpu()
            llm = LLM(model=str(folder), **self._arguments(deaths, is_cpu))
        except Exception as error:
            raise SystemicError(
                f"vLLM cannot load {folder}: {type(error).__name__}: "
                f"{str(error)[:1000]} Check the engine options, and that the model and "
                "engine.max_model_len fit the memory; more stands on stderr"
            ) from error
        core = VllmCore(llm, self._settings.lora)
        if self._first is None:
            memory = llm.llm_engine.vllm_config.cache_config.gpu_memory_utilization
            self._first = (core.max_num_seqs, memory)
        return core

    def _arguments(self, deaths: int, is_cpu: bool) -> dict[str, Any]:
        arguments = {"tokenizer_mode": "hf", **self._settings.options, **_OURS}
        if is_cpu:
            arguments = {**_CPU_DEFAULTS, **arguments}
            if _KV_CACHE_ENV not in os.environ:
                arguments.setdefault("kv_cache_memory_bytes", _CPU_KV_CACHE_BYTES)
        if self._settings.lora is not None:
            arguments |= {
                "enable_lora": True,
                "max_loras": 1,
                "max_lora_rank": _lora_rank(self._settings.lora),
            }
        if deaths and self._first is not None:
            sequences, memory = self._first
            arguments["max_num_seqs"] = max(1, sequences >> deaths)
            if not is_cpu:
                arguments["gpu_memory_utilization"] = memory * _MEMORY_FACTOR**deaths
        return arguments


class VllmCore:
    """One loaded ``vllm.LLM``."""

    def __init__(self, llm: Any, lora: Path | None) -> None:
        self._engine = llm.llm_engine
        self._lora = _lora_request(lora) if lora is not None else None
        self.tokenizer: Any = llm.get_tokenizer()
        config = self._engine.vllm_config
        self.max_num_seqs: int = config.scheduler_config.max_num_seqs
        self.max_model_len: int = config.model_config.max_model_len
        _wake_when_killed(self._engine.engine_core)

    def make_sampling(self, call: Call) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        try:
            return SamplingParams(
                **{"temperature": 0, **call.params, "max_tokens": call.max_tokens},
                structured_outputs=StructuredOutputsParams(**structured_output(call.schema)),
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
        except Exception as error:
            raise SystemicError(f"vLLM refuses these parameters: {error}") from error

    def add(self, engine_id: str, token_ids: Sequence[int], sampling: Any) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            self._engine.add_request(
                engine_id,
                {"type": "token", "prompt_token_ids": list(token_ids)},
                sampling,
                lora_request=self._lora,
            )
        except EngineDeadError:
            raise
        except Exception as error:
            raise RefusedError(str(error)[:500]) from error

    def step(self) -> list[Finished]:
        return [_finished(output) for output in self._engine.step() if output.finished]

    def abort(self, engine_ids: Sequence[str]) -> None:
        self._engine.abort_request(list(engine_ids))

    def figures(self) -> Mapping[str, float]:
        """Return totals since the engine was loaded, and gauges as of its last step.

        vLLM keeps them for the process: two engines loaded at once are counted together.
        """
        found = dict.fromkeys(_FIGURES.values(), 0.0)
        for metric in self._engine.get_metrics():
            if metric.name in _FIGURES:
                found[_FIGURES[metric.name]] += metric.value
        return found

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def _wake_when_killed(engine_core: Any) -> None:
    """Make a step fail that waits for an engine process that was killed, such as for its memory.

    vLLM 0.32 notices such a death and marks it, but leaves the thread waiting that is in ``step``:
    it gets an exception only from a process that lived long enough to report its own end.
    """
    resources: Any = getattr(engine_core, "resources", None)
    outputs = getattr(engine_core, "outputs_queue", None)
    if outputs is None or not hasattr(resources, "engine_dead"):
        return  # an engine without a process of its own

    def watch() -> None:
        while not resources.engine_dead:  # also set by close
            time.sleep(_WATCH_SECONDS)
        outputs.put_nowait(RuntimeError("the engine's process is gone"))

    threading.Thread(target=watch, name="batchsql-engine-watch", daemon=True).start()


def _finished(output: Any) -> Finished:
    answer = output.outputs[0]
    usage = Usage(
        input_tokens=len(output.prompt_token_ids),
        output_tokens=len(answer.token_ids),
        cached_tokens=output.num_cached_tokens or 0,
    )
    reason = answer.finish_reason
    if reason in _FINISH_REASONS:
        return Finished(output.request_id, answer.text, _FINISH_REASONS[reason], usage)
    failure = Outcome.TRANSIENT if reason in _AGAIN else Outcome.REJECTED
    said = f"the engine stopped for the reason {reason!r}"
    return Finished(output.request_id, None, None, usage, failure, said)


def _lora_request(folder: Path) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", 1, str(folder))


def _lora_rank(folder: Path) -> int:
    """Return the smallest of vLLM's ranks that an adapter fits in."""
    try:
        rank = int(json.loads((folder / "adapter_config.json").read_text("utf-8"))["r"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SystemicError(f"{folder} is no LoRA adapter: its adapter_config.json has no r") from (
            error
        )
    return next((known for known in _LORA_RANKS if known >= rank), rank)
