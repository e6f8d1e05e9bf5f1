"""A percentile bootstrap of a mean."""

from __future__ import annotations

import numpy as np


def mean_interval(
    values: np.ndarray, confidence: float, resamples: int, seed: int, weights: np.ndarray | None = None
) -> tuple[float, float]:
    """(low, high) of the mean of `values` [window], resampling windows with replacement.

    Windows, not tokens, are resampled: the losses within a window are not independent. `weights` [window], of mean 1, are for
    windows of which unequal numbers of tokens are scored: the mean is then that of all tokens.
    """
    weights = np.ones(len(values)) if weights is None else weights
    generator = np.random.default_rng(seed)
    drawn = generator.integers(0, len(values), (resamples, len(values)))
    means = (values * weights)[drawn].sum(axis=1) / weights[drawn].sum(axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
