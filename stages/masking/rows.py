"""Which weights stay, compared within each output row."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def keep_per_row(score: Float[Tensor, "out in"], sparsity: float) -> Bool[Tensor, "out in"]:
    """In each row the ⌊in · sparsity⌋ lowest scores go; among equal scores the one with the lower index goes first."""
    count = int(score.shape[1] * sparsity)
    if count == 0:
        return torch.ones_like(score, dtype=torch.bool)
    threshold = score.kthvalue(count, dim=1, keepdim=True).values
    drop = score < threshold
    equal = score == threshold
    places = count - drop.sum(1)
    tied = equal.sum(1) != places  # only here does the order of equal scores matter
    equal[tied] &= equal[tied].cumsum(1) <= places[tied, None]
    return ~(drop | equal)
