"""ReplaceMe: a linear map of the MLP output before the gap, folded into its last matrix (arXiv 2505.02819)."""

from __future__ import annotations

from stages.decoder.gram import solve_ridge
from stages.decoder.operators import Operator
from stages.ghost.sums import Fitted, Sums


def replaceme(sums: Sums, ridge: float, what: str) -> Fitted:
    """F minimising ||A F - D||² + λ||F||², A the output of the MLP before the gap and D the step of the removed run.

    With h = r + a the stream before the gap, the target is r + a T = y, so T = I + F. The sums have to be taken over A in
    place of the stream. No parameter is added: `(I + F)ᵀ` goes into the matrix that makes a. Raises SingularGram.
    """
    fit = solve_ridge(sums.grams, ridge, what)
    return Fitted(Operator(fold=fit.m[0]), fit.ridge, fit.damped)
