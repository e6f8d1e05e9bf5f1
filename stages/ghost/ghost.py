"""Ghosted Layers: the unconstrained least-squares map from the input to the output of the removed run (arXiv 2605.15491)."""

from __future__ import annotations

from stages.decoder.gram import Fit, Grams, solve_ridge


def ghost(grams: Grams, ridge: float, what: str) -> Fit:
    """M minimising ||X (I + M) - Y||² + λ||M||², λ = ridge · trace(XᵀX) / channels; the operator is W = I + M.

    The paper takes the pseudo-inverse, its code an absolute 1e-6 on the diagonal; a relative ridge does not depend on the
    scale of the stream. Raises SingularGram naming `what`.
    """
    return solve_ridge(grams, ridge, what)
