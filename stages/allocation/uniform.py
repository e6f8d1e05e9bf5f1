"""Every block gives up the same share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from stages.allocation import Allocation


def uniform(statistics: pd.DataFrame, parameters: np.ndarray, wanted: Allocation) -> tuple[np.ndarray, np.ndarray]:
    """Score 0 and the target sparsity for each block."""
    return np.zeros(len(parameters)), np.full(len(parameters), wanted.sparsity)
