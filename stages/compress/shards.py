"""Writing a checkpoint's tensors as they come, in files of limited size, with the index that loaders expect."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from pipeline.tensors import TensorWriter

SHARD_BYTES = 512 * 1000**2  # at most this much waits in memory to be written, or one block if that is more


def write_shards(folder: Path, parts: Iterable[dict[str, Tensor]]) -> int:
    """Write `model.safetensors`, or several shards and `model.safetensors.index.json`. Returns the number of parameters.

    Args:
        folder: an existing folder.
        parts: tensors by their names on disk; a part is never split over two shards.
    """
    files: list[tuple[Path, list[str]]] = []
    waiting: dict[str, Tensor] = {}
    total_bytes = parameters = 0
    for part in parts:
        size = sum(value.numel() * value.element_size() for value in part.values())
        held = sum(value.numel() * value.element_size() for value in waiting.values())
        if waiting and held + size > SHARD_BYTES:
            files.append(_write(folder, len(files), waiting))
            waiting = {}
        waiting |= {name: value.detach().cpu().clone() for name, value in part.items()}
        total_bytes += size
        parameters += sum(value.numel() for value in part.values())
    files.append(_write(folder, len(files), waiting))
    if len(files) == 1:
        files[0][0].rename(folder / "model.safetensors")
        return parameters
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(files, start=1):
        final = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        path.rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return parameters


def _write(folder: Path, number: int, tensors: dict[str, Tensor]) -> tuple[Path, list[str]]:
    path = folder / f"shard-{number}"
    specs = {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
    with TensorWriter(path, specs, raw_metadata={"format": "pt"}) as writer:
        for name, value in tensors.items():
            writer.write(name, value)
    return path, list(tensors)
