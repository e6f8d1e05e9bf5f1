"""A checkpoint on disk as every stage reads it: where it lies, what it holds, one tensor at a time.

Stage `model` leaves a folder with `manifest.json`: `{"source", "trust_remote_code", "files": [{"name", "bytes", "sha256"}]}` and
where the files are: `"folder"` (`"."` for that very folder, else a path, relative ones from the project's root) or
`"repository"` and `"commit"` (a snapshot in the Hugging Face cache). A folder without a manifest is a plain checkpoint.
"""

from __future__ import annotations

import json
import math
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.artifacts import read_json
from pipeline.errors import PalimpsestError
from pipeline.tensors import Spec, TensorFile

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MANIFEST = "manifest.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
AGAIN = "run: dvc repro --force --single-item model"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class CheckpointError(PalimpsestError):
    """A checkpoint is missing, incomplete, truncated, or not the one that stage `model` saw."""


class Checkpoint:
    """A safetensors checkpoint: `data/model`, `data/compressed`, or any checkpoint folder."""

    def __init__(self, path: Path, trust_remote_code: bool | None = None):
        """
        Args:
            path: the folder that stage `model` wrote, or any checkpoint folder.
            trust_remote_code: overrides what the manifest says; a folder without a manifest is not trusted by default.

        Raises CheckpointError if the files that the manifest pins are gone or have another size.
        """
        self.path = path
        self.manifest: dict[str, Any] = read_json(path / MANIFEST) if (path / MANIFEST).exists() else {}
        self.folder: Path = _resolve(path, self.manifest)
        self.trust_remote_code = bool(self.manifest.get("trust_remote_code")) if trust_remote_code is None else trust_remote_code
        _check_pins(self.folder, self.manifest.get("files", []))
        self._files: dict[Path, TensorFile] = {}

    @cached_property
    def shards(self) -> dict[str, Path]:
        """Tensor name on disk -> the safetensors file that holds it. Raises CheckpointError if a file is missing or truncated."""
        return find_shards(self.folder)

    @cached_property
    def specs(self) -> dict[str, Spec]:
        """Tensor name on disk -> (shape, dtype), from the headers alone."""
        specs: dict[str, Spec] = {}
        for path in sorted(set(self.shards.values())):
            for name, entry in read_header(path).items():
                if self.shards.get(name) == path:
                    specs[name] = (tuple(entry["shape"]), _dtype(entry["dtype"], name, path))
        return specs

    @cached_property
    def config(self) -> PretrainedConfig:
        """The model's configuration, read by transformers."""
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(self.folder, trust_remote_code=self.trust_remote_code)
        except (ValueError, OSError, KeyError) as error:
            hint = "; if it comes with code of its own that you trust, set model.trust_remote_code: true"
            hint = "" if self.trust_remote_code else hint
            raise CheckpointError(
                f"{self.folder}/config.json: transformers cannot read it ({_first_line(error)}){hint}"
            ) from None

    def stored_dtype(self) -> torch.dtype:
        """The dtype most of the numbers are stored in."""
        sizes: dict[torch.dtype, int] = {}
        for shape, dtype in self.specs.values():
            sizes[dtype] = sizes.get(dtype, 0) + math.prod(shape)
        return max(sizes, key=lambda dtype: sizes[dtype])

    def names(self) -> list[str]:
        """All tensor names on disk, sorted."""
        return sorted(self.shards)

    def __contains__(self, name: str) -> bool:
        return name in self.shards

    def read(self, name: str) -> Tensor:
        """The tensor `name` as stored, in memory of its own. Raises CheckpointError if it is not there."""
        if name not in self.shards:
            raise CheckpointError(f"{self.folder}: no tensor '{name}' (it has {', '.join(self.names()[:5])}, …)")
        path = self.shards[name]
        if path not in self._files:
            self._files[path] = TensorFile(path)
        return self._files[path].read(name)


def find_shards(folder: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file, by `model.safetensors.index.json` or the single `model.safetensors`.

    Raises CheckpointError naming what is missing: the weights, a shard of the index, a tensor of a shard, the end of a file.
    """
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            raise CheckpointError(_no_weights(folder))
        return dict.fromkeys(sorted(read_header(folder / SINGLE)), folder / SINGLE)
    try:
        index: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{folder / INDEX}: not an index of shards; fetch the checkpoint again") from None
    files = sorted(set(index.values()))
    missing = [name for name in files if not (folder / name).exists()]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of the {len(files)} files that {INDEX} names are missing "
            f"({', '.join(missing[:5])}); copy or download them again"
        )
    held = {name: read_header(folder / name).keys() for name in files}
    for tensor, name in index.items():
        if tensor not in held[name]:
            raise CheckpointError(f"{folder / name}: no tensor '{tensor}', though {INDEX} says so; fetch the checkpoint again")
    return {tensor: folder / index[tensor] for tensor in sorted(index)}


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> `{"dtype", "shape", "data_offsets"}` of a safetensors file, whose length must be what the header says."""
    problem = "not a safetensors file"
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size
            if length + 8 > size:
                raise CheckpointError(f"{path}: truncated or not a safetensors file ({size} bytes); copy or download it again")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        problem = f"truncated: {size} bytes, but its header promises {8 + length + end}"
        if 8 + length + end == size:
            return header
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        pass
    raise CheckpointError(f"{path}: {problem}; copy or download it again")


def count_elements(specs: dict[str, Spec]) -> int:
    """Number of values over all tensors of `specs`."""
    return sum(math.prod(shape) for shape, _ in specs.values())


def _resolve(path: Path, manifest: dict[str, Any]) -> Path:
    if "repository" in manifest:
        return _snapshot(manifest["repository"], manifest["commit"], [entry["name"] for entry in manifest.get("files", [])])
    folder = manifest.get("folder", ".")
    if folder == ".":
        return path
    root = Path(os.path.abspath(path)).parent.parent  # data/model lies two below the project's root
    return Path(folder) if Path(folder).is_absolute() else Path(os.path.relpath(root / folder))


def _snapshot(repository: str, commit: str, names: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, revision=commit, allow_patterns=names, local_files_only=True))
    except LocalEntryNotFoundError:
        raise CheckpointError(
            f"{repository} at commit {commit[:12]} is no longer in the Hugging Face cache of this machine; {AGAIN}"
        ) from None


def _check_pins(folder: Path, files: list[dict[str, Any]]) -> None:
    for entry in files:
        file = folder / entry["name"]
        size = file.stat().st_size if file.exists() else None
        if size != entry["bytes"]:
            what = "is gone" if size is None else f"has {size} bytes instead of {entry['bytes']}"
            raise CheckpointError(f"{file} {what}: the checkpoint changed since stage 'model' ran; {AGAIN}")


def _no_weights(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: no such folder"
    pickled = sorted(path.name for suffix in ("*.bin", "*.pt", "*.pth") for path in folder.glob(suffix))
    if not pickled:
        return f"{folder}: no {SINGLE} and no {INDEX} there, so no weights to read"
    return (
        f"{folder}: only pickled weights ({pickled[0]}), and nothing is unpickled here because a pickle can run code. If you "
        f'trust it, convert it once: python -c "from transformers import AutoModelForCausalLM as M; '
        f"M.from_pretrained('{folder.name}').save_pretrained('{folder.name}-safetensors')\" and copy the tokenizer files along"
    )


def _dtype(name: str, tensor: str, path: Path) -> torch.dtype:
    if name not in _DTYPES:
        raise CheckpointError(f"{path}: tensor '{tensor}' is stored as {name}, which is not supported; convert it to BF16")
    return _DTYPES[name]


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]
