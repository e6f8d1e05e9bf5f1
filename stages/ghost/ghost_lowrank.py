"""The ghost as a product of two thin matrices, best where the tokens are."""

from __future__ import annotations

import torch

from stages.decoder.gram import damped_factor
from stages.decoder.operators import Operator
from stages.ghost.sums import Fitted, Sums


def ghost_lowrank(sums: Sums, ridge: float, what: str, rank: int) -> Fitted:
    """The M of rank `rank` that minimises ||X M - D||² + λ||M||².

    With G = XᵀX + λI = L Lᵀ and M* the full solution, the loss is ||Lᵀ(M - M*)||² plus a constant, so the best Lᵀ M is
    the truncated singular value decomposition of Lᵀ M* = L⁻¹ XᵀD (Eckart and Young). Truncating M* itself would serve
    directions that no token takes. Raises SingularGram naming `what`.
    """
    factor, damped, used = damped_factor(sums.grams, ridge, what)
    left, values, right = torch.linalg.svd(torch.linalg.solve_triangular(factor, sums.grams.xd[0], upper=False))
    down = torch.linalg.solve_triangular(factor.T, left[:, :rank] * values[:rank], upper=True)
    return Fitted(Operator(down=down, up=right[:rank].contiguous()), used, damped)
