"""Pruning of one matrix as the published codes do it, step by step: sorts per row, one column at a time, float32.

Nothing of `stages/` is used here. `exact` states this project's other rounding, by brute force.
"""

from __future__ import annotations

import torch
from torch import Tensor

Group = tuple[int, int] | None


def scores_of(weight: Tensor, norms: Tensor | None) -> Tensor:
    """|W|, or with the inputs' norms Wanda's |W| · ||x||."""
    return weight.abs() if norms is None else weight.abs() * norms.reshape(1, -1)


def drop_rows(score: Tensor, share: float, exact: bool = False) -> Tensor:
    """Per row the first of a stable sort: ⌊in · share⌋ of them, or such that the matrix as a whole meets its share."""
    order = torch.sort(score, dim=-1, stable=True)[1]
    rows, columns = score.shape
    drop = torch.zeros_like(score, dtype=torch.bool)
    if not exact:
        return drop.scatter_(1, order[:, : int(columns * share)], True)
    total = round(rows * columns * share)
    for row in range(rows):
        drop[row, order[row, : total * (row + 1) // rows - total * row // rows]] = True
    return drop


def drop_layer(score: Tensor, share: float, exact: bool = False) -> Tensor:
    """Up to and including a threshold taken from all sorted scores; or exactly as many as the share says, by a stable sort."""
    values, order = torch.sort(score.flatten(), stable=True)
    if not exact:
        return score <= values[int(score.numel() * share)]
    drop = torch.zeros(score.numel(), dtype=torch.bool)
    drop[order[: round(score.numel() * share)]] = True
    return drop.view(score.shape)


def drop_groups(score: Tensor, n: int, m: int) -> Tensor:
    """The n lowest of every m columns."""
    drop = torch.zeros_like(score, dtype=torch.bool)
    for start in range(0, score.shape[1], m):
        drop.scatter_(1, start + torch.sort(score[:, start : start + m], dim=1, stable=True)[1][:, :n], True)
    return drop


def drop_variant(score: Tensor, share: float, exact: bool = False) -> Tensor:
    """Wanda's variant: α bisected until the rows' cumulative scores within α of their totals make up the share."""
    values, order = torch.sort(score, dim=-1, stable=True)
    mass = values.double().cumsum(1)
    if exact:
        relative = mass / mass[:, -1:]
        flat = sorted((float(relative[i, j]), i, j) for i in range(len(mass)) for j in range(mass.shape[1]))
        inside = torch.zeros_like(score, dtype=torch.bool)
        for _, i, j in flat[: round(score.numel() * share)]:
            inside[i, j] = True
    else:
        alpha, low, high = 0.4, 0.0, 0.8
        inside = mass <= alpha * mass[:, -1:]
        while abs(float(inside.float().mean()) - share) > 0.001 and high - low >= 0.001:
            if float(inside.float().mean()) > share:
                alpha, high = (alpha + low) / 2, alpha
            else:
                alpha, low = (alpha + high) / 2, alpha
            inside = mass <= alpha * mass[:, -1:]
    return torch.zeros_like(score, dtype=torch.bool).scatter_(1, order, inside)


def prune_sparsegpt(
    weight: Tensor, hessian: Tensor, share: float, group: Group, damping: float = 0.01, block: int = 128, exact: bool = False
) -> tuple[Tensor, Tensor]:
    """(which go, the weights that stay, mended): inverse, its upper Cholesky factor, then column after column."""
    w, h = weight.clone(), hessian.clone()
    rows, columns = w.shape
    dead = torch.diag(h) == 0
    h[dead, dead] = 1
    w[:, dead] = 0
    diagonal = torch.arange(columns)
    h[diagonal, diagonal] += damping * torch.mean(torch.diag(h))
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True).to(w.dtype)
    gone = torch.zeros_like(w, dtype=torch.bool)
    for i1 in range(0, columns, block):
        i2 = min(i1 + block, columns)
        w1, h1 = w[:, i1:i2].clone(), inverse[i1:i2, i1:i2]
        q1, e1 = torch.zeros_like(w1), torch.zeros_like(w1)
        drop = torch.zeros_like(w1, dtype=torch.bool)
        if group is None:
            score = w1**2 / torch.diag(h1).reshape(1, -1) ** 2
            if exact:
                count = round(share * rows * i2) - round(share * rows * i1)
                drop = drop_layer(score, (count + 1e-9) / score.numel(), exact=True)
            else:
                drop = drop_layer(score, share)
        for i in range(i2 - i1):
            if group is not None and i % group[1] == 0:
                span = slice(i, i + group[1])
                drop[:, span] = drop_groups(w1[:, span] ** 2 / torch.diag(h1)[span].reshape(1, -1) ** 2, *group)
            q = w1[:, i].clone()
            q[drop[:, i]] = 0
            q1[:, i] = q
            error = (w1[:, i] - q) / h1[i, i]
            w1[:, i:] -= error.unsqueeze(1).matmul(h1[i, i:].unsqueeze(0))
            e1[:, i] = error
        w[:, i1:i2] = q1
        w[:, i2:] -= e1.matmul(inverse[i1:i2, i2:])
        gone[:, i1:i2] = drop
    return gone, w


def prune_matrix(
    weight: Tensor,
    x: Tensor,
    windows: int,
    method: str,
    share: float,
    group: Group = None,
    comparison: str = "",
    exact: bool = False,
) -> tuple[Tensor, Tensor]:
    """(which go, what the matrix becomes), of a matrix [out, in] that is fed x [token, in]."""
    if method == "sparsegpt":
        return prune_sparsegpt(weight, 2 / windows * x.double().T @ x.double(), share, group, exact=exact)
    score = scores_of(weight, None if method == "magnitude" else x.double().square().sum(0).sqrt().float())
    if group is not None:
        drop = drop_groups(score, *group)
    elif method == "wanda_variant":
        drop = drop_variant(score, share, exact)
    else:
        drop = (drop_rows if comparison == "row" else drop_layer)(score, share, exact)
    return drop, weight.masked_fill(drop, 0.0)
