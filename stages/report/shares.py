"""What the allocation asked of each block and matrix, and what the masks took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.drawing.notation import counted, percent
from stages.report.columns import Columns, Floats

SHOWN = 5e-5  # shares nearer to each other read the same on the page, which has two decimals of a percent


@dataclass(frozen=True)
class Shares:
    """Sparsity as asked (allocation.csv) and as taken (masks.csv): per block weighted by parameters, and per row of masks.csv."""

    blocks: list[int]
    asked: Floats  # [block]
    taken: Floats  # [block]; to the letter as asked where masks miss it by less than the page shows
    matrices: list[tuple[int, str]]
    asked_each: Floats  # [matrix]; NaN where the allocation does not name it
    taken_each: Floats  # [matrix]

    @property
    def missed(self) -> NDArray[np.bool_]:
        """Blocks that gave up another share than they were asked for, [block]."""
        return self.taken != self.asked

    @property
    def missed_each(self) -> NDArray[np.bool_]:
        """The same, [matrix]."""
        return np.abs(self.taken_each - self.asked_each) > SHOWN

    @property
    def levelled(self) -> bool:
        """Whether an allocation that told matrices apart became the same share everywhere."""
        known = np.isfinite(self.asked_each)
        return bool(known.any() and np.ptp(self.taken_each) <= SHOWN < np.ptp(self.asked_each[known]))


def read_shares(allocation: Columns, masks: Columns) -> Shares:
    """Both tables side by side. A block without prunable matrices gives up nothing."""
    blocks, asked = per_block_sparsity(allocation)
    found = dict(zip(*per_block_sparsity(masks), strict=True))
    taken = np.array([found.get(block, 0.0) for block in blocks]).round(9)  # a sum's last digits tell no blocks apart
    asked_of = dict(
        zip(
            zip(allocation.whole("block"), allocation.words("matrix"), strict=True),
            allocation.numbers("sparsity").tolist(),
            strict=True,
        )
    )
    matrices = list(zip(masks.whole("block"), masks.words("matrix"), strict=True))
    asked_each = np.array([asked_of.get((block, name), asked_of.get((block, ""), np.nan)) for block, name in matrices])
    taken = np.where(np.abs(taken - asked) > SHOWN, taken, asked)
    return Shares(blocks, asked, taken, matrices, asked_each, masks.numbers("sparsity"))


def per_block_sparsity(allocation: Columns) -> tuple[list[int], Floats]:
    """Blocks and the sparsity of each: the parameter-weighted mean where it is set per matrix. Of masks.csv likewise."""
    return _block_means(allocation, "sparsity")


def per_block_score(allocation: Columns) -> Floats:
    """The score of each block: a parameter-weighted mean where it is set per matrix; NaN where there is none."""
    known = allocation.pick(np.isfinite(allocation.numbers("score")))
    scores = dict(zip(*_block_means(known, "score"), strict=True)) if len(known) else {}
    return np.array([scores.get(block, np.nan) for block in np.unique(allocation.whole("block")).tolist()])


def _block_means(table: Columns, column: str) -> tuple[list[int], Floats]:
    weights = np.nan_to_num(table.numbers("parameters"))
    weights = np.where(weights > 0, weights, 1.0)
    blocks, of = np.unique(table.whole("block"), return_inverse=True)
    weights = weights / np.bincount(of, weights=weights)[of]  # first, so that a block of one row keeps its value to the bit
    means = np.asarray(np.bincount(of, weights=weights * table.numbers(column)), dtype=np.float64)
    return blocks.tolist(), means


def rounding(shares: Shares, masking: Mapping[str, Any]) -> list[str]:
    """What the masks made of the allocation, in a sentence; none where they are as asked."""
    if not shares.missed_each.any():
        return []
    known = shares.asked_each[np.isfinite(shares.asked_each)]
    asked, taken = _range(known), _range(shares.taken_each)
    if masking["pattern"] == "unstructured":
        return [f"The masks do not give the allocation to the letter: it asks {asked} of the matrices, they took {taken}."]
    of = masking["pattern"].partition(":")[2]
    uniform = " everywhere, so that the allocation is uniform" if shares.levelled else ""
    return [f"The pattern {masking['pattern']} rounded the allocation to whole n of {of}: {asked} became {taken}{uniform}."]


def worst(shares: Shares) -> list[str]:
    """How many matrices gave up another share than asked, and which one most; nothing where none did."""
    missed = shares.missed_each
    if not missed.any():
        return []
    index = int(np.nanargmax(np.abs(shares.taken_each - shares.asked_each)))
    (block, name), many = shares.matrices[index], counted(len(missed), "matrix", "matrices")
    return [
        f"{int(missed.sum()):,} of {many} gave up another share than the allocation asks, {name} of block {block} most of all: "
        f"{percent(shares.taken_each[index], 2)} instead of {percent(shares.asked_each[index], 2)}."
    ]


def _range(values: Floats) -> str:
    low, high = float(values.min()), float(values.max())
    return percent(low, 2) if high - low <= SHOWN else f"{percent(low, 2)} to {percent(high, 2)}"
