"""LLM-Streamline: the run of adjacent blocks whose input and output are most alike (arXiv 2403.19135)."""

from __future__ import annotations

import numpy as np

from pipeline.errors import PalimpsestError


def streamline(cosine: np.ndarray, count: int, protected: set[int]) -> tuple[list[int], dict[int, float]]:
    """The window [start, start + count) with the largest cosine between boundary `start` and boundary `start + count`.

    Per-token cosine, all windows considered, the first and the last too unless protected; ties go to the earlier window.

    Args:
        cosine: [block + 1, block + 1], boundary against boundary, upper triangle.
        count: blocks to remove.
        protected: blocks that stay.

    Returns the window's blocks, and the cosine of every allowed window by its first block.
    Raises PalimpsestError if no window avoids the protected blocks.
    """
    starts = [start for start in range(len(cosine) - count) if protected.isdisjoint(range(start, start + count))]
    if not starts:
        raise PalimpsestError(
            f"params.yaml: removal.count = {count}: no {count} adjacent blocks are free of removal.protect {sorted(protected)}; "
            "lower the count or protect fewer"
        )
    scores = {start: float(cosine[start, start + count]) for start in starts}
    best = max(starts, key=lambda start: (scores[start], -start))
    return list(range(best, best + count)), scores
