"""Removals that stage `search` measured: the greedy order, and the window that its ghost restores best."""

from __future__ import annotations

import numpy as np
import pandas as pd

from pipeline.errors import PalimpsestError


def iterative(steps: pd.DataFrame, count: int, protected: set[int], spacing: int = 0) -> tuple[list[int], dict[int, float]]:
    """The first `count` blocks of the greedy order, and the KL after each.

    Raises PalimpsestError if fewer were measured, or if the order takes a protected block or two nearer than `spacing`.
    """
    chosen = steps.loc[steps.removed == 1].sort_values(by="step")[:count]
    if len(chosen) < count:
        raise PalimpsestError(
            f"params.yaml: removal.count = {count}: {len(chosen)} steps were measured; set search.steps: {count} or more"
        )
    taken = sorted(protected & set(chosen.block))
    if taken:
        raise PalimpsestError(
            f"params.yaml: removal.protect has block {taken[0]}, which the greedy order takes; add it to search.protect"
        )
    blocks = sorted(chosen.block.tolist())
    near = [(one, other) for one, other in zip(blocks, blocks[1:], strict=False) if other - one <= spacing]
    if near:
        raise PalimpsestError(
            f"params.yaml: removal.spacing = {spacing}: the greedy order takes blocks {near[0][0]} and {near[0][1]}; measure one "
            f"that does not: search.spacing: {spacing}"
        )
    return blocks, dict(zip(chosen.block.tolist(), chosen.divergence.tolist(), strict=True))


def recoverable(windows: pd.DataFrame, count: int, protected: set[int]) -> tuple[list[int], dict[int, float]]:
    """The window of `count` blocks whose output, with its ghost in place, is nearest the dense model's; ties go to the earlier.

    Returns its blocks, and the KL of every allowed window by its first block. Raises PalimpsestError if none was measured.
    """
    rows = windows[(windows.stop - windows.start == count) & np.isfinite(windows.divergence.to_numpy(float))]
    scores = {
        start: value
        for start, value in zip(rows.start.tolist(), rows.divergence.tolist(), strict=True)
        if protected.isdisjoint(range(start, start + count))
    }
    if not scores:
        raise PalimpsestError(
            f"params.yaml: removal.count = {count}: no window of {count} blocks outside removal.protect has a finite KL; "
            f"add {count} to search.windows"
        )
    best = min(scores, key=lambda start: (scores[start], start))
    return list(range(best, best + count)), scores
