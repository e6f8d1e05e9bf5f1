"""What each criterion thinks of every block: candidates from the first to go to the last, whatever the criterion's own scale."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd

Order = list[tuple[int, float]]  # (block, its score), the first to go first


def by_block(scores: Mapping[int, float], highest_first: bool = False, ties: Mapping[int, float] | None = None) -> Order:
    """Blocks by their scores, the least first; of equal ones that with the lower `ties` as `lowest` has it, then the earlier."""
    sign = -1 if highest_first else 1
    return sorted(scores.items(), key=lambda one: (sign * one[1], (ties or {}).get(one[0], math.inf), one[0]))


def by_window(scores: Mapping[int, float], count: int, highest_first: bool = False) -> Order:
    """Blocks by the best of the windows that hold them.

    Args:
        scores: of the windows of `count` blocks, by their first block.
        highest_first: the best window is that of the highest score.
    """
    better = max if highest_first else min
    best: dict[int, float] = {}
    for start, score in scores.items():
        for block in range(start, start + count):
            best[block] = better(score, best.get(block, score))
    return by_block(best, highest_first)


def greedy(steps: pd.DataFrame, protected: set[int]) -> Order:
    """Blocks that may go, in the order in which they were taken, then the others by their divergence when last tried.

    Args:
        steps: step, block, divergence, removed (1 for the block that was taken): every block tried at every step.
    """
    columns = (steps[name].tolist() for name in ("step", "block", "divergence", "removed"))
    last = {block: (step, value, taken) for step, block, value, taken in sorted(zip(*columns, strict=True))}
    taken = sorted((step, block, value) for block, (step, value, gone) in last.items() if gone)
    rest = sorted((value, block) for block, (_, value, gone) in last.items() if not gone)
    both = [(block, value) for _, block, value in taken] + [(block, value) for value, block in rest]
    return [(block, value) for block, value in both if block not in protected]
