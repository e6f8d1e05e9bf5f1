"""Masks as they are stored: one bit per weight, packed along the inputs, least significant bit first."""

from __future__ import annotations

import torch
from jaxtyping import Bool, UInt8
from torch import Tensor, nn

from pipeline.artifacts import ArtifactError, producer
from pipeline.tensors import TensorFile
from stages.decoder.matrices import prunable_matrices

_BITS = 2 ** torch.arange(8, dtype=torch.uint8)


def mask_name(block: int, matrix: str) -> str:
    """Name of a mask in masks.safetensors."""
    return f"blocks.{block}.{matrix}"


def packed_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Shape of the packed mask of a matrix [out, in]."""
    return shape[0], -(-shape[1] // 8)


def pack_mask(keep: Bool[Tensor, "out in"]) -> UInt8[Tensor, "out bytes"]:
    """Pack booleans into bytes; the last byte of a row is filled up with zeros."""
    padded = nn.functional.pad(keep.cpu().to(torch.uint8), (0, -keep.shape[1] % 8))
    return (padded.view(len(keep), -1, 8) * _BITS).sum(-1, dtype=torch.uint8)


def unpack_mask(packed: UInt8[Tensor, "out bytes"], columns: int) -> Bool[Tensor, "out in"]:
    """The inverse of `pack_mask`, for a matrix with `columns` inputs."""
    bits = (packed[..., None] & _BITS) != 0
    return bits.flatten(1)[:, :columns]


def apply_masks(block: nn.Module, masks: TensorFile, index: int) -> None:
    """Set the masked weights of `block` (block `index` of the dense model, loaded) to zero.

    Raises ArtifactError naming the file if a mask is missing or has another shape than its matrix.
    """
    for matrix in prunable_matrices(block):
        weight, name = matrix.view(block), mask_name(index, matrix.name)
        if masks.shape(name) != packed_shape(tuple(weight.shape)):
            raise ArtifactError(
                f"{masks.path}: '{name}' has shape {masks.shape(name)}, not that of a mask of {tuple(weight.shape)} weights; "
                + producer(masks.path)
            )
        keep = unpack_mask(masks.read(name), weight.shape[1])
        weight.masked_fill_(~keep.to(weight.device), 0.0)
