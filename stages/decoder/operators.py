"""Ghost operators as they are stored, and where they act: between the blocks around a removed run."""

from __future__ import annotations

from pathlib import Path

from pipeline.artifacts import ArtifactError, producer, read_json


def read_removed(path: Path, blocks: int) -> list[int]:
    """The removed blocks that removal.json names, for a model of `blocks` blocks. Raises ArtifactError naming the file."""
    content = read_json(path)
    removed = content.get("removed") if isinstance(content, dict) else None
    if not isinstance(removed, list) or not all(type(one) is int and 0 <= one < blocks for one in removed):
        raise ArtifactError(f"{path}: names no blocks of a model of {blocks} ({removed}); {producer(path)}")
    if len(set(removed)) == blocks:
        raise ArtifactError(f"{path}: names all {blocks} blocks of the model; at least one has to stay")
    return removed


def runs_of(removed: list[int]) -> list[tuple[int, int]]:
    """Maximal runs [start, stop) of adjacent removed blocks: `[3, 4, 7]` -> `[(3, 5), (7, 8)]`."""
    runs: list[tuple[int, int]] = []
    for block in sorted(removed):
        if runs and runs[-1][1] == block:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return runs


def operator_name(start: int, stop: int) -> str:
    """Name of the operator of run [start, stop) in ghost.safetensors."""
    return f"runs.{start}-{stop}"
