"""LinearPatch without its rotation: every channel is scaled as its mean magnitude was by the removed run (arXiv 2505.24680)."""

from __future__ import annotations

from stages.decoder.operators import Operator
from stages.ghost.sums import Fitted, Sums


def linearpatch_diag(sums: Sums, ridge: float, what: str) -> Fitted:
    """W = diag(d), d_c the mean over windows of mean|y_c| / mean|x_c| over the window's tokens. The ridge plays no part."""
    return Fitted(Operator(scale=sums.ratios / sums.windows - 1), 0.0, sums.grams.xx)
