"""What vLLM is loaded with: all that is declared, and less of it after deaths."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from batchsql.backends import vllm_core
from batchsql.backends.checkpoint import Checkpoint
from batchsql.backends.engine_owner import MAX_RESTARTS
from batchsql.backends.vllm_core import Settings, VllmStart

MEMORY = 0.8
"""The share of the memory that the first engine takes."""


class Vllm:
    """Stands for the package: notes what each engine is loaded with."""

    def __init__(self, is_cpu: bool, default_num_seqs: int, patch: pytest.MonkeyPatch) -> None:
        self.loaded: list[dict[str, Any]] = []
        self._default_num_seqs = default_num_seqs
        package, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
        package.__dict__["LLM"] = self._load
        platforms.__dict__["current_platform"] = SimpleNamespace(is_cpu=lambda: is_cpu)
        patch.setitem(sys.modules, "vllm", package)
        patch.setitem(sys.modules, "vllm.platforms", platforms)
        patch.setattr(vllm_core, "_ENVIRONMENT", {})  # would outlive the test

    def _load(self, **arguments: Any) -> Any:
        self.loaded.append(arguments)
        sequences = arguments.get("max_num_seqs", self._default_num_seqs)
        memory = arguments.get("gpu_memory_utilization", MEMORY)
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=sequences),
            model_config=SimpleNamespace(max_model_len=512),
            cache_config=SimpleNamespace(gpu_memory_utilization=memory),
        )
        engine = SimpleNamespace(vllm_config=config, engine_core=object())
        return SimpleNamespace(llm_engine=engine, get_tokenizer=object)


def start_of(**options: Any) -> VllmStart:
    checkpoint = SimpleNamespace(folder=lambda: Path("model"))
    return VllmStart(Settings(cast(Checkpoint, checkpoint), options, None))


@pytest.mark.parametrize(
    ("options", "sequences"),
    [
        ({}, (None, 32, 16)),  # half, and half again, of the 64 that vLLM chose
        ({"max_num_seqs": 6}, (6, 3, 1)),
        ({"max_num_seqs": 1}, (1, 1, 1)),
    ],
)
def test_engine_takes_less_after_deaths_and_all_again_after_none(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], sequences: tuple[int | None, ...]
) -> None:
    vllm = Vllm(False, 64, monkeypatch)
    start = start_of(**options)
    assert len(sequences) == MAX_RESTARTS + 1  # there are no more deaths than these
    for deaths in range(len(sequences)):
        start(deaths)
    start(0)
    *shrinking, again = vllm.loaded
    assert tuple(each.get("max_num_seqs") for each in shrinking) == sequences
    assert again == shrinking[0]
    # A tenth less each time, of what the first had.
    assert "gpu_memory_utilization" not in shrinking[0]
    assert [each["gpu_memory_utilization"] for each in shrinking[1:]] == pytest.approx(
        [MEMORY * 0.9, MEMORY * 0.9 * 0.9]
    )


def test_declared_memory_is_what_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = Vllm(False, 64, monkeypatch)
    start = start_of(gpu_memory_utilization=0.5)
    start(0)
    start(1)
    shares = [each["gpu_memory_utilization"] for each in vllm.loaded]
    assert shares == pytest.approx([0.5, 0.45])


def test_engine_on_a_cpu_has_no_share_of_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = Vllm(True, 64, monkeypatch)
    start = start_of()
    start(0)
    start(1)
    assert [each.get("max_num_seqs") for each in vllm.loaded] == [None, 32]
    assert not any("gpu_memory_utilization" in each for each in vllm.loaded)
