"""By gradients of the loss: where they are large, less is pruned. A baseline of PALS, whose exact form is not published."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.allocation.budget import Wish, standardised
from stages.allocation.layers import Layers

if TYPE_CHECKING:
    from stages.allocation import Allocation


def gradient(layers: Layers, wanted: Allocation) -> Wish:
    """Mean |∂L/∂W|, or mean |W · ∂L/∂W|, over the layer's weights. Raises PalimpsestError if gradients were not measured."""
    knobs = wanted.gradient
    missing = "allocation.method = gradient needs gradients; set statistics.gradient_windows above 0"
    column = {"gradient": "gradient", "weighted": "weighted_gradient"}[knobs.kind]
    return standardised(layers.important(column, missing), knobs, wanted.sparsity)
