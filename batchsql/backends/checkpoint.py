"""Finds a model's checkpoint on this machine and says what is in it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchsql.errors import MissingExtraError, SystemicError
from batchsql.types import ModelRef

_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# No pickles (.bin, .pt): a file from the hub must not be able to run code.
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
_HUB_IGNORED = ["*/*", "consolidated*"]
_PARTS = frozenset({".safetensors", ".json", ".jinja", ".txt", ".model", ".py", ".bin", ".pt"})
_TEMPLATE_FILE = "chat_template.jinja"
_TENSOR_BYTES = 4096
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's weights, tokenizer and configuration: a folder, or a model of the hub.

    ``path`` is the folder, or None for a model of the hub that is fetched when it is first needed:
    its ``commit`` says already what is in it.
    """

    model: ModelRef
    path: Path | None
    commit: str | None = None
    with_code: bool = False
    load_format: str | None = None

    def folder(self) -> Path:
        """Return the folder, fetched from the hub if it has to be.

        Raises:
            SystemicError: it cannot be fetched, or holds no weights.
        """
        folder = self.path or _download(self.model, self.commit, self.with_code)
        if self.load_format is None and not has_weights(folder):
            raise SystemicError(
                f"model {self.model}: {folder} holds no .safetensors file; convert the weights, or "
                "say with engine.load_format how they are stored"
            )
        return folder

    def identity(self) -> Mapping[str, Any]:
        """Return what makes this checkpoint's answers; needs the folder unless a commit is known.

        Raises:
            SystemicError: a file in the folder is broken.
        """
        if self.path is None:
            return {"hub_commit": self.commit}
        return {
            "checkpoint_sha256": folder_sha256(self.path),
            "chat_template_sha256": chat_template_sha256(self.path),
        }


def find_checkpoint(
    model: ModelRef,
    project_root: Path,
    revision: str | None,
    *,
    with_code: bool,
    load_format: str | None = None,
) -> Checkpoint:
    """Find a model: a folder on this machine, or a model of the Hugging Face hub.

    A folder is named from the project's root and comes before a hub id of the same name. A model of
    the hub goes into the hub's usual cache, its safetensors only; without a network the cached copy
    is taken. It is fetched at once unless its revision is a commit, whose content never changes.
    ``with_code`` fetches the model's own Python files too; with a ``load_format`` the weights may
    be something else than safetensors.

    Raises:
        SystemicError: there is no such folder or model, or it holds no weights.
    """
    folder = project_root / model.name
    if folder.is_dir():
        if revision is not None:
            raise SystemicError(
                f"model {model} is a folder, which has no revisions; remove engine.revision, or "
                "name a model of the hub"
            )
        found = Checkpoint(model, folder.resolve(), load_format=load_format)
        found.folder()
        return found
    if not _HUB_ID.fullmatch(model.name):
        raise SystemicError(
            f"model {model}: there is no folder {folder}; accepted: vllm/<folder>, from the "
            "project's root or absolute, and vllm/<organisation>/<name> of the Hugging Face hub"
        )
    if revision is not None and _COMMIT.fullmatch(revision):
        return Checkpoint(model, None, revision, with_code, load_format)
    fetched = Checkpoint(model, _download(model, revision, with_code), load_format=load_format)
    fetched.folder()
    return fetched


def _download(model: ModelRef, revision: str | None, with_code: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingExtraError(
            f"model {model} has to be fetched from the Hugging Face hub, which needs packages that "
            "are not installed; run: pip install 'batchsql[vllm]', or name a commit as "
            "engine.revision, so that only the machine that runs it has to fetch it"
        ) from None
    try:
        found = snapshot_download(
            model.name,
            revision=revision,
            allow_patterns=[*_HUB_FILES, "*.py"] if with_code else _HUB_FILES,
            ignore_patterns=_HUB_IGNORED,
        )
    except Exception as error:
        raise SystemicError(
            f"model {model} cannot be fetched from the Hugging Face hub"
            f"{f' at revision {revision}' if revision else ''} ({type(error).__name__}), and there "
            "is no folder of that name below the project; check the name and the network, set "
            "HF_TOKEN for a gated model, or name a folder"
        ) from error
    return Path(found)


def has_weights(folder: Path) -> bool:
    """Return whether a folder holds safetensors."""
    return any(folder.glob("*.safetensors"))


def folder_sha256(folder: Path) -> str:
    """Return a digest of a checkpoint or an adapter that needs no reading of whole weights.

    It covers the name and size of every file that can make an answer, the whole content of
    configuration, tokenizer and templates, and of safetensors the header and the first 4 KiB of
    each tensor. So training, merging and quantising change it, and reading 100 GB is not needed to
    know that nothing changed. A README does not change it.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix not in _PARTS or path.name.startswith(".") or not path.is_file():
            continue
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        blocks = _tensor_starts(path) if path.suffix == ".safetensors" else _blocks(path)
        for block in blocks:
            digest.update(block)
    return digest.hexdigest()


def chat_template_sha256(folder: Path) -> str | None:
    """Return the digest of a checkpoint's chat template, or None when it has none."""
    file = folder / _TEMPLATE_FILE
    if file.is_file():
        return hashlib.sha256(file.read_bytes()).hexdigest()
    config = folder / "tokenizer_config.json"
    try:
        template = json.loads(config.read_text("utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    if template is None:
        return None
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            yield block


def _tensor_starts(path: Path) -> Iterator[bytes]:
    """Yield the header of a safetensors file and the beginning of each tensor, in their order.

    The layout is that of the safetensors format: the header's length in 8 bytes, the header as
    JSON, and the tensors at the offsets that it names.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise SystemicError(f"{path} is no safetensors file, or is cut off; fetch it again")
        header = file.read(length)
        yield header
        try:
            tensors = json.loads(header)
            starts = sorted(
                (tensor["data_offsets"][0], tensor["data_offsets"][1])
                for name, tensor in tensors.items()
                if name != "__metadata__"
            )
        except (ValueError, AttributeError, LookupError, TypeError) as error:
            raise SystemicError(f"{path} is no safetensors file; fetch it again") from error
        for start, end in starts:
            file.seek(8 + length + start)
            yield file.read(min(_TENSOR_BYTES, end - start))
