"""Do the two protocols agree? The regime of a model, after the decision rule of arXiv 2605.16234."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray


def verdict(
    replacement: Float[ndarray, " pair"], interchange: Float[ndarray, " pair"], tied: float, divergent: float
) -> dict[str, Any]:
    """Medians and means over pairs of adjacent inner blocks, and the regime, which rests on the medians.

    `tied`: replacement is small, most blocks can stand in for their neighbours. `divergent`: it is not, yet neighbours
    commute (interchange is small beside it). `uninformative`: neither. The paper gives 0.10 nats for "small" and no
    threshold of the ratio.
    """
    there = np.isfinite(replacement) & np.isfinite(interchange)
    if not there.any():
        why = "none of the pairs has finite KLs" if len(there) else "the model has no two adjacent inner blocks of one type"
        return {"regime": "unknown", "pairs": 0, "note": f"regime and gap are not known: {why}"}
    r, q = replacement[there], interchange[there]
    ratio = float(np.median(np.divide(q, r, out=np.zeros_like(q), where=r > 0)))
    median = float(np.median(r))
    return {
        "regime": "tied" if median < tied else "divergent" if ratio < divergent else "uninformative",
        "pairs": int(there.sum()),
        "replacement": median,
        "interchange": float(np.median(q)),
        "ratio": ratio,
        "replacement_mean": float(np.mean(r)),
        "interchange_mean": float(np.mean(q)),
        "gap": float(np.mean(r - q)),  # so replacement_mean - interchange_mean
        "interchange_above_replacement": int((q > r).sum()),
        "tied": tied,
        "divergent": divergent,
    }
