"""Masks as they are stored: one bit per weight, packed along the inputs, least significant bit first."""

from __future__ import annotations

import torch
from jaxtyping import Bool, UInt8
from torch import Tensor, nn

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
    """Set the masked weights of `block` (block `index` of the dense model, loaded) to zero."""
    for matrix in prunable_matrices(block):
        weight = matrix.view(block)
        keep = unpack_mask(masks.read(mask_name(index, matrix.name)), weight.shape[1])
        weight.mul_(keep.to(weight.device))
