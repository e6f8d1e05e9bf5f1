"""From scores of blocks and of pairs of blocks to the blocks that go: pure functions of what `redundancy` saved."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pipeline.errors import PalimpsestError

Pair = tuple[int, int]


def credited(pairs: Mapping[Pair, float], credit: str, allowed: set[int]) -> dict[int, float]:
    """A score per allowed block from scores of pairs i < j.

    "min": the least score over a block's partners (arXiv 2605.16234, its table of the algorithm). "left": the score of
    the pair (i, i + 1), given to i alone (its code). Blocks without a pair have none.
    """
    scores: dict[int, float] = {}
    for (i, j), value in sorted(pairs.items()):
        if credit == "left":
            if j == i + 1 and i in allowed:
                scores[i] = value
            continue
        for block in {i, j} & allowed:
            scores[block] = min(value, scores.get(block, value))
    return scores


def lowest(
    scores: Mapping[int, float], count: int, spacing: int = 0, ties: Mapping[int, float] | None = None, what: str = "removal"
) -> list[int]:
    """The `count` blocks of lowest score, taken one after another if more than `spacing` from all taken; in order of depth.

    Of equal scores the one with the lower `ties` comes first (one that has none last), then the earlier block.
    Raises PalimpsestError if fewer than `count` can be taken.
    """
    order = sorted(scores, key=lambda block: (scores[block], (ties or {}).get(block, math.inf), block))
    chosen: list[int] = []
    for block in order:
        if len(chosen) < count and all(abs(block - other) > spacing for other in chosen):
            chosen.append(block)
    if len(chosen) < count:
        raise PalimpsestError(
            f"params.yaml: {what}.count = {count}: only {len(chosen)} of {len(scores)} scored blocks can go with "
            f"{what}.spacing = {spacing}; lower one of the two, or protect fewer"
        )
    return sorted(chosen)
