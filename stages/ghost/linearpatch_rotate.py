"""LinearPatch: the scales of the channels in the Hadamard basis (arXiv 2505.24680)."""

from __future__ import annotations

from stages.decoder.operators import Operator
from stages.ghost.sums import Fitted, Sums


def linearpatch_rotate(sums: Sums, ridge: float, what: str) -> Fitted:
    """W = H diag(d) Hᵀ, d the ratios of magnitudes of x H and y H; the sums have to be taken with `rotation` = H.

    The published code takes them in the unrotated basis where several runs are removed; here they are always rotated.
    """
    h = sums.rotation
    assert h is not None
    return Fitted(Operator(dense=h * (sums.ratios / sums.windows - 1) @ h.T), 0.0, sums.grams.xx)
