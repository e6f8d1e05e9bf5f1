"""Greedy removal, measured anew after each step, as SLEB does (arXiv 2402.09025), by KL to the dense model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from stages.decoder.wavefront import Variant

Step = tuple[dict[int, float], int]  # cost of each candidate on top of what is gone, and the block chosen


def greedy(candidates: Sequence[int], steps: int, cost: Callable[[list[Variant]], list[float]]) -> list[Step]:
    """Remove, `steps` times, the candidate whose absence costs least beside those already gone; ties go to the earlier block.

    Args:
        cost: of each variant, all measured in one sweep. One that is not finite is never chosen if another is.
    """
    gone: list[int] = []
    found: list[Step] = []
    for _ in range(steps):
        left = [block for block in candidates if block not in gone]
        costs = dict(zip(left, cost([Variant(dict.fromkeys([*gone, block])) for block in left]), strict=True))
        best = min(left, key=lambda block: (costs[block] if math.isfinite(costs[block]) else math.inf, block))
        gone.append(best)
        found.append((costs, best))
    return found
