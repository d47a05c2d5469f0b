"""A tiny checkpoint with random weights: it knows nothing, but vLLM treats it like any other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchsql.backends import vllm as vllm_backend

TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Qwen2 of 100 KB whose tokens are single bytes."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder)
    return folder


@pytest.fixture(autouse=True, scope="session")
def _engines_end_with_the_tests() -> Iterator[None]:
    """End them while there is still a stderr that they can write to."""
    yield
    vllm_backend._close_all()


def write_checkpoint(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=wrapped.eos_token_id,
        pad_token_id=wrapped.pad_token_id,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def write_adapter(folder: Path) -> None:
    """Write a LoRA adapter for that model, strong enough to change what it says."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    rank, hidden = 4, 64
    torch.manual_seed(1)
    weights = {}
    for layer in range(2):
        for name in ("q_proj", "v_proj"):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{stem}.lora_A.weight"] = torch.randn(rank, hidden)
            weights[f"{stem}.lora_B.weight"] = torch.randn(hidden, rank)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 4 * rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
