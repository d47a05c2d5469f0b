"""What a declaration may say to vLLM: parameters, engine options, and the schema in its words."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchsql.backends.guided_schema import tightened
from batchsql.backends.params import Param, check_values
from batchsql.errors import Mistake, show_value

PARAMS: Mapping[str, Param] = {
    "temperature": Param("number", 0, 2),
    "max_tokens": Param("integer", 1, 131_072),
    "seed": Param("integer", 0, 2**63 - 1),
    "top_p": Param("number", 1e-6, 1),
    "top_k": Param("integer", 0, 1_000_000),
    "min_p": Param("number", 0, 1),
    "repetition_penalty": Param("number", 0.01, 2),
    "stop": Param("texts", maximum=16),
}
LORA = "lora"
EXECUTOR, RAY_ADDRESS, RAY_ACTORS = "executor", "ray_address", "ray_actors"
EXECUTOR_OPTIONS = frozenset({EXECUTOR, RAY_ADDRESS, RAY_ACTORS})  # not for vLLM itself
IN_PROCESS, ON_RAY = "process", "ray"
_TYPED: Mapping[str, Param] = {
    LORA: Param("text"),
    RAY_ADDRESS: Param("text"),
    RAY_ACTORS: Param("integer", 1, 10_000),
    "max_model_len": Param("integer", 16, 10_485_760),
    "max_num_seqs": Param("integer", 1, 65_536),
    "max_num_batched_tokens": Param("integer", 1, 10_485_760),
    "gpu_memory_utilization": Param("number", 0.01, 1),
    "tensor_parallel_size": Param("integer", 1, 1024),
    "pipeline_parallel_size": Param("integer", 1, 1024),
    "quantization": Param("text"),
    "dtype": Param("text"),
    "kv_cache_dtype": Param("text"),
    "revision": Param("text"),
    "tokenizer": Param("text"),
    "load_format": Param("text"),
    "trust_remote_code": Param("boolean"),
    "enforce_eager": Param("boolean"),
    "enable_prefix_caching": Param("boolean"),
    "seed": Param("integer", 0, 2**32 - 1),
    "block_size": Param("integer", 1, 4096),
    "kv_cache_memory_bytes": Param("integer", 1, 2**50),
}
_RESERVED: Mapping[str, str] = {
    "model": "the model stands in model, as vllm/<folder or hub id>",
    "hf_token": "a key does not belong in a declaration; set the environment variable HF_TOKEN",
    "enable_lora": "name the adapter's folder as engine.lora",
    "max_loras": "one adapter at a time is used; name its folder as engine.lora",
    "max_lora_rank": "it is read from the adapter; name its folder as engine.lora",
    **dict.fromkeys(
        ("structured_outputs_config", "reasoning_parser", "reasoning_parser_plugin"),
        "batchsql sets it, so that answers fit the schema",
    ),
    **dict.fromkeys(
        ("runner", "convert", "skip_tokenizer_init", "disable_log_stats", "code_revision"),
        "batchsql sets it",
    ),
}
# Those that make answers; the others only say how fast and in how much memory.
_ANSWER_OPTIONS = (
    "quantization",
    "kv_cache_dtype",
    "load_format",
    "tokenizer",
    "tokenizer_revision",
    "hf_overrides",
    "lora_dtype",
    "model_impl",
)


def check_vllm(engine: Mapping[str, Any]) -> list[Mistake]:
    """Return a mistake for each option that is wrong, as far as this machine can tell.

    Every argument of vLLM's own ``EngineArgs`` is accepted; which there are is known where vLLM is
    installed, and checked again where the engine is opened.
    """
    known = engine_arguments()
    mistakes = _check_executor(engine)
    for name, value in engine.items():
        where = f"engine.{name}"
        if name == EXECUTOR:
            continue
        if name in _RESERVED:
            mistakes.append(Mistake(where, f"cannot be given: {_RESERVED[name]}"))
        elif name in _TYPED:
            mistakes += check_values({name: value}, _TYPED, "engine")
        elif known and name not in known:
            accepted = sorted({LORA, *EXECUTOR_OPTIONS, *known} - set(_RESERVED))
            near = difflib.get_close_matches(name, accepted, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            mistakes.append(
                Mistake(
                    where,
                    f"got {show_value(name, value)}, but vLLM knows no argument of that name{hint}"
                    f" Accepted: {', '.join(accepted)}",
                )
            )
    return mistakes


def _check_executor(engine: Mapping[str, Any]) -> list[Mistake]:
    executor = engine.get(EXECUTOR, IN_PROCESS)
    if executor not in (IN_PROCESS, ON_RAY):
        said = f"got {show_value(EXECUTOR, executor)}; accepted: {IN_PROCESS}, {ON_RAY}"
        return [Mistake(f"engine.{EXECUTOR}", said)]
    mistakes = []
    if executor == IN_PROCESS:
        mistakes = [
            Mistake(f"engine.{name}", f"is for engine.{EXECUTOR}: {ON_RAY} alone; add that")
            for name in (RAY_ADDRESS, RAY_ACTORS)
            if name in engine
        ]
    if str(engine.get(RAY_ADDRESS, "")).startswith("ray://"):
        mistakes.append(
            Mistake(
                f"engine.{RAY_ADDRESS}",
                "Ray's client (ray://) cannot run this; run dbt on a node of the cluster, and give "
                "auto or host:port",
            )
        )
    return mistakes


@functools.cache
def engine_arguments() -> frozenset[str]:
    """Return the names of vLLM's engine arguments, or none where they cannot be found.

    They are read from its source: importing it takes many seconds, which a run with nothing to ask
    should not pay.
    """
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "engine" / "arg_utils.py"
        if path.is_file():
            for node in ast.parse(path.read_text("utf-8")).body:
                if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
                    return frozenset(
                        field.target.id
                        for field in node.body
                        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                        if not field.target.id.startswith("_")
                    )
    return frozenset()


def answer_options(engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the declared options that make answers, for the model's identity."""
    found = {name: engine[name] for name in _ANSWER_OPTIONS if name in engine}
    return {"dtype": engine.get("dtype", "auto"), **found}


def structured_output(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword of vLLM's ``StructuredOutputsParams`` that holds a model to a schema.

    An object whose only value comes from a list is a choice among its finished texts, which is
    faster than a grammar; everything else is a JSON schema.
    """
    properties = schema.get("properties", {})
    if len(properties) == 1 and schema.get("required") == list(properties):
        ((name, described),) = properties.items()
        if (values := _listed(described)) is not None:
            return {
                "choice": [
                    json.dumps({name: value}, ensure_ascii=False, separators=(",", ":"))
                    for value in values
                ]
            }
    return {"json": tightened(schema)}


def _listed(described: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists, or None where it does not."""
    if "enum" in described:
        return list(described["enum"])
    if described.get("type") == "null":
        return [None]
    if "anyOf" in described:
        parts = [_listed(option) for option in described["anyOf"]]
        if all(part is not None for part in parts):
            return [value for part in parts if part for value in part]
    return None
