"""Least squares from Grams: what the closed-form fits of this project accumulate and solve.

For inputs X [token, channel] and targets Y, `XᵀX` and `XᵀY` say all that a linear fit needs, in memory of C² whatever
the number of tokens. Products are taken in float32 tile by tile, sums and solves are float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.errors import PalimpsestError

RIDGE_STEPS = 6  # times ten each, before giving up


class SingularGram(PalimpsestError):
    """The Gram stays singular at the largest damping allowed."""


@dataclass
class Grams:
    """Sums over tokens for one fit from X to the step D = Y - X."""

    xx: Float[Tensor, "channel channel"]
    xd: Float[Tensor, "channel channel"]
    dd: float
    tokens: int


@dataclass
class Fit:
    """M with X M ≈ D, so that X (I + M) ≈ Y."""

    m: Float[Tensor, "channel channel"]
    ridge: float  # the relative ridge that was really used
    condition: float  # of XᵀX + ridge


def empty_grams(width: int, device: str) -> Grams:
    """Grams of no tokens."""
    return Grams(
        torch.zeros(width, width, dtype=torch.float64, device=device), torch.zeros(width, width, dtype=torch.float64, device=device), 0.0, 0
    )


def add_tokens(
    grams: Grams, x: Float[Tensor, "token channel"], y: Float[Tensor, "token channel"], dtype: torch.dtype = torch.float32
) -> None:
    """Add one batch of tokens to the sums, in place. `dtype` is the precision of the batch's own products."""
    x = x.to(dtype)
    d = y.to(dtype) - x
    grams.xx += (x.T @ x).double()
    grams.xd += (x.T @ d).double()
    grams.dd += float(d.double().square().sum())
    grams.tokens += len(x)


def solve_ridge(grams: Grams, ridge: float, what: str) -> Fit:
    """Minimise ||X M - D||² + λ||M||² with λ = ridge · trace(XᵀX) / channels, by Cholesky in float64.

    A factorisation that fails is tried again with ten times the ridge, at most six times; the ridge used is returned.

    Args:
        grams: the sums.
        ridge: relative ridge, 0 or more.
        what: named in the error ("block 12").

    Raises:
        SingularGram: no ridge within the limit mends it; names `what` and the condition number.
    """
    channels = len(grams.xx)
    scale = float(grams.xx.diagonal().sum()) / channels
    used = ridge
    for _ in range(RIDGE_STEPS + 1):
        damped = grams.xx.clone()
        damped.diagonal().add_(used * scale)
        factor, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0 and scale > 0:
            return Fit(torch.cholesky_solve(grams.xd, factor), used, condition_number(damped))
        used = max(used * 10, 1e-10)
    raise SingularGram(
        f"{what}: XᵀX of {grams.tokens} tokens x {channels} channels is singular (condition {condition_number(grams.xx):.1e}) "
        f"even with ridge {used / 10:g}; use more calibration windows or a larger ridge"
    )


def condition_number(symmetric: Float[Tensor, "channel channel"]) -> float:
    """Largest over smallest eigenvalue; infinite if the smallest is not positive."""
    eigenvalues = torch.linalg.eigvalsh(symmetric)
    return float(eigenvalues[-1] / eigenvalues[0]) if float(eigenvalues[0]) > 0 else float("inf")


def relative_error(grams: Grams, m: Float[Tensor, "channel channel"]) -> float:
    """||X M - D|| / ||D|| (Frobenius) on the tokens of `grams`; 0 where there is no step to explain."""
    if grams.dd == 0:
        return 0.0
    residual = grams.dd - 2 * float((m * grams.xd).sum()) + float((m * (grams.xx @ m)).sum())
    return (max(residual, 0.0) / grams.dd) ** 0.5
