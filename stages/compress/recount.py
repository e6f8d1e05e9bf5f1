"""The zeros of the exported files, counted again from the disk and held against the masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from pipeline.artifacts import ArtifactError
from pipeline.tensors import TensorFile
from stages.decoder.checkpoint import Checkpoint
from stages.decoder.masks import HEAD, mask_name, read_mask
from stages.decoder.matrices import prunable_matrices
from stages.decoder.skeleton import Decoder

Rename = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def recount(
    folder: Path, decoder: Decoder, kept: list[int], masks: TensorFile, on_disk: Rename, mixed: set[tuple[int, str]]
) -> int:
    """How many weights of the export are masked, each of which was found to be zero. One block of masks in memory.

    Args:
        folder: the exported checkpoint.
        decoder: the dense model.
        kept: its blocks that the export has, in order.
        on_disk: the exported model's tensors of one block -> the same as a file names and splits them. The masks go through it
            as the weights did.
        mixed: (dense block, matrix) that a folded operator filled after it was masked; these are left out.

    Raises ArtifactError naming file and tensor where a masked weight is not zero.
    """
    export = Checkpoint(folder)
    total = 0
    for what, part in _masks_by_part(decoder, kept, masks, mixed):
        for name, keep in on_disk(part).items():
            wrong = int(export.read(name)[~keep.bool()].count_nonzero())
            if wrong:
                raise ArtifactError(
                    f"{export.shards[name]}: '{name}' ({what} of the dense model): {wrong} weights that {masks.path} "
                    "removes are not zero; run: dvc repro --force --single-item compress"
                )
            total += keep.numel() - int(keep.count_nonzero())
    return total


def _masks_by_part(
    decoder: Decoder, kept: list[int], masks: TensorFile, mixed: set[tuple[int, str]]
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """(what it is, the masks in the places of the export's weights) for the head, if it has a mask, and for each block."""
    if HEAD in masks:
        shape = tuple(decoder.head_weight.shape)
        yield HEAD, {f"{decoder.head_path}.weight": read_mask(masks, HEAD, shape).to(torch.uint8)}
    for new, old in enumerate(kept):
        yield f"block {old}", _masks_as_weights(decoder, new, old, masks, mixed)


def _masks_as_weights(decoder: Decoder, new: int, old: int, masks: TensorFile, mixed: set[tuple[int, str]]) -> dict[str, Tensor]:
    """The masks of block `old` in the places of the weights of block `new` of the export."""
    block = decoder.blocks[old]
    part: dict[str, Tensor] = {}
    for matrix in prunable_matrices(block):
        parameter = getattr(block.get_submodule(matrix.module), matrix.parameter)
        name = f"{decoder.path}.{new}.{matrix.module}.{matrix.parameter}"
        if name not in part:
            part[name] = torch.ones(parameter.shape, dtype=torch.uint8)
        if (old, matrix.name) in mixed:
            continue
        whole = part[name] if matrix.expert is None else part[name][matrix.expert]
        shape = tuple(matrix.view(block).shape)
        (whole.T if matrix.transposed else whole).copy_(read_mask(masks, mask_name(old, matrix.name), shape))
    return part
