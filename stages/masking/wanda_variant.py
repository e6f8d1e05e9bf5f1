"""Wanda's variant: rows give up equal shares of their score, not equal numbers of weights (`--use_variant` of its code).

Of each row the lowest scores go whose sum stays within α of the row's total, and α is searched until the matrix has the
wanted sparsity. With c_ij the cumulative score up to a weight over its row's total, a weight goes if c_ij ≤ α.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from stages.decoder.scores import wanda_score
from stages.decoder.selection import keep_rows
from stages.masking.budget import Budget, Pruned, kept_share

START, HIGHEST, TOLERANCE = 0.4, 0.8, 1e-3  # of α, and of both α and sparsity


def wanda_variant(weight: Float[Tensor, "out in"], squares: Float[Tensor, " in"], budget: Budget) -> Pruned:
    """Wanda's scores, compared by cumulative mass.

    Published rounding bisects α from 0.4 within [0, 0.8] and stops within 0.001 of the share (or of α). The exact budget is that
    search's limit: the round(share · weights) lowest c_ij go, equal ones by index.

    Args:
        squares: sum over the calibration tokens of x_j².
    """
    score = wanda_score(weight, squares)
    mass = cumulative_mass(score)
    counts = exact_counts(mass, round(budget.share * mass.numel())) if budget.exact else bisected_counts(mass, budget.share)
    keep = keep_rows(score, counts)
    return Pruned(keep, kept_share(score, keep))


def cumulative_mass(score: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
    """c: per row the cumulative sum of the sorted scores over their total, float64. A row of zeros has mass 0 throughout."""
    rows = torch.from_numpy(np.sort(score.cpu().numpy(), axis=1)).double().cumsum(1)
    return rows / rows[:, -1:].clamp(min=torch.finfo(torch.float64).tiny)


def exact_counts(mass: Float[Tensor, "out in"], count: int) -> Int[Tensor, " out"]:
    """Per row how many of the `count` lowest of all masses it holds, equal ones by index."""
    if count == 0:
        return torch.zeros(len(mass), dtype=torch.long)
    threshold = float(np.partition(mass.numpy().ravel(), count - 1)[count - 1])
    counts = (mass < threshold).sum(1)
    equal = (mass == threshold).sum(1)
    before = equal.cumsum(0) - equal
    return counts + (count - int(counts.sum()) - before).clamp(min=0).minimum(equal)


def bisected_counts(mass: Float[Tensor, "out in"], share: float) -> Int[Tensor, " out"]:
    """Per row how many masses lie within the α that bisection finds."""
    alpha, low, high = START, 0.0, HIGHEST
    counts = (mass <= alpha).sum(1)
    while abs(int(counts.sum()) / mass.numel() - share) > TOLERANCE and high - low >= TOLERANCE:
        if int(counts.sum()) / mass.numel() > share:
            alpha, high = (alpha + low) / 2, alpha
        else:
            alpha, low = (alpha + high) / 2, alpha
        counts = (mass <= alpha).sum(1)
    return counts
