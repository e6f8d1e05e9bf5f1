"""Greedy removal, measured anew after each step, as SLEB does (arXiv 2402.09025), by KL to the dense model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pipeline.errors import PalimpsestError
from stages.decoder.wavefront import Variant

Step = tuple[dict[int, float], int]  # cost of each candidate on top of what is gone, and the block chosen


def greedy(candidates: Sequence[int], steps: int, cost: Callable[[list[Variant]], list[float]], spacing: int = 0) -> list[Step]:
    """Remove, `steps` times, the candidate whose absence costs least beside those already gone; ties go to the earlier block.

    Args:
        cost: of each variant, all measured in one sweep. One that is not finite is never chosen.
        spacing: blocks taken are more than this apart.

    Raises PalimpsestError naming the step at which none is finite, or none is left.
    """
    gone: list[int] = []
    found: list[Step] = []
    for step in range(1, steps + 1):
        left = [block for block in candidates if block not in gone and all(abs(block - one) > spacing for one in gone)]
        if not left:
            raise PalimpsestError(
                f"params.yaml: search.steps = {steps}: with search.spacing = {spacing} none is left at step {step}; allowed: "
                f"0 to {step - 1}, or less spacing"
            )
        costs = dict(zip(left, cost([Variant(dict.fromkeys([*gone, block])) for block in left]), strict=True))
        known = [block for block in left if math.isfinite(costs[block])]
        if not known:
            raise PalimpsestError(
                f"params.yaml: search.steps = {steps}: at step {step} the KL is not finite whichever block goes; "
                + (f"allowed: 0 to {step - 1}, or " if step > 1 else "")
                + "try compute.dtype: float32"
            )
        best = min(known, key=lambda block: (costs[block], block))
        gone.append(best)
        found.append((costs, best))
    return found
