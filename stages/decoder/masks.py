"""masks.safetensors: one bit per weight, packed along the inputs, least significant bit first; where a method changed the weights
that stay, those too.

Tensors: `blocks.{block}.{matrix}` uint8, the packed mask; `kept.blocks.…` int64 [1], how many bits are set; `weights.blocks.…`
[out, in], the weights as they are to be, in the dtype of the checkpoint.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, UInt8
from torch import Tensor, nn

from pipeline.artifacts import ArtifactError, producer
from pipeline.tensors import TensorFile, check_finite
from stages.decoder.matrices import prunable_matrices


def mask_name(block: int, matrix: str) -> str:
    """Name of a mask in masks.safetensors."""
    return f"blocks.{block}.{matrix}"


def kept_name(block: int, matrix: str) -> str:
    """Name of the number of weights that a mask keeps."""
    return f"kept.{mask_name(block, matrix)}"


def weight_name(block: int, matrix: str) -> str:
    """Name of a matrix whose weights were changed."""
    return f"weights.{mask_name(block, matrix)}"


def packed_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Shape of the packed mask of a matrix [out, in]."""
    return shape[0], -(-shape[1] // 8)


def pack_mask(keep: Bool[Tensor, "out in"]) -> UInt8[Tensor, "out bytes"]:
    """Pack booleans into bytes; the last byte of a row is filled up with zeros."""
    return torch.from_numpy(np.packbits(keep.cpu().numpy(), axis=1, bitorder="little"))


def unpack_mask(packed: UInt8[Tensor, "out bytes"], columns: int) -> Bool[Tensor, "out in"]:
    """The inverse of `pack_mask`, for a matrix with `columns` inputs."""
    return torch.from_numpy(np.unpackbits(packed.numpy(), axis=1, count=columns, bitorder="little")).view(torch.bool)


def read_mask(masks: TensorFile, index: int, matrix: str, shape: tuple[int, ...]) -> Bool[Tensor, "out in"]:
    """The mask of a matrix of `shape` [out, in]: True stays.

    Raises ArtifactError naming the file and the mask if it is missing, of another shape, or
    does not keep as many weights as it should.
    """
    name = mask_name(index, matrix)
    if masks.shape(name) != packed_shape(shape):
        raise ArtifactError(
            f"{masks.path}: '{name}' has shape {masks.shape(name)}, not that of a mask of {tuple(shape)} weights; "
            + producer(masks.path)
        )
    keep = unpack_mask(masks.read(name), shape[1])
    expected, found = int(masks.read(kept_name(index, matrix))), int(keep.sum())
    if found != expected:
        raise ArtifactError(f"{masks.path}: '{name}' is damaged: {found} weights stay, not {expected}; {producer(masks.path)}")
    return keep


def apply_masks(block: nn.Module, masks: TensorFile, index: int) -> None:
    """Set the masked weights of `block` (block `index` of the dense model, loaded) to zero, and put changed ones in place.

    Raises ArtifactError naming the file and the tensor if a mask or a matrix of weights is missing, damaged or of another shape.
    """
    for matrix in prunable_matrices(block):
        weight, name = matrix.view(block), weight_name(index, matrix.name)
        keep = read_mask(masks, index, matrix.name, tuple(weight.shape))
        if name in masks:
            if masks.shape(name) != tuple(weight.shape):
                raise ArtifactError(
                    f"{masks.path}: '{name}' has shape {masks.shape(name)}, not {tuple(weight.shape)}; {producer(masks.path)}"
                )
            weight.copy_(check_finite(masks.read(name), f"{masks.path}: '{name}' ({producer(masks.path)})"))
        weight.masked_fill_(~keep.to(weight.device), 0.0)
