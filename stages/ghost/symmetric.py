"""The best symmetric operator: an honest test of how much the antisymmetric part of the ghost is worth."""

from __future__ import annotations

import torch

from stages.decoder.gram import damped_factor
from stages.decoder.operators import Operator
from stages.ghost.sums import Fitted, Sums


def symmetric(sums: Sums, ridge: float, what: str) -> Fitted:
    """M = Mᵀ minimising ||X M - D||² + λ||M||².

    The condition is G M + M G = S + Sᵀ with G = XᵀX + λI and S = XᵀD; in the basis of G's eigenvectors it is solved entry
    by entry, M_ij = (S_ij + S_ji) / (g_i + g_j). Every operator of LinearPatch, in whatever basis, is symmetric and can
    come no closer (Theorem 4.1 of arXiv 2605.15491). Raises SingularGram naming `what`.
    """
    _, damped, used = damped_factor(sums.grams, ridge, what)
    values, basis = torch.linalg.eigh(damped)
    both = sums.grams.xd[0] + sums.grams.xd[0].T
    m = basis @ (basis.T @ both @ basis / (values[:, None] + values[None])) @ basis.T
    return Fitted(Operator(dense=(m + m.T) / 2), used, damped)
