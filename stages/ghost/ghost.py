"""Ghosted Layers: the unconstrained least-squares map from the input to the output of the removed run (arXiv 2605.15491)."""

from __future__ import annotations

from stages.decoder.gram import solve_ridge
from stages.ghost.sums import Fitted, Sums, as_fitted


def ghost(sums: Sums, ridge: float, what: str) -> Fitted:
    """M minimising ||X M - D||² + λ||M||², λ = ridge · trace(XᵀX) / channels; the operator is W = I + M.

    The paper takes the pseudo-inverse, its code an absolute 1e-6 on the diagonal; a relative ridge does not depend on the
    scale of the stream. Raises SingularGram naming `what`.
    """
    return as_fitted(solve_ridge(sums.grams, ridge, what))
