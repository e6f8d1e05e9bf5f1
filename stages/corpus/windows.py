"""Token ids cut into windows, and the windows that are used."""

from __future__ import annotations

from typing import Literal

import numpy as np
from jaxtyping import Int32

from stages.corpus.encode import refuse_doubled


def pack(ids: Int32[np.ndarray, " token"], length: int, bos: int | None = None) -> Int32[np.ndarray, "window length"]:
    """Cut `ids` into windows of `length`, in order; the rest that fills no window is left out.

    Args:
        bos: stands at the start of each window, which then takes `length - 1` of `ids`; None for nothing.
    """
    body = length if bos is None else length - 1
    windows = ids[: len(ids) // body * body].reshape(-1, body)
    if bos is None:
        return windows
    refuse_doubled(bos, windows[:, 0])
    return np.concatenate([np.full((len(windows), 1), bos, dtype=np.int32), windows], axis=1)


def choose(
    windows: Int32[np.ndarray, "window length"], count: int, sampling: Literal["random", "first"], seed: int
) -> Int32[np.ndarray, "count length"]:
    """`count` different windows: the first ones, or random ones. With one seed, fewer are the beginning of more."""
    if sampling == "first":
        return windows[:count]
    return windows[np.random.Generator(np.random.PCG64(seed)).permutation(len(windows))[:count]]
