"""PALS: the higher the percentile of a block's absolute activations, the less is pruned there (arXiv 2607.07557).

Known from the abstract and public summaries: the 99th percentile, standardised over blocks, higher means lower sparsity,
each block within ±5 points of the target. Which activations, the slope and whether the mean is restored are not stated;
they are parameters here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from pipeline.errors import PalimpsestError
from stages.allocation.budget import shift_to_budget

if TYPE_CHECKING:
    from stages.allocation import Allocation


def pals(statistics: pd.DataFrame, parameters: np.ndarray, wanted: Allocation) -> tuple[np.ndarray, np.ndarray]:
    """(percentile [block], sparsity [block]) with `sparsity = clip(target - slope · z, target ± bound)`, shifted to the budget.

    Raises PalimpsestError if the percentile asked for is not among the columns of the statistics.
    """
    knobs, target = wanted.pals, wanted.sparsity
    score = block_scores(statistics, knobs.source, knobs.percentile)
    raw = target - knobs.slope * normalise(score, knobs.normalisation)
    low, high = max(0.0, target - knobs.bound), min(1.0, target + knobs.bound)
    if knobs.projection == "none":
        return score, np.clip(raw, low, high)
    return score, shift_to_budget(raw, parameters, target, low, high)


def block_scores(statistics: pd.DataFrame, source: str, percentile: float) -> np.ndarray:
    """The percentile of |activation| of each block, [block].

    `linear_inputs` is the mean over the block's matrices of the percentile of their inputs, weighted by the inputs' widths.
    """
    column = f"p{percentile!r}".removesuffix(".0")
    if column not in statistics:
        there = ", ".join(name[1:] for name in statistics if name[0] == "p" and name[1:2].isdigit())
        raise PalimpsestError(
            f"params.yaml: allocation.pals.percentile = {percentile:g} is not measured; statistics.percentiles has {there}"
        )
    if source != "linear_inputs":
        place = source.removeprefix("block_")
        rows = statistics.loc[statistics["place"] == place].set_index("block")[column]
        return np.asarray(rows.sort_index(), dtype=np.float64)
    rows = statistics[(statistics.parameters > 0) & statistics[column].notna()]
    weighted = (rows[column] * rows.width).groupby(rows.block).sum() / rows.width.groupby(rows.block).sum()
    return weighted.sort_index().to_numpy(dtype=np.float64)


def normalise(score: np.ndarray, kind: str) -> np.ndarray:
    """Scores [block] on a common scale: `zscore` (population deviation), `minmax` or `rank` (both from -1 to 1).

    Scores that are all equal become 0, so that every block gets the target.
    """
    if np.ptp(score) == 0:
        return np.zeros_like(score)
    if kind == "zscore":
        return (score - score.mean()) / score.std()
    if kind == "rank":
        score = pd.Series(score).rank().to_numpy()
    return 2 * (score - score.min()) / np.ptp(score) - 1
