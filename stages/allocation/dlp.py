"""DLP: the larger a layer's scores, the more is pruned there (arXiv 2505.23807, github.com/ironartisan/DLP)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.allocation.budget import Wish, recentred
from stages.allocation.layers import Layers

if TYPE_CHECKING:
    from stages.allocation import Allocation


def dlp(layers: Layers, wanted: Allocation) -> Wish:
    """Wanda scores of each layer reduced to their mean (the code) or median (the paper).

    Importance is `1 - u / Σu`, which falls with u along a line; between its least and largest value it is `1 - minmax(u)`.
    """
    knobs = wanted.dlp
    column = f"score_{knobs.reducer}"
    missing = f"allocation.method = dlp: importance.csv has no {column}; run: dvc repro statistics"
    return recentred(layers.important(column, missing), knobs.spread, wanted.sparsity, spare_high=False)
