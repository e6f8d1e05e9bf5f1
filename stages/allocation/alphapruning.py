"""AlphaPruning: the heavier the tail of a layer's spectrum, the less is pruned there (arXiv 2410.10912)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.allocation import FLOOR
from stages.allocation.budget import Wish, normalise
from stages.allocation.layers import Layers

if TYPE_CHECKING:
    from stages.allocation import Allocation


def alphapruning(layers: Layers, wanted: Allocation) -> Wish:
    """Factors from 1 - ε to 1 + ε, rising with the tail exponent, times what makes the mean over weights the target."""
    knobs = wanted.alphapruning
    column = f"alpha_{knobs.fit}" + ("_corrected" if (knobs.fit, knobs.window) == ("peak", "corrected") else "")
    missing = "allocation.method = alphapruning needs the spectra; set statistics.spectra: true"
    alpha = layers.important(column, missing)
    factor = 1 + knobs.spread * normalise(alpha, "minmax")
    share = factor * wanted.sparsity * layers.parameters.sum() / (layers.parameters @ factor)
    return Wish(alpha, share, share, FLOOR, 1 - FLOOR)
