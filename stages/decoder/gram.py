"""Least squares from Grams: what the closed-form fits of this project accumulate and solve.

For inputs X [token, channel] and targets Y, `XᵀX` and `XᵀY` say all that a linear fit needs, in memory of C² whatever
the number of tokens. All fits here are of the step D = Y - X, so that X (I + M) ≈ Y, and one X serves several targets.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Sums over tokens, float64."""

    xx: Float[Tensor, "channel channel"]
    xd: Float[Tensor, "target channel channel"]
    dd: Float[Tensor, " target"]
    tokens: int


@dataclass
class Fit:
    """M with X M ≈ D for each target."""

    m: Float[Tensor, "target channel channel"]
    ridge: float  # the relative ridge that was really used
    damped: Float[Tensor, "channel channel"]  # XᵀX with the ridge on its diagonal


def empty_grams(width: int, targets: int, device: str) -> Grams:
    """Grams of no tokens."""
    zeros = lambda *shape: torch.zeros(*shape, dtype=torch.float64, device=device)  # noqa: E731
    return Grams(zeros(width, width), zeros(targets, width, width), zeros(targets), 0)


def add_tokens(
    grams: Grams,
    x: Float[Tensor, "token channel"],
    ys: Sequence[Float[Tensor, "token channel"]],
    dtype: torch.dtype = torch.float32,
) -> None:
    """Add one batch of tokens to the sums, in place. `dtype` is the precision of the batch's own products."""
    x = x.to(dtype)
    grams.xx += x.T @ x
    for target, y in enumerate(ys):
        d = y.to(dtype) - x
        grams.xd[target] += x.T @ d
        grams.dd[target] += d.square().sum(dtype=torch.float64)
    grams.tokens += len(x)


def damped_factor(
    grams: Grams, ridge: float, what: str
) -> tuple[Float[Tensor, "channel channel"], Float[Tensor, "channel channel"], float]:
    """The Cholesky factor (lower) of XᵀX + λI with λ = ridge · trace(XᵀX) / channels, in float64.

    A factorisation that fails, or that only rounding let through, is tried again with ten times the ridge, at most six
    times; the ridge used is returned.

    Args:
        grams: the sums.
        ridge: relative ridge, 0 or more.
        what: named in the error ("block 12").

    Returns the factor, the damped Gram and the relative ridge that was really used.

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
        if int(info) == 0 and _is_sound(factor, damped):
            return factor, damped, used
        used = max(used * 10, 1e-10)
    raise SingularGram(
        f"{what}: XᵀX of {grams.tokens} tokens x {channels} channels is singular (condition {condition_number(grams.xx):.1e}) "
        f"even with ridge {used / 10:g}; use more calibration windows or a larger ridge"
    )


def solve_ridge(grams: Grams, ridge: float, what: str) -> Fit:
    """Minimise ||X M - D||² + λ||M||² with λ = ridge · trace(XᵀX) / channels, as `damped_factor` damps. Raises SingularGram."""
    factor, damped, used = damped_factor(grams, ridge, what)
    return Fit(torch.cholesky_solve(grams.xd, factor), used, damped)


def _is_sound(factor: Float[Tensor, "channel channel"], damped: Float[Tensor, "channel channel"]) -> bool:
    """Whether every pivot stands clear of the rounding errors of the factorisation: else the solution would be noise."""
    noise = 1e4 * len(factor) * torch.finfo(factor.dtype).eps * float(damped.diagonal().max())
    return float(factor.diagonal().min()) ** 2 > noise


def condition_number(symmetric: Float[Tensor, "channel channel"]) -> float:
    """Largest over smallest eigenvalue; infinite if the smallest is not positive."""
    eigenvalues = torch.linalg.eigvalsh(symmetric)
    return float(eigenvalues[-1] / eigenvalues[0]) if float(eigenvalues[0]) > 0 else float("inf")


def relative_errors(grams: Grams, m: Float[Tensor, "target channel channel"]) -> list[float]:
    """||X M - D|| / ||D|| (Frobenius) per target on the tokens of `grams`; 0 where there is no step to explain."""
    residual = grams.dd + (m * (grams.xx @ m - 2 * grams.xd)).sum((1, 2))
    return [max(float(r), 0.0) ** 0.5 / float(d) ** 0.5 if float(d) > 0 else 0.0 for r, d in zip(residual, grams.dd, strict=True)]
