from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from batchsql.backends.checkpoint import chat_template_sha256, folder_sha256
from batchsql.errors import SystemicError

TENSOR_BYTES = 10_000
COUNT = 3


def write_checkpoint(folder: Path) -> Path:
    folder.mkdir()
    offsets = [(n * TENSOR_BYTES, (n + 1) * TENSOR_BYTES) for n in range(COUNT)]
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            **{
                f"t{n}": {"dtype": "U8", "shape": [1], "data_offsets": o}
                for n, o in enumerate(offsets)
            },
        }
    ).encode()
    data = b"\x01" * TENSOR_BYTES * COUNT
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    (folder / "README.md").write_text("about")
    return folder


def with_byte(name: str, place: int) -> Callable[[Path], object]:
    """Change one byte, counted from the end of the file."""

    def change(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[place] ^= 1
        (folder / name).write_bytes(content)

    return change


@pytest.mark.parametrize(
    "change",
    [
        *(with_byte("model.safetensors", -n * TENSOR_BYTES) for n in range(1, COUNT + 1)),
        with_byte("config.json", 0),
        lambda folder: (folder / "extra.safetensors").write_bytes(
            (2).to_bytes(8, "little") + b"{}"
        ),
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        lambda folder: (folder / "chat_template.jinja").write_text("new"),
        lambda folder: (folder / "config.json").rename(folder / "other.json"),
        lambda folder: (folder / "modeling.py").write_text("x = 1"),
    ],
)
def test_what_makes_answers_changes_the_digest(
    change: Callable[[Path], object], tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "a")
    before = folder_sha256(folder)
    change(folder)
    assert folder_sha256(folder) != before


def test_digest_is_of_the_content_alone(tmp_path: Path) -> None:
    first, second = (write_checkpoint(tmp_path / name) for name in "ab")
    (second / "README.md").write_text("told anew")
    (second / ".cache").mkdir()
    assert folder_sha256(first) == folder_sha256(second)


def test_file_that_is_cut_off_is_an_error(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:40])
    with pytest.raises(SystemicError, match="fetch it again"):
        folder_sha256(folder)


def test_chat_template_is_found_where_checkpoints_keep_it(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a")
    in_config = chat_template_sha256(folder)
    (folder / "chat_template.jinja").write_text("new")
    in_file = chat_template_sha256(folder)
    assert in_config is not None
    assert in_file not in (None, in_config)
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text("{}")
    assert chat_template_sha256(folder) is None
