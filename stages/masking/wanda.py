"""Wanda: weights are judged together with what they are multiplied with (arXiv 2306.11695, github.com/locuslab/wanda)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from stages.decoder.scores import wanda_score
from stages.masking.budget import Budget, Pruned, choose


def wanda(weight: Float[Tensor, "out in"], squares: Float[Tensor, " in"], budget: Budget) -> Pruned:
    """|W_ij| · ||x_j||, compared within each row as published, or over the whole matrix.

    Args:
        squares: sum over the calibration tokens of x_j².
    """
    return choose(wanda_score(weight, squares), budget)
