"""Every layer gives up the same share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stages.allocation.budget import Wish
from stages.allocation.layers import Layers

if TYPE_CHECKING:
    from stages.allocation import Allocation


def uniform(layers: Layers, wanted: Allocation) -> Wish:
    """Score 0 and the target sparsity for each layer."""
    share = np.full(len(layers), wanted.sparsity)
    return Wish(np.zeros(len(layers)), share, share, 0.0, 1.0)
