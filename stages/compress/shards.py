"""Writing a checkpoint's tensors as they come, in files of limited size, with the index that loaders expect."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from pipeline.tensors import Spec, TensorFile, TensorWriter

SINGLE = "model.safetensors"
Held = dict[str, tuple[Path, Spec]]  # name of a tensor -> the file where it waits, its shape and dtype


def shard_limit(source: Iterable[Path]) -> int | None:
    """Bytes of the largest of a checkpoint's files; None, for no limit, if it is a single one."""
    files = set(source)
    return None if len(files) < 2 else max(path.stat().st_size for path in files)


def write_shards(folder: Path, parts: Iterable[dict[str, Tensor]], limit: int | None) -> int:
    """Write `model.safetensors`, or several shards and `model.safetensors.index.json`. Returns the number of parameters.

    Each part goes to a file of its own first, and from there, when a shard is full, tensor by tensor into the shard: in memory
    there is one part, on the disk one shard twice.

    Args:
        folder: an existing folder.
        parts: tensors by their names on disk.
        limit: bytes of tensors in a file at most, a larger tensor apart; None for a single file.
    """
    shards: list[tuple[Path, list[str]]] = []
    waiting: Held = {}
    total = held = parameters = 0
    for number, part in enumerate(parts):
        path = folder / f"part-{number}"
        _write(path, part)
        for name, value in part.items():
            size = value.numel() * value.element_size()
            if waiting and limit is not None and held + size > limit:
                shards.append(_gather(folder, len(shards), waiting, path))
                waiting, held = {}, 0
            waiting[name] = path, (tuple(value.shape), value.dtype)
            held, total, parameters = held + size, total + size, parameters + value.numel()
    shards.append(_gather(folder, len(shards), waiting, None))
    if len(shards) == 1:
        shards[0][0].rename(folder / SINGLE)
        return parameters
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(shards, start=1):
        final = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        path.rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / f"{SINGLE}.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return parameters


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    specs = {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
    with TensorWriter(path, specs, raw_metadata={"format": "pt"}) as writer:
        for name, value in tensors.items():
            writer.write(name, value)


def _gather(folder: Path, number: int, waiting: Held, unfinished: Path | None) -> tuple[Path, list[str]]:
    """Make a shard of what waits, and remove the files it waited in but `unfinished`, whose rest goes into the next shard."""
    sources = {path: TensorFile(path) for path, _ in waiting.values()}
    path = folder / f"shard-{number}"
    if len(sources) == 1 and unfinished not in sources and set(sources[next(iter(sources))].names()) == waiting.keys():
        next(iter(sources)).rename(path)  # a part that is a shard by itself
        return path, list(waiting)
    with TensorWriter(path, {name: spec for name, (_, spec) in waiting.items()}, raw_metadata={"format": "pt"}) as writer:
        for name, (where, _) in waiting.items():
            writer.write(name, sources[where].read(name))
    for source in sources:
        if source != unfinished:
            source.unlink()
    return path, list(waiting)
