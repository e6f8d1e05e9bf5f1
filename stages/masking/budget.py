"""How much each matrix gives up, and in what form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from stages.decoder.selection import keep_groups, keep_overall, keep_per_row

Unit = TypeVar("Unit")


@dataclass(frozen=True)
class Budget:
    """What one matrix gives up."""

    share: float  # of its weights
    group: tuple[int, int] | None  # (n, m): n of every m consecutive inputs go; n/m is then `share`
    compared: str  # row | layer, and what single methods do by themselves
    exact: bool  # meet the share to the nearest weight; else round as the published code does


@dataclass
class Pruned:
    """What was decided for one matrix."""

    keep: Bool[Tensor, "out in"]
    score: float  # share of the total score that the kept weights hold
    weight: Float[Tensor, "out in"] | None = None  # float32, where the method changes what it keeps
    damping: float | None = None
    dead: int | None = None  # inputs that are zero for every token


def choose(score: Float[Tensor, "out in"], budget: Budget) -> Pruned:
    """The mask that a score and a budget give.

    Compared over the layer, published code takes the k-th lowest score (k = ⌊weights · share⌋, from 0) as threshold and removes
    all up to and including it: k + 1 weights, and all that tie with the last.
    """
    if budget.group is not None:
        keep = keep_groups(score, *budget.group)
    elif budget.compared == "row":
        keep = keep_per_row(score, budget.share, budget.exact)
    else:
        keep = keep_pooled(score, budget.share, budget.exact)
    return Pruned(keep, kept_share(score, keep))


def keep_pooled(score: Float[Tensor, "out in"], share: float, exact: bool, count: int | None = None) -> Bool[Tensor, "out in"]:
    """All weights compared with each other; `count` overrides round(weights · share) where exact."""
    if exact:
        return keep_overall(score, round(score.numel() * share) if count is None else count)
    place = min(int(score.numel() * share), score.numel() - 1)
    return score > score.flatten().kthvalue(place + 1).values


def kept_share(value: Float[Tensor, "out in"], keep: Bool[Tensor, "out in"]) -> float:
    """Share of the total of `value` that lies where `keep` is True; 1 if the total is 0."""
    total = float(value.sum())
    return float(torch.dot(value.reshape(-1), keep.reshape(-1).to(value.dtype))) / total if total > 0 else 1.0


def round_to_groups(shares: Mapping[Unit, float], sizes: Mapping[Unit, int], m: int) -> dict[Unit, int]:
    """n of m for each unit (a block or a matrix), the removed total as close to that of the shares as whole n allow.

    As OWL's N:M, which rounds n per block; here the largest remainders are rounded up until the total is met.

    Args:
        shares: wished share of each unit.
        sizes: weights of each unit.
    """
    counts = {unit: int(share * m + 1e-9) for unit, share in shares.items()}
    missing = sum((shares[unit] * m - counts[unit]) * sizes[unit] for unit in shares)
    rests: list[Unit] = sorted(shares, key=lambda unit: counts[unit] - shares[unit] * m)  # stable: ties in order
    for unit in rests:
        if missing < sizes[unit] / 2 or counts[unit] >= m:
            break
        counts[unit] += 1
        missing -= sizes[unit]
    return counts
