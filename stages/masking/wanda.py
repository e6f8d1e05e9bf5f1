"""Wanda: weights are judged together with what they are multiplied with (arXiv 2306.11695, github.com/locuslab/wanda)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def wanda(weight: Float[Tensor, "out in"], squares: Float[Tensor, " in"]) -> Float[Tensor, "out in"]:
    """|W_ij| · ||x_j||, in float32.

    Args:
        weight: the matrix.
        squares: sum over the calibration tokens of x_j², per input channel. The published code divides by the number of
            sequences, which changes no comparison within a matrix.
    """
    return weight.float().abs() * squares.sqrt().float()
