"""What every operator is fitted from: Grams and channel sums over the tokens, in memory that does not grow with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from stages.decoder.gram import Fit, Grams, add_tokens, empty_grams, relative_errors
from stages.decoder.operators import Operator


@dataclass
class Sums:
    """Sums over tokens x [channel] and the steps d that an operator has to make there, float64."""

    grams: Grams  # xx = Σ xxᵀ, xd = Σ xdᵀ, dd = Σ d²; one target
    x: Float[Tensor, " channel"]
    d: Float[Tensor, " channel"]
    weight: float  # Σ of the tokens' weights; the number of tokens where all weigh 1
    ratios: Float[Tensor, " channel"]  # Σ over windows of mean|x + d| / mean|x|, in the basis of `rotation`
    windows: int
    rotation: Float[Tensor, "channel channel"] | None  # orthonormal


@dataclass(frozen=True)
class Fitted:
    """An operator in float64 and how it was found."""

    operator: Operator
    ridge: float  # the relative ridge that was really used; 0 where the method has none
    damped: Float[Tensor, "channel channel"]  # XᵀX with the ridge on its diagonal


def empty_sums(width: int, device: str = "cpu", rotation: Float[Tensor, "channel channel"] | None = None) -> Sums:
    """Sums of no tokens."""
    zeros = lambda: torch.zeros(width, dtype=torch.float64, device=device)  # noqa: E731
    rotation = None if rotation is None else rotation.to(device)
    return Sums(empty_grams(width, 1, device), zeros(), zeros(), 0.0, zeros(), 0, rotation)


def add_windows(
    sums: Sums,
    x: Float[Tensor, "window token channel"],
    d: Float[Tensor, "window token channel"],
    weight: Float[Tensor, "window token"],
) -> None:
    """Add some windows, in place. Tokens of weight 0 leave no trace; products are float64."""
    x, d, weight = x.double(), d.double(), weight.double()
    _add_ratios(sums, x, x + d, weight)
    there = weight > 0
    rows, steps, weights = x[there], d[there], weight[there]
    sums.x += weights @ rows
    sums.d += weights @ steps
    sums.weight += float(weights.sum())
    if not bool((weights == 1).all()):
        rows, steps = rows * weights.sqrt()[:, None], steps * weights.sqrt()[:, None]
    add_tokens(sums.grams, rows, [rows + steps], torch.float64)


def _add_ratios(sums: Sums, x: Tensor, y: Tensor, weight: Tensor) -> None:
    if sums.rotation is not None:
        x, y = x @ sums.rotation, y @ sums.rotation
    seen = weight.sum(1) > 0
    before, after = ((weight[..., None] * one.abs()).sum(1)[seen] for one in (x, y))
    sums.ratios += torch.where(before > 0, after / before.clamp(min=torch.finfo(torch.float64).tiny), 1.0).sum(0)
    sums.windows += int(seen.sum())


def as_fitted(fit: Fit) -> Fitted:
    """The operator of a full matrix."""
    return Fitted(Operator(dense=fit.m[0]), fit.ridge, fit.damped)


def relative_error(sums: Sums, operator: Operator) -> float:
    """||X M + b - D|| / ||D|| (Frobenius) on the tokens of `sums`; 0 where there is no step to explain."""
    m = operator.matrix(len(sums.x)).to(sums.x)
    if operator.bias is None:
        return relative_errors(sums.grams, m[None])[0]
    dd = float(sums.grams.dd[0])
    without = relative_errors(sums.grams, m[None])[0] ** 2 * dd
    bias = operator.bias.to(sums.x)
    squares = without + float(2 * bias @ (sums.x @ m - sums.d) + sums.weight * bias @ bias)
    return (max(squares, 0.0) / dd) ** 0.5 if dd > 0 else 0.0
