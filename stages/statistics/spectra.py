"""Tail exponents of weight spectra, by the Hill estimator (AlphaPruning, arXiv 2410.10912, github.com/haiquanlu/AlphaPruning).

Of the N eigenvalues λ of WᵀW in rising order (squared singular values), the tail from index i on has the exponent
α_i = 1 + n / Σ_{j ≥ i} (ln λ_j - ln λ_i), n = N - i. What differs is how i is chosen.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

BINS = 100
CHUNK = 256  # candidates whose distances are computed at once


def tail_exponents(weight: Float[Tensor, "out in"]) -> dict[str, float | None]:
    """`alpha_mid`, `alpha_peak` and `alpha_peak_corrected` of one matrix; None where its spectrum gives none."""
    eigenvalues = spectrum(weight)
    fits = {"alpha_mid": alpha_mid(eigenvalues), **alpha_peak(eigenvalues)}
    return {name: alpha if math.isfinite(alpha) else None for name, alpha in fits.items()}


def spectrum(weight: Float[Tensor, "out in"]) -> Float[Tensor, " eigenvalue"]:
    """The squared singular values in rising order, float64; those that are zero but for rounding are left out."""
    wide = (weight if weight.shape[0] <= weight.shape[1] else weight.T).double()
    values = torch.linalg.eigvalsh(wide @ wide.T).cpu()
    return values[values > len(values) * torch.finfo(torch.float64).eps * values.max()]


def alpha_mid(eigenvalues: Float[Tensor, " eigenvalue"]) -> float:
    """The exponent of the upper half: i = N / 2. NaN without two different eigenvalues there."""
    alphas = _hill(eigenvalues.log())
    middle = len(eigenvalues) // 2
    return float(alphas[middle]) if middle < len(alphas) else math.nan


def alpha_peak(eigenvalues: Float[Tensor, " eigenvalue"]) -> dict[str, float]:
    """The exponent of the tail that a power law fits best (smallest Kolmogorov-Smirnov distance), i scanned near the peak.

    The peak is the lower edge of the fullest of 100 bins of log₁₀ λ. The published code scans λ_i from log₁₀(0.95 · peak) to
    1.5 · peak, so that its lower limit, a logarithm held against an eigenvalue, hardly limits: `alpha_peak`. With a lower
    limit of 0.95 · peak: `alpha_peak_corrected`.
    """
    logs = eigenvalues.log()
    alphas = _hill(logs)
    if not len(alphas) or not float(logs[-1]) > float(logs[0]):
        return {"alpha_peak": math.nan, "alpha_peak_corrected": math.nan}
    tens = eigenvalues.log10()
    low, high = float(tens[0]), float(tens[-1])
    fullest = int(torch.histc(tens, BINS, min=low, max=high).argmax())
    peak = 10.0 ** (low + (high - low) * fullest / BINS)
    starts = eigenvalues[:-1]
    distances = torch.ones_like(alphas)
    fit = (starts <= 1.5 * peak) & (alphas > 1) & alphas.isfinite()
    for some in fit.nonzero()[:, 0].split(CHUNK):
        distances[some] = _distances(logs, alphas, some)

    def best(lower: float) -> float:
        inside = (starts >= lower) & (starts <= 1.5 * peak)
        if not inside.any():
            return math.nan
        return float(alphas[torch.where(inside, distances, torch.inf).argmin()])

    return {"alpha_peak": best(math.log10(0.95 * peak)), "alpha_peak_corrected": best(0.95 * peak)}


def _hill(logs: Float[Tensor, " eigenvalue"]) -> Float[Tensor, " start"]:
    """α_i for every start i but the last eigenvalue."""
    tails = torch.arange(len(logs), 0, -1, dtype=logs.dtype)
    sums = logs.flip(0).cumsum(0).flip(0)
    return (1 + tails / (sums - tails * logs))[:-1]


def _distances(logs: Tensor, alphas: Tensor, starts: Tensor) -> Float[Tensor, " start"]:
    """max_j |1 - (λ_j / λ_i)^(1 - α_i) - (j - i) / n| over the tail of each start i."""
    behind = torch.arange(len(logs)) - starts[:, None]
    powers = ((1 - alphas[starts, None]) * (logs - logs[starts, None]).clamp(min=0)).exp()
    gaps = (1 - powers - behind / (len(logs) - starts[:, None])).abs()
    return gaps.masked_fill(behind < 0, 0.0).amax(1)
