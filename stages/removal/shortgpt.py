"""ShortGPT: the blocks that change the stream least, one by one (arXiv 2403.03853)."""

from __future__ import annotations

import numpy as np

from stages.removal.ranking import lowest


def shortgpt(cosine: np.ndarray, count: int, protected: set[int], spacing: int = 0) -> tuple[list[int], dict[int, float]]:
    """The `count` blocks of least influence `1 - cosine(input, output)`, wherever they stand; ties go to the earlier block.

    Args:
        cosine: [block + 1, block + 1], boundary against boundary, upper triangle.
        count: blocks to remove.
        protected: blocks that stay.
        spacing: chosen blocks are more than this apart.

    Returns the blocks in order of depth, and the influence of every allowed block.
    """
    scores = {block: 1 - float(cosine[block, block + 1]) for block in range(len(cosine) - 1) if block not in protected}
    return lowest(scores, count, spacing), scores
