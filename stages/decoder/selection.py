"""Which weights stay, given their scores: the lowest go, and among equal scores the one with the lower index goes first.

Scores are finite. On the CPU they are sorted by numpy, whose sort is vectorised (twenty times as fast as torch's here).
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def row_counts(rows: int, columns: int, share: float, exact: bool = True) -> Int[Tensor, " out"]:
    """How many weights each row gives up.

    Args:
        rows, columns: of the matrix.
        share: of its weights to remove, 0 to 1.
        exact: True: round(share · weights) in all, rows differing by one at most and the larger ones evenly spaced. False: every
            row ⌊columns · share⌋, as Wanda's code rounds.
    """
    if not exact:
        return torch.full((rows,), int(columns * share))
    ends = torch.arange(rows + 1) * round(share * rows * columns) // rows
    return ends.diff()


def keep_per_row(score: Float[Tensor, "out in"], share: float, exact: bool = True) -> Bool[Tensor, "out in"]:
    """Compared within each row; `row_counts` says how many of each go."""
    return keep_rows(score, row_counts(score.shape[0], score.shape[1], share, exact))


def keep_rows(score: Float[Tensor, "out in"], counts: Int[Tensor, " out"]) -> Bool[Tensor, "out in"]:
    """In each row the given number of lowest scores goes."""
    columns = score.shape[1]
    counts = counts.to(score.device)
    places = (counts - 1).clamp(min=0)
    threshold = _sorted_rows(score).gather(1, places[:, None])
    keep = score > threshold
    keep[counts == 0] = True
    if int(keep.count_nonzero()) == keep.numel() - int(counts.sum()):
        return keep
    kept = keep.sum(1)
    tied = (kept != columns - counts).nonzero()[:, 0]  # only here does the order of equal scores matter
    if len(tied):
        equal = score[tied] == threshold[tied]
        equal &= equal.cumsum(1) > (counts[tied] - (columns - kept[tied]) + equal.sum(1))[:, None]
        keep[tied] |= equal
    return keep


def keep_overall(score: Float[Tensor, "out in"], count: int) -> Bool[Tensor, "out in"]:
    """Of the whole matrix the `count` lowest scores go; the index counts row by row."""
    flat = score.reshape(-1)
    if 0 < count < len(flat) and _is_numpys(score):
        keep = flat > float(np.partition(flat.numpy(), count - 1)[count - 1])  # selecting is faster than sorting in one long row
        if int(keep.count_nonzero()) == len(flat) - count:
            return keep.view(score.shape)
    return keep_rows(flat[None], torch.tensor([count])).view(score.shape)


def keep_groups(score: Float[Tensor, "out in"], n: int, m: int) -> Bool[Tensor, "out in"]:
    """N:M: of every m consecutive inputs the n lowest go. `in` is a multiple of m.

    A score's rank among its group is counted by comparing each pair of places once, m(m - 1)/2 vector operations.
    """
    places = score.reshape(-1, m).T.contiguous()
    ranks = torch.zeros(places.shape, dtype=torch.int16, device=score.device)
    for later in range(1, m):
        after = places[later] >= places[:later]  # of two equal scores the earlier one goes first
        ranks[later] += after.sum(0, dtype=torch.int16)
        ranks[:later] += ~after
    return (ranks >= n).T.reshape(score.shape)


def _sorted_rows(score: Float[Tensor, "out in"]) -> Float[Tensor, "out in"]:
    return torch.from_numpy(np.sort(score.numpy(), axis=1)) if _is_numpys(score) else score.sort(dim=1).values


def _is_numpys(score: Tensor) -> bool:
    return score.device.type == "cpu" and score.dtype in (torch.float32, torch.float64)
