"""The best rescaling of each channel in the Hadamard basis."""

from __future__ import annotations

from stages.decoder.operators import Operator
from stages.ghost.hadamard import hadamard
from stages.ghost.least_squares_diag import diagonal_step
from stages.ghost.sums import Fitted, Sums


def least_squares_rotate(sums: Sums, ridge: float, what: str) -> Fitted:
    """M = H diag(m) Hᵀ minimising ||X M - D||² + λ||M||², H an orthonormal Hadamard matrix.

    Raises PalimpsestError where there is none for this width.
    """
    damped = sums.grams.xx.clone()
    damped.diagonal().add_(ridge * float(damped.diagonal().mean()))
    h = hadamard(len(damped)).to(damped)
    scale = diagonal_step((h * (sums.grams.xd[0] @ h)).sum(0), (h * (damped @ h)).sum(0))
    return Fitted(Operator(dense=h * scale @ h.T), ridge, damped)
