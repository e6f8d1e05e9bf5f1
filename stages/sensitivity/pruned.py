"""One block with its lowest scores set to zero, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from pipeline.artifacts import ArtifactError, producer
from pipeline.tensors import TensorFile
from stages.decoder.matrices import Matrix, prunable_matrices
from stages.decoder.scores import magnitude_score, wanda_score
from stages.decoder.selection import keep_per_row
from stages.decoder.skeleton import Decoder


@contextmanager
def pruned(block: nn.Module, index: int, source: Decoder, sparsity: float, norms: TensorFile | None) -> Iterator[None]:
    """While the context lasts, in each row of each matrix of the loaded block the lowest scores are zero.

    Args:
        index: of the block in the model.
        source: the model in the precision that it is stored in, whose weights are scored, as stage masking does.
        sparsity: share of each matrix to remove.
        norms: statistics.safetensors, for Wanda's scores; None: by magnitude, as an expert that no token was routed to is anyway.
    """
    matrices = prunable_matrices(block)
    saved = [(matrix.view(block), matrix.view(block).clone()) for matrix in matrices]
    try:
        with source.block(index) as exact:
            for matrix, (weight, _) in zip(matrices, saved, strict=True):
                weight.mul_(keep_per_row(_score(matrix.view(exact), matrix, index, norms), sparsity))
        yield
    finally:
        for weight, before in saved:
            weight.copy_(before)


def _score(weight: Tensor, matrix: Matrix, index: int, norms: TensorFile | None) -> Tensor:
    key = f"blocks.{index}.{matrix.name}"
    if norms is None or int(norms.read(f"{key}.tokens")) == 0:
        return magnitude_score(weight)
    if norms.shape(f"{key}.squares") != (weight.shape[1],):
        raise ArtifactError(f"{norms.path}: '{key}' is not of {weight.shape[1]} inputs; {producer(norms.path)}")
    return wanda_score(weight, norms.read(f"{key}.squares").to(weight.device))
