"""OWL: the more outliers among a layer's scores, the less is pruned there (arXiv 2310.05175, github.com/luuyin/OWL)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.allocation.budget import Wish, recentred
from stages.allocation.layers import Layers

if TYPE_CHECKING:
    from stages.allocation import Allocation


def owl(layers: Layers, wanted: Allocation) -> Wish:
    """Outliers, in percent: Wanda scores above M times their mean. Raises PalimpsestError if M was not measured."""
    knobs = wanted.owl
    prefix = "score_outliers_"
    there = ", ".join(name.removeprefix(prefix) for name in layers.importance if str(name).startswith(prefix))
    column = f"{prefix}{knobs.multiple!r}".removesuffix(".0")
    missing = f"allocation.owl.multiple = {knobs.multiple:g} is not measured; statistics.score_outliers has {there or 'none'}"
    return recentred(100 * layers.important(column, missing), knobs.spread, wanted.sparsity)
