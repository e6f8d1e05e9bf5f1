"""Removal guided by swaps: the blocks whose neighbours can best stand in for them, or change places with them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from stages.removal.ranking import Pair, credited, lowest


def pairwise(
    pairs: Mapping[Pair, float], count: int, allowed: set[int], credit: str, spacing: int, ties: Mapping[int, float]
) -> tuple[list[int], dict[int, float]]:
    """The blocks of least credited distance (arXiv 2605.16234), and the score of every allowed block.

    Args:
        pairs: replacement or interchange distance of the blocks i < j.
        ties: deletion cost per block, which orders blocks of equal score: the two of an adjacent pair often are.
    """
    scores = credited(pairs, credit, allowed)
    return lowest(scores, count, spacing, ties), scores


def replacement_pairs(both: Mapping[Pair, tuple[float, float]], credit: str) -> dict[Pair, float]:
    """Distance per pair from its two directions (slot i runs block j, slot j runs block i): the larger one; for credit
    "left" the first direction, slot i runs block i + 1, as in the paper's code. Both are finite, or the pair has none."""
    known = {pair: values for pair, values in both.items() if all(map(math.isfinite, values))}
    return {pair: one if credit == "left" else max(one, other) for pair, (one, other) in known.items()}
