"""Meeting a global budget exactly while every block stays within its bounds."""

from __future__ import annotations

import numpy as np


def shift_to_budget(raw: np.ndarray, parameters: np.ndarray, target: float, low: float, high: float) -> np.ndarray:
    """`clip(raw + μ, low, high)` with the one μ for which the mean weighted by `parameters` is `target`.

    Args:
        raw: wished sparsity, [block].
        parameters: prunable weights, [block].
        target, low, high: with low ≤ target ≤ high.

    The weighted mean rises with μ from `low` to `high`, piecewise linearly with kinks where a block meets a bound, so the
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
