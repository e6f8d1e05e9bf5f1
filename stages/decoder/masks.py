"""masks.safetensors: one bit per weight, packed along the inputs, least significant bit first; where a method changed the weights
that stay, those too.

Tensors: `blocks.{block}.{matrix}` uint8, the packed mask; `kept.blocks.…` int64 [1], how many bits are set; `weights.blocks.…`
[out, in], the weights as they are to be, in the dtype of the checkpoint. Where the output head was asked for, `head` likewise.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, UInt8
from torch import Tensor, nn

from pipeline.artifacts import ArtifactError, producer
from pipeline.tensors import TensorFile, check_finite
from stages.decoder.matrices import prunable_matrices
from stages.decoder.skeleton import Decoder

HEAD = "head"  # name of the mask of the logits' matrix


def mask_name(block: int, matrix: str) -> str:
    """Name of a mask in masks.safetensors."""
    return f"blocks.{block}.{matrix}"


def kept_name(mask: str) -> str:
    """Name of the number of weights that a mask keeps."""
    return f"kept.{mask}"


def weight_name(mask: str) -> str:
    """Name of the matrix under a mask, where its weights were changed."""
    return f"weights.{mask}"


def packed_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Shape of the packed mask of a matrix [out, in]."""
    return shape[0], -(-shape[1] // 8)


def pack_mask(keep: Bool[Tensor, "out in"]) -> UInt8[Tensor, "out bytes"]:
    """Pack booleans into bytes; the last byte of a row is filled up with zeros."""
    return torch.from_numpy(np.packbits(keep.cpu().numpy(), axis=1, bitorder="little"))


def unpack_mask(packed: UInt8[Tensor, "out bytes"], columns: int) -> Bool[Tensor, "out in"]:
    """The inverse of `pack_mask`, for a matrix with `columns` inputs."""
    return torch.from_numpy(np.unpackbits(packed.numpy(), axis=1, count=columns, bitorder="little")).view(torch.bool)


def read_mask(masks: TensorFile, name: str, shape: tuple[int, ...]) -> Bool[Tensor, "out in"]:
    """The mask `name` of a matrix of `shape` [out, in]: True stays.

    Raises ArtifactError naming the file and the mask if it is missing, of another shape, or
    does not keep as many weights as it should.
    """
    if masks.shape(name) != packed_shape(shape):
        raise ArtifactError(
            f"{masks.path}: '{name}' has shape {masks.shape(name)}, not that of a mask of {tuple(shape)} weights; "
            + producer(masks.path)
        )
    keep = unpack_mask(masks.read(name), shape[1])
    expected, found = int(masks.read(kept_name(name))), int(keep.sum())
    if found != expected:
        raise ArtifactError(f"{masks.path}: '{name}' is damaged: {found} weights stay, not {expected}; {producer(masks.path)}")
    return keep


def apply_masks(block: nn.Module, masks: TensorFile, index: int) -> None:
    """Set the masked weights of `block` (block `index` of the dense model, loaded) to zero, and put changed ones in place.

    Raises ArtifactError naming the file and the tensor if a mask or a matrix of weights is missing, damaged or of another shape.
    """
    for matrix in prunable_matrices(block):
        _apply(masks, mask_name(index, matrix.name), matrix.view(block))


def apply_head_mask(decoder: Decoder, masks: TensorFile) -> None:
    """The same for the logits' matrix, where it was asked for. Needs `decoder.trunk(head=True)`."""
    if HEAD in masks:
        _apply(masks, HEAD, decoder.head_weight)


def _apply(masks: TensorFile, name: str, weight: Tensor) -> None:
    keep, mended = read_mask(masks, name, tuple(weight.shape)), weight_name(name)
    if mended in masks:
        if masks.shape(mended) != tuple(weight.shape):
            raise ArtifactError(
                f"{masks.path}: '{mended}' has shape {masks.shape(mended)}, not {tuple(weight.shape)}; {producer(masks.path)}"
            )
        weight.copy_(check_finite(masks.read(mended), f"{masks.path}: '{mended}' ({producer(masks.path)})"))
    weight.masked_fill_(~keep.to(weight.device), 0.0)
