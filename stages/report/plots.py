"""Tables for `dvc plots`: tidy, one file per picture, with only the columns that are drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from pipeline.drawing.notation import spans
from stages.report.answers import Score
from stages.report.columns import Columns, Floats
from stages.report.comparison import digest
from stages.report.results import Results
from stages.report.shares import Shares, per_block_score, read_shares


def plot_tables(results: Results, comparable: Sequence[str], scores: Sequence[Score]) -> dict[str, pd.DataFrame]:
    """File name -> table. Every file is always there; one without anything to draw has its header only.

    `comparable`: the variants of the dense model's protocol; only these stand in one picture.
    """
    shares = read_shares(results.allocation, results.masks)
    influence = results.influence.ordered("block")
    variants = [
        {"variant": name, "perplexity": one.perplexity, "low": one.low, "high": one.high}
        for name, one in results.variants.items()
        if name in comparable
    ]
    return {
        "perplexity.csv": pd.DataFrame(variants),
        "sparsity.csv": _sparsity(shares),
        "score.csv": pd.DataFrame({"block": shares.blocks, "score": per_block_score(results.allocation)}),
        "kept.csv": _kept(results.masks),
        "influence.csv": pd.DataFrame({"block": influence.whole("block"), "influence": influence.numbers("influence")}),
        "ghost.csv": _ghost(results.ghost.ordered("start")),
        "peeling.csv": _peeling(results.peeling),
        "zeroshot.csv": _zeroshot(scores),
    }


def _sparsity(shares: Shares) -> pd.DataFrame:
    named = {"asked by the allocation": shares.asked, "taken by the masks": shares.taken}
    rows = [[block, name, share] for name, each in named.items() for block, share in zip(shares.blocks, each, strict=True)]
    return pd.DataFrame(rows, columns=["block", "series", "sparsity"])


def _zeroshot(scores: Sequence[Score]) -> pd.DataFrame:
    """A row per variant, task and measure; `answers` is a label, `contract` a word that is equal for equal contracts."""
    columns = ["answers", "task", "measure", "variant", "accuracy", "error", "low", "high", "examples", "lost", "gained", "p"]
    rows = [
        [
            f"{one.task}, {one.variant}" + (", normalised" if one.measure == "normalised" else ""),
            *(one.task, one.measure, one.variant, one.share, one.error, one.low, one.high, one.examples),
            *(one.lost, one.gained, one.p, digest(one.contract)),
        ]
        for one in scores
    ]
    table = pd.DataFrame(rows, columns=[*columns, "contract"])
    return table.astype({"lost": "Int64", "gained": "Int64"})


def kept_per_matrix(masks: Columns) -> tuple[list[str], Floats]:
    """Names of the matrices, in the order of the table, and the share of |W| that each keeps in each block, [matrix, block].

    Experts of one kind are one matrix, weighted by parameters.
    """
    kinds = [".".join(part for part in name.split(".") if not part.isdigit()) for name in masks.words("matrix")]
    names = list(dict.fromkeys(kinds))
    blocks, kept, weights = masks.whole("block"), masks.numbers("kept_magnitude"), np.nan_to_num(masks.numbers("parameters"))
    total, count = np.zeros((2, len(names), max(blocks, default=-1) + 1))
    for kind, block, value, weight in zip(
        kinds, blocks, kept.tolist(), np.where(weights > 0, weights, 1.0).tolist(), strict=True
    ):
        if np.isfinite(value):
            total[names.index(kind), block] += value * weight
            count[names.index(kind), block] += weight
    return names, np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)


def _kept(masks: Columns) -> pd.DataFrame:
    names, kept = kept_per_matrix(masks)
    rows = [[block, name, float(kept[row, block])] for row, name in enumerate(names) for block in range(kept.shape[1])]
    return pd.DataFrame(rows, columns=["block", "series", "kept_magnitude"]).dropna()


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
