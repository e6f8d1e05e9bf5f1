"""What a weight is worth to a pruning rule; the lowest go first."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def magnitude_score(weight: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
    """|W|, in float32."""
    return weight.float().abs()


def wanda_score(weight: Float[Tensor, "out in"], squares: Float[Tensor, " in"]) -> Float[Tensor, "out in"]:
    """|W_ij| · ||x_j||, in float32 (Wanda, arXiv 2306.11695, github.com/locuslab/wanda).

    Args:
        weight: the matrix.
        squares: sum over the calibration tokens of x_j², per input channel. The published code divides by the number of
            sequences, which changes no comparison within a matrix.
    """
    return weight.float().abs() * squares.sqrt().float()
