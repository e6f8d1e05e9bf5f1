"""YES bounds of fully connected ReLU networks (arXiv 2410.10984), in closed form: the oracle of what is fitted step by step here.

Columns are samples. A network has K linear layers, a ReLU behind all but the last; every width is that of X and Y.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

Columns = Float[Tensor, "width sample"]


def yes_zero(x: Columns, y: Columns, layers: int, bias: bool = False, ridge: float | None = None) -> float:
    """YES-0: every layer is the least-squares map to the final target, with the ReLU behind it; ||Y_K - Y||² / samples.

    Args:
        layers: K, 1 or more. bias: append a row of ones to each layer's input.
        ridge: None for the Moore-Penrose inverse; else solve from the Gram matrix, damped by ridge · trace / width.
    """
    return _chain(x, [y] * layers, y, bias, ridge)


def yes_subset(
    x: Columns, y: Columns, hidden: Sequence[Columns], stops: Sequence[int], bias: bool = False, ridge: float | None = None
) -> float:
    """e_C for the stops C, a subset of 1 … K - 1: layer l is fitted to the output of the next stop at or behind it, else to Y.

    `hidden` are the outputs H_1 … H_{K-1} of the network judged, after their ReLU.
    """
    targets = []
    for layer in range(1, len(hidden) + 2):
        stop = min((one for one in stops if one >= layer), default=None)
        targets.append(y if stop is None else hidden[stop - 1])
    return _chain(x, targets, y, bias, ridge)


def yes_bounds(
    x: Columns,
    y: Columns,
    hidden: Sequence[Columns],
    bias: bool = False,
    ridge: float | None = None,
    previous: Sequence[float] | None = None,
) -> list[float]:
    """YES-0 … YES-(K-1), nested: YES-k is the least e_C over the subsets of k stops, YES-(k-1) and its own value an epoch before.

    Args:
        hidden: of this epoch, as for `yes_subset`; K is one more than their number.
        previous: what this function returned for the epoch before.
    """
    inner = len(hidden)
    bounds = [yes_zero(x, y, inner + 1, bias, ridge)]
    for count in range(1, inner + 1):
        least = min(yes_subset(x, y, hidden, stops, bias, ridge) for stops in itertools.combinations(range(1, inner + 1), count))
        bounds.append(min(least, bounds[-1]))
    return bounds if previous is None else [min(pair) for pair in zip(bounds, previous, strict=True)]


def _chain(x: Columns, targets: Sequence[Columns], y: Columns, bias: bool, ridge: float | None) -> float:
    z = x.double()
    for layer, target in enumerate(targets):
        z = _with_ones(z) if bias else z
        z = _least_squares(z, target.double(), ridge) @ z
        z = z if layer == len(targets) - 1 else z.relu()
    return float((z - y.double()).square().sum() / y.shape[1])


def _with_ones(z: Columns) -> Columns:
    return torch.cat([z, torch.ones_like(z[:1])])


def _least_squares(z: Columns, target: Columns, ridge: float | None) -> Float[Tensor, "out width"]:
    if ridge is None:
        return target @ torch.linalg.pinv(z)
    gram = z @ z.T
    gram.diagonal().add_(ridge * float(gram.diagonal().mean()))
    return torch.linalg.solve(gram, z @ target.T).T
