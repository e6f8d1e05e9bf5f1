"""A percentile bootstrap of a mean."""

from __future__ import annotations

import numpy as np


def mean_interval(values: np.ndarray, confidence: float, resamples: int, seed: int) -> tuple[float, float]:
    """(low, high) of the mean of `values` [window], resampling windows with replacement.

    Windows, not tokens, are resampled: the losses within a window are not independent.
    """
    generator = np.random.default_rng(seed)
    means = values[generator.integers(0, len(values), (resamples, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
