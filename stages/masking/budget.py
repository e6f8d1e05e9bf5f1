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
    """n of m for each unit (a block or a matrix), such that no step of one unit would bring the total closer to the wish.

    As OWL's N:M, which rounds n per block; but here the largest remainders are rounded up first, while that helps the total.
    No n is above m - 1, or outside what the least and the largest share round to; a unit with a share of 0 is left alone.

    Args:
        shares: wished share of each unit.
        sizes: weights of each unit.
    """
    wishes = {unit: share * m for unit, share in shares.items() if share > 0}
    if not wishes:
        return dict.fromkeys(shares, 0)
    high = min(m - 1, round(max(wishes.values())))
    low = min(high, round(min(wishes.values())))
    counts = {unit: min(max(int(wish + 1e-9), low), high) for unit, wish in wishes.items()}
    missing = sum((wish - counts[unit]) * sizes[unit] for unit, wish in wishes.items())
    moved = True
    while moved:
        moved = False
        for step in (1, -1):
            for unit in sorted(counts, key=lambda unit: step * (counts[unit] - wishes[unit])):  # stable: ties in order
                room = counts[unit] < high if step == 1 else counts[unit] > low
                helps = missing >= sizes[unit] / 2 if step == 1 else -missing > sizes[unit] / 2
                if room and helps:
                    counts[unit] += step
                    missing -= step * sizes[unit]
                    moved = True
    return {unit: counts.get(unit, 0) for unit in shares}
