"""Tables for `dvc plots`: tidy, one file per picture, with only the columns that are drawn."""

from __future__ import annotations

import numpy as np
import pandas as pd

from stages.report.columns import Columns, Floats
from stages.report.notation import spans
from stages.report.results import Results


def plot_tables(results: Results) -> dict[str, pd.DataFrame]:
    """File name -> table. Every file is always there; one without anything to draw has its header only."""
    blocks, shares = per_block_sparsity(results.allocation)
    influence = results.influence.ordered("block")
    variants = [
        {"variant": name, "perplexity": one.perplexity, "low": one.low, "high": one.high}
        for name, one in results.variants.items()
    ]
    return {
        "perplexity.csv": pd.DataFrame(variants),
        "sparsity.csv": pd.DataFrame({"block": blocks, "sparsity": shares, "score": per_block_score(results.allocation)}),
        "influence.csv": pd.DataFrame({"block": influence.whole("block"), "influence": influence.numbers("influence")}),
        "ghost.csv": _ghost(results.ghost.ordered("start")),
        "peeling.csv": _peeling(results.peeling),
    }


def per_block_sparsity(allocation: Columns) -> tuple[list[int], Floats]:
    """Blocks and the sparsity of each: the parameter-weighted mean where it is set per matrix."""
    weights = np.nan_to_num(allocation.numbers("parameters"))
    weights = np.where(weights > 0, weights, 1.0)
    blocks, of = np.unique(allocation.whole("block"), return_inverse=True)
    zeros = np.bincount(of, weights=weights * allocation.numbers("sparsity"))
    return blocks.tolist(), zeros / np.bincount(of, weights=weights)


def per_block_score(allocation: Columns) -> Floats:
    """The score of each block, averaged over its matrices where it is given per matrix; NaN where there is none."""
    scores, of = allocation.numbers("score"), np.array(allocation.whole("block"))
    found = [scores[(of == block) & np.isfinite(scores)] for block in np.unique(of)]
    return np.array([one.mean() if len(one) else np.nan for one in found])


def _ghost(ghost: Columns) -> pd.DataFrame:
    names = [spans(range(start, stop)) for start, stop in zip(ghost.whole("start"), ghost.whole("stop"), strict=True)]
    rows = []
    for name, train, held in zip(names, ghost.numbers("train_error"), ghost.numbers("heldout_error"), strict=True):
        rows += [[name, "fitted", train], [name, "held out", held]]
    return pd.DataFrame(rows, columns=["blocks", "series", "error"])


def _peeling(peeling: Columns) -> pd.DataFrame:
    rows = sorted(
        (target - block, block, error)
        for block, target, error in zip(
            peeling.whole("block"), peeling.whole("target"), peeling.numbers("heldout_error").tolist(), strict=True
        )
    )
    return pd.DataFrame(
        [[block, f"boundary +{reach}", error] for reach, block, error in rows], columns=["block", "series", "heldout_error"]
    )
