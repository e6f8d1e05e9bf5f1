"""Token ids cut into the windows of an evaluation contract, and the tokens in them that are scored."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int32

from stages.corpus.encode import refuse_doubled
from stages.tokens.contract import Contract


def slide(
    ids: Int32[np.ndarray, " token"], contract: Contract, bos: int | None = None
) -> tuple[Int32[np.ndarray, "window length"], Bool[np.ndarray, "window length"]]:
    """Windows over `ids`, and which of their tokens are scored as targets.

    A token is scored once at most, in the first window that has it behind another token; a window without any is left out. What
    does not fill the last window is zeros and is not scored.

    Args:
        bos: stands at the start of each window; None for nothing.
    """
    body, lead = contract.body, int(bos is not None)
    starts = np.arange(0, max(len(ids) - body, 0) + contract.stride, contract.stride)  # up to the first one that reaches the end
    if contract.rest == "dropped":
        starts = starts[starts + body <= len(ids)]
    starts = starts[: contract.windows]
    places = starts[:, None] + np.arange(body)  # [window, body]: which token
    there = places < len(ids)
    windows = np.where(there, np.append(ids, 0)[np.minimum(places, len(ids))], 0)
    known = (starts > 0) * (body - contract.stride)  # tokens at a window's start that an earlier one has
    skipped = (known > 0) & (contract.overlap == "published")
    scored = there & (np.arange(body) >= (known + skipped)[:, None])
    if bos is not None:
        refuse_doubled(bos, windows[:, 0])
        windows = np.concatenate([np.full((len(starts), 1), bos), windows], axis=1)
        scored = np.concatenate([np.zeros((len(starts), lead), dtype=bool), scored], axis=1)
    scored[:, 0] = False  # nothing stands before it
    some = scored.any(axis=1)
    return windows[some].astype(np.int32), scored[some]
