"""By measurement: where pruning one block alone raises the loss most, less is pruned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.errors import PalimpsestError
from stages.allocation.budget import Wish, standardised
from stages.allocation.layers import Layers

if TYPE_CHECKING:
    from stages.allocation import Allocation


def measured(layers: Layers, wanted: Allocation) -> Wish:
    """The rise that stage sensitivity measured for each block; its matrices share it.

    Raises PalimpsestError if sensitivity was not measured.
    """
    rise = layers.per_block(layers.sensitivity, "rise")
    if not (rise == rise).all():
        raise PalimpsestError("params.yaml: allocation.method = measured needs sensitivity.method: loss or kl (it is none)")
    return standardised(rise, wanted.measured, wanted.sparsity)
