"""The ghost with a bias: the least-squares map of what varies, and the mean step for the rest."""

from __future__ import annotations

from stages.decoder.gram import Grams, solve_ridge
from stages.decoder.operators import Operator
from stages.ghost.sums import Fitted, Sums


def ghost_affine(sums: Sums, ridge: float, what: str) -> Fitted:
    """M and b minimising ||X M + 1 bᵀ - D||² + λ||M||²; b is not damped.

    Centred: M solves (Σ xxᵀ - n x̄x̄ᵀ + λ) M = Σ xdᵀ - n x̄d̄ᵀ, then b = d̄ - x̄ M. Raises SingularGram naming `what`.
    """
    mean_x, mean_d = sums.x / sums.weight, sums.d / sums.weight
    xx = sums.grams.xx - sums.weight * mean_x.outer(mean_x)
    xd = sums.grams.xd[0] - sums.weight * mean_x.outer(mean_d)
    part = float(xx.trace()) / (float(sums.grams.xx.trace()) or 1.0)  # λ stays relative to XᵀX, as in the other methods
    fit = solve_ridge(Grams(xx, xd[None], sums.grams.dd, sums.grams.tokens), ridge / (part or 1.0), what)
    return Fitted(Operator(dense=fit.m[0], bias=mean_d - mean_x @ fit.m[0]), fit.ridge * part, fit.damped)
