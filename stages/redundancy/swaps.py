"""Pairs of blocks swapped, as variants for the wavefront (No Free Swap, arXiv 2605.16234, definition 1)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pandas as pd
from jaxtyping import Float
from numpy import ndarray

from stages.decoder.wavefront import Variant

Pair = tuple[int, int]


def pairs_within(types: Sequence[str], gap: int) -> tuple[list[Pair], list[Pair]]:
    """Pairs i < j of blocks at most `gap` apart: those of one type, and those of unlike types, which cannot stand in."""
    near = [(i, j) for i, j in combinations(range(len(types)), 2) if j - i <= gap]
    return [(i, j) for i, j in near if types[i] == types[j]], [(i, j) for i, j in near if types[i] != types[j]]


def swap_variants(blocks: int, pairs: Sequence[Pair]) -> list[Variant]:
    """The deletion of each block, then per pair: slot i runs block j, slot j runs block i, both interchanged."""
    deletions = [Variant({block: None}) for block in range(blocks)]
    return deletions + [Variant(slots) for i, j in pairs for slots in ({i: j}, {j: i}, {i: j, j: i})]


def spearman(one: Float[ndarray, " item"], other: Float[ndarray, " item"]) -> float:
    """Rank correlation, ties at their mean rank, over the items that are finite in both; NaN if fewer than two differ."""
    both = np.isfinite(one) & np.isfinite(other)
    ranks = [pd.Series(values[both]).rank().to_numpy() for values in (one, other)]
    if not both.any() or min(rank.std() for rank in ranks) == 0:
        return float("nan")
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def half_against_all(values: Float[ndarray, "item prompt"]) -> float:
    """Spearman of the items' means over the first half of the prompts with those over all: were there prompts enough?"""
    return spearman(values[:, : max(1, values.shape[1] // 2)].mean(1), values.mean(1))


def intervals(
    values: Float[ndarray, "item prompt"], confidence: float, resamples: int, seed: int
) -> tuple[Float[ndarray, " item"], Float[ndarray, " item"]]:
    """Percentile bootstrap of each item's mean; prompts are resampled, the same ones for every item."""
    generator = np.random.default_rng(seed)
    prompts = values.shape[1]
    weights = np.stack([np.bincount(generator.integers(0, prompts, prompts), minlength=prompts) for _ in range(resamples)])
    means = values @ weights.T / prompts  # [item, resample]
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2], axis=1)
    return low, high
