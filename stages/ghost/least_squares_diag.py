"""The best rescaling of each channel: what LinearPatch's diagonal would be by least squares."""

from __future__ import annotations

import torch

from stages.decoder.operators import Operator
from stages.ghost.sums import Fitted, Sums


def least_squares_diag(sums: Sums, ridge: float, what: str) -> Fitted:
    """M = diag(m) minimising ||X M - D||² + λ||M||²: m_c = (XᵀD)_cc / ((XᵀX)_cc + λ), 0 in a channel that is always 0.

    Args:
        sums: the sums.
        ridge: relative ridge, λ = ridge · trace(XᵀX) / channels.
        what: not needed, nothing can fail here.
    """
    damped = sums.grams.xx.clone()
    damped.diagonal().add_(ridge * float(damped.diagonal().mean()))
    return Fitted(Operator(scale=diagonal_step(sums.grams.xd[0].diagonal(), damped.diagonal())), ridge, damped)


def diagonal_step(step: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
    """step / square per channel, 0 where the square is 0."""
    return torch.where(square > 0, step / torch.where(square > 0, square, 1.0), 0.0)
