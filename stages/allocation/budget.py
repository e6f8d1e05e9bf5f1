"""From scores to wishes, and from wishes to sparsities that meet the budget: what all rules share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from stages.allocation import FLOOR

if TYPE_CHECKING:
    from stages.allocation import Standardised


@dataclass(frozen=True)
class Wish:
    """What a rule asks for, [layer] each."""

    score: np.ndarray  # what it went by; NaN where nothing was measured
    raw: np.ndarray  # sparsity before any clamp
    faithful: np.ndarray  # sparsity with the clamps of the published rule, which may miss the target
    low: float  # bounds that the exact allocation keeps
    high: float


def normalise(score: np.ndarray, kind: str) -> np.ndarray:
    """Scores on a common scale: `zscore` (population deviation), `minmax` or `rank` (both from -1 to 1).

    Scores that are all equal become 0, so that every layer gets the target; a missing score becomes the mean of the others, so
    that such a layer wishes for what they wish on average.
    """
    known = np.isfinite(score)
    scaled = np.zeros(len(score))
    some = score[known]
    if not len(some) or np.ptp(some) == 0:
        return scaled
    if kind == "rank":
        some = pd.Series(some).rank().to_numpy()
    unit = (some - some.min()) / np.ptp(some)  # first, since squares of very small scores would vanish
    scaled[known] = (unit - unit.mean()) / unit.std() if kind == "zscore" else 2 * unit - 1
    scaled[~known] = scaled[known].mean()
    return scaled


def standardised(score: np.ndarray, knobs: Standardised, target: float, spare_high: bool = True) -> Wish:
    """`target - slope · normalised score` within target ± bound: high scores are pruned less (or more)."""
    lean = knobs.slope * normalise(score, knobs.normalisation)
    raw = target - lean if spare_high else target + lean
    low, high = max(0.0, target - knobs.bound), min(1.0, target + knobs.bound)
    return Wish(score, raw, np.clip(raw, low, high), low, high)


def recentred(score: np.ndarray, spread: float, target: float, spare_high: bool = True) -> Wish:
    """OWL's and DLP's map: keep ratios `2 · spread · minmax(score)`, moved so that their plain mean is `1 - target`.

    As published, what would be pruned by nothing or less is pruned by 0.01, and blocks count alike whatever their size.
    """
    keep = spread * normalise(score, "minmax") * (1 if spare_high else -1)
    raw = target - (keep - keep.mean())
    return Wish(score, raw, np.where(raw <= 0, FLOOR, raw), FLOOR, 1 - FLOOR)


def shift_to_budget(raw: np.ndarray, parameters: np.ndarray, target: float, low: float, high: float) -> np.ndarray:
    """`clip(raw + μ, low, high)` with the one μ for which the mean weighted by `parameters` is `target`.

    Args:
        raw: wished sparsity, [layer].
        parameters: prunable weights, [layer].
        target, low, high: with low ≤ target ≤ high.

    The weighted mean rises with μ from `low` to `high`, piecewise linearly with kinks where a layer meets a bound, so the
    kinks are searched and the piece that holds the target is solved exactly.
    """
    weights = parameters / parameters.sum()
    mean = lambda shift: float(np.clip(raw + shift, low, high) @ weights)  # noqa: E731
    kinks = np.unique(np.concatenate([low - raw, high - raw]))
    left, right = 0, len(kinks) - 1
    while right - left > 1:
        middle = (left + right) // 2
        left, right = (middle, right) if mean(kinks[middle]) <= target else (left, middle)
    start, stop = kinks[left], kinks[right]
    rise = mean(stop) - mean(start)
    shift = start if rise <= 0 else start + (target - mean(start)) * (stop - start) / rise
    return np.clip(raw + shift, low, high)
