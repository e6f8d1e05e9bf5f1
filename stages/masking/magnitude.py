"""Magnitude pruning: small weights go first."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from stages.decoder.scores import magnitude_score
from stages.masking.budget import Budget, Pruned, choose


def magnitude(weight: Float[Tensor, "out in"], budget: Budget) -> Pruned:
    """Compared over the whole matrix, as in github.com/locuslab/wanda, or within each row."""
    return choose(magnitude_score(weight), budget)
