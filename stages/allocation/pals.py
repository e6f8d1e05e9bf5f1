"""PALS: the higher the percentile of a block's absolute activations, the less is pruned there (arXiv 2607.07557).

Known from the abstract and public summaries: the 99th percentile, standardised over blocks, higher means lower sparsity,
each block within ±5 points of the target. Which activations, over what, the slope and whether the mean is restored are not
stated; they are parameters here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import PalimpsestError
from stages.allocation.budget import Wish, standardised
from stages.allocation.layers import Layers

if TYPE_CHECKING:
    from stages.allocation import Allocation, Pals

POOLED = "linears"  # place in statistics.csv: the inputs of all matrices of the block, pooled


def pals(layers: Layers, wanted: Allocation) -> Wish:
    """`clip(target - slope · z, target ± bound)`, z the normalised percentile.

    Raises PalimpsestError if what is asked for was not measured.
    """
    knobs = wanted.pals
    return standardised(percentile_scores(layers, knobs), knobs, wanted.sparsity, knobs.sign == "spare_high")


def percentile_scores(layers: Layers, knobs: Pals) -> np.ndarray:
    """The percentile of |activation|, [layer]; of a block that is named as the source, all its matrices share one.

    `linear_inputs` are a matrix's own inputs, or those of all matrices of the block pooled; the mean over sequences of the
    latter is that of the matrices' own means, weighted by the widths of their inputs.
    """
    column = f"p{knobs.percentile!r}".removesuffix(".0")
    if column not in layers.statistics:
        there = ", ".join(name[1:] for name in layers.statistics if name[0] == "p" and name[1:].replace(".", "").isdigit())
        raise PalimpsestError(
            f"params.yaml: allocation.pals.percentile = {knobs.percentile:g} is not measured; statistics.percentiles has {there}"
        )
    if knobs.pooling == "mean_of_sequences":
        column += "_per_sequence"
        if column not in layers.statistics:
            raise PalimpsestError(
                "params.yaml: allocation.pals.pooling = mean_of_sequences is not measured; set statistics.per_sequence: true"
            )
    if knobs.source != "linear_inputs":
        return layers.seen(knobs.source.removeprefix("block_"), column)
    if any(layers.matrix):
        return layers.seen("", column)
    if knobs.pooling == "pooled":
        return layers.seen(POOLED, column)
    rows = layers.statistics[(layers.statistics.parameters > 0) & layers.statistics[column].notna()]
    weighted = (rows[column] * rows.width).groupby(rows.block).sum() / rows.width.groupby(rows.block).sum()
    return weighted.reindex(layers.block).to_numpy(dtype=np.float64)
