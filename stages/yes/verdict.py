"""What the losses say of the model as a whole and of each layer. Pure functions of losses per window.

Red and amber are proofs on those tokens: a concrete net of lower loss exists. Green says only that no map tried is better.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stages.yes.maps import Map

Losses = NDArray[np.float64]  # mean loss of each window, nats
Light = Literal["red", "amber", "green", "none"]


@dataclass(frozen=True)
class Layer:
    """What the maps say of one boundary, the output of `block`. NaN where no map, or no map that skips it, was tried."""

    block: int
    gap: float  # G_l: loss of the direct map less the lowest loss of a map that skips the boundary; above 0: better without it
    gap_error: float  # its standard error over windows
    alternative: str  # the map with that lowest loss
    skipped: float  # share of the maps that skip it
    skipped_best: float  # the same among the tenth of the maps with the lowest losses
    stepping_stone: Literal["poor", "fine", ""]  # poor: the gap exceeds the tolerance; empty: not to be told


def difference(one: Losses, other: Losses) -> tuple[float, float]:
    """Mean of `one` - `other` and its standard error, paired over windows; NaN error where there is a single window."""
    paired = one - other
    error = float(paired.std(ddof=1) / math.sqrt(len(paired))) if len(paired) > 1 else float("nan")
    return float(paired.mean()), error


def is_above(one: Losses, other: Losses, tolerance: float) -> bool:
    """Whether `one` exceeds `other` by more than `tolerance` standard errors of their difference."""
    mean, error = difference(one, other)
    return mean > tolerance * error


def light(loss: Losses, all_last: Losses, best: Losses, tolerance: float) -> Light:
    """The traffic light of the predecessor: red above YES0, amber above YES* but not above YES0, else green.

    With a single window there is no error to hold a difference against, hence no light ("none").

    Args:
        loss: of what is judged.
        all_last: YES0, every block fitted to the last boundary.
        best: YES*, the map of the lowest loss.
        tolerance: in standard errors over windows; what is not above by more counts as not above.
    """
    if len(loss) < 2:
        return "none"
    if is_above(loss, all_last, tolerance):
        return "red"
    return "amber" if is_above(loss, best, tolerance) else "green"


def layers(maps: Mapping[str, Map], losses: Mapping[str, Losses], blocks: int, tolerance: float) -> list[Layer]:
    """One entry per boundary 1 … blocks - 1, by the maps' losses on the same windows.

    A map skips a boundary if no block of it is fitted to that boundary; for a staircase that is π(l) ≠ l.
    """
    ranked = sorted(maps, key=lambda name: (float(losses[name].mean()), name))
    best = ranked[: max(1, len(ranked) // 10)] if ranked else []
    direct = next((name for name in maps if maps[name] == tuple(range(1, blocks + 1))), None)
    found = []
    for boundary in range(1, blocks):
        skipping = [name for name in ranked if boundary not in maps[name]]
        shares = _share(skipping, ranked), _share(skipping, best)
        if not direct or not skipping:
            found.append(Layer(boundary - 1, float("nan"), float("nan"), "", *shares, ""))
            continue
        gap, error = difference(losses[direct], losses[skipping[0]])
        stone = "" if math.isnan(error) else "poor" if gap > tolerance * error else "fine"
        found.append(Layer(boundary - 1, gap, error, skipping[0], *shares, stone))
    return found


def _share(some: Sequence[str], names: Sequence[str]) -> float:
    return len(set(some) & set(names)) / len(names) if names else float("nan")


def running_minima(values: Iterable[float]) -> list[float]:
    """Bounds along a series of checkpoints of one run, on the same tokens: an earlier candidate stays feasible."""
    return list(itertools.accumulate(values, min))


def mean_and_error(losses: Sequence[float] | Losses) -> tuple[float, float]:
    """Mean over windows and its standard error."""
    values = np.asarray(losses, dtype=np.float64)
    return difference(values, np.zeros_like(values))
