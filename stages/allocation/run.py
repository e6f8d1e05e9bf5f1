"""Share the target sparsity out over the blocks or matrices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from pipeline.artifacts import read_table, write_table
from pipeline.console import say
from pipeline.files import Files
from stages.allocation import Allocation, Params
from stages.allocation.alphapruning import alphapruning
from stages.allocation.budget import Wish, shift_to_budget
from stages.allocation.dlp import dlp
from stages.allocation.gradient import gradient
from stages.allocation.layers import Layers, make_layers
from stages.allocation.measured import measured
from stages.allocation.owl import owl
from stages.allocation.pals import pals
from stages.allocation.random import random
from stages.allocation.uniform import uniform

# A method says what it would give each layer, and by what score.
METHODS: dict[str, Callable[[Layers, Allocation], Wish]] = {
    "uniform": uniform,
    "pals": pals,
    "owl": owl,
    "dlp": dlp,
    "alphapruning": alphapruning,
    "gradient": gradient,
    "random": random,
    "measured": measured,
}

# Why a layer may have no score.
NO_TOKEN = "no token reached them"
UNSCORED = {
    "gradient": "none of the windows that gradients were taken over reached them",
    "alphapruning": "no tail could be fitted to their spectra",
}


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write `allocation.csv`: block, matrix (empty: the whole block), parameters, score, sparsity."""
    wanted = params.allocation
    layers = make_layers(
        wanted.granularity,
        read_table(inputs["statistics.csv"], ("place",), ("block", "width", "parameters")),
        read_table(inputs["importance.csv"], ("matrix",), ("block", "parameters")),
        read_table(inputs["sensitivity.csv"], ("rise",), ("block",)),
    )
    _check_measured_at(wanted, layers.sensitivity)
    wish = METHODS[wanted.method](layers, wanted)
    sparsity = allocate(wish, layers.parameters, wanted.sparsity, wanted.projection == "faithful")
    columns = {"block": layers.block, "matrix": layers.matrix, "parameters": layers.parameters.astype(np.int64)}
    write_table(outputs["allocation.csv"], pd.DataFrame(columns).assign(score=wish.score, sparsity=sparsity))
    _report(wanted, wish, sparsity, float(sparsity @ layers.parameters / layers.parameters.sum()))


def allocate(wish: Wish, parameters: np.ndarray, target: float, faithful: bool) -> np.ndarray:
    """The sparsity of each layer, [layer]: as published, or moved so that the mean over weights is exactly the target."""
    if target == 0 or (not faithful and (wish.raw == target).all()):  # nothing to move: 0.5 stays 0.5 to the last bit
        return np.full(len(parameters), float(target))
    if faithful:
        return np.clip(wish.faithful, 0.0, 1.0)  # the published code can ask for more than there is, and then takes all
    return shift_to_budget(wish.raw, parameters, target, wish.low, wish.high)


def _check_measured_at(wanted: Allocation, sensitivity: pd.DataFrame) -> None:
    """Say so where blocks were measured at another sparsity than they are to be pruned to."""
    if wanted.method == "measured" and "sparsity" in sensitivity:
        at = float(sensitivity["sparsity"].iloc[0])
        if at == at and at != wanted.sparsity:
            say(
                f"measured at sensitivity.sparsity = {at:g}, used for allocation.sparsity = {wanted.sparsity:g}: what a block "
                "bears at one sparsity it may not bear at another"
            )


def _report(wanted: Allocation, wish: Wish, sparsity: np.ndarray, realised: float) -> None:
    unknown = int(np.isnan(wish.score).sum())
    if unknown:
        say(
            f"{unknown} of {len(sparsity)} layers have no score ({UNSCORED.get(wanted.method, NO_TOKEN)}); they count as the mean"
        )
    spread = f"{sparsity.min():.4f} to {sparsity.max():.4f} per {wanted.granularity}"
    over = f", {realised - wanted.sparsity:+.6f} off (faithful)" if wanted.projection == "faithful" else ""
    say(f"{wanted.method}: {spread}, {realised:.6f} over all, target {wanted.sparsity}{over}")
