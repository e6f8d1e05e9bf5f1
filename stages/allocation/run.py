"""Share the target sparsity out over the blocks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from pipeline.artifacts import read_table, write_table
from pipeline.console import say
from pipeline.files import Files
from stages.allocation import Allocation, Params
from stages.allocation.pals import pals
from stages.allocation.uniform import uniform

# A method takes the statistics, the prunable weights of each block [block] and its parameters,
# and returns (score [block], sparsity [block]).
Method = Callable[[pd.DataFrame, np.ndarray, Allocation], tuple[np.ndarray, np.ndarray]]
METHODS: dict[str, Method] = {"uniform": uniform, "pals": pals}


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write `allocation.csv`: block, matrix (empty: the whole block), parameters, score, sparsity."""
    wanted = params.allocation
    statistics = read_table(inputs["statistics.csv"], ("place",), ("block", "width", "parameters"))
    parameters = np.asarray(statistics.groupby("block")["parameters"].sum(), dtype=np.float64)
    score, sparsity = METHODS[wanted.method](statistics, parameters, wanted)
    table = pd.DataFrame({"block": range(len(parameters)), "matrix": "", "parameters": parameters.astype(np.int64)})
    write_table(outputs["allocation.csv"], table.assign(score=score, sparsity=sparsity))
    realised = float((sparsity * parameters).sum() / parameters.sum())
    spread = f"{sparsity.min():.4f} to {sparsity.max():.4f} per block"
    say(f"{wanted.method}: {spread}, {realised:.6f} over all, target {wanted.sparsity}")
