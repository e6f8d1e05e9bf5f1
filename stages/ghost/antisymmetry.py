"""How far an operator is from symmetric: what no rescaling in an orthogonal basis can express (arXiv 2605.15491)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def antisymmetric_share(m: Float[Tensor, "channel channel"]) -> float:
    """||(M - Mᵀ)/2|| / ||M|| (Frobenius); 0.707 for a random matrix, 0 for M = 0."""
    norm = float(m.norm())
    return float(((m - m.T) / 2).norm()) / norm if norm else 0.0
