"""By chance: the spread of a rule without its knowledge."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stages.allocation.budget import Wish, standardised
from stages.allocation.layers import Layers

if TYPE_CHECKING:
    from stages.allocation import Allocation


def random(layers: Layers, wanted: Allocation) -> Wish:
    """Normal random numbers from a seed of their own."""
    score = np.random.default_rng(wanted.random.seed).standard_normal(len(layers))
    return standardised(score, wanted.random, wanted.sparsity)
