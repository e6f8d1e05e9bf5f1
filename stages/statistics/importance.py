"""What each matrix of a block, and the block as a whole, weighs: the numbers that rules for sharing out sparsity go by.

Scores are Wanda's, A = |W_ij| · sqrt(mean over sequences of Σ_t x_tj²), of the dense model, as OWL (arXiv 2310.05175,
github.com/luuyin/OWL) and DLP (arXiv 2505.23807, github.com/ironartisan/DLP) take them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from pipeline.tensors import check_finite
from stages.statistics.distribution import Distribution
from stages.statistics.place import column_name
from stages.statistics.spectra import tail_exponents

MEDIAN = 50.0
ALPHAS = ("alpha_mid", "alpha_peak", "alpha_peak_corrected")
Row = dict[str, Any]


def score_rows(
    weights: Mapping[str, Float[Tensor, "out in"]],
    squares: Mapping[str, Float[Tensor, " in"]],
    sequences: int,
    multiples: Sequence[float],
    block: int,
) -> dict[str, Row]:
    """Mean, median and outlier shares of the scores of each matrix, and under the name "" of all the block's scores pooled.

    Args:
        weights: by matrix.
        squares: sum over tokens of x² per input channel, by matrix; a matrix that is missing here (an expert no token was
            routed to) has no scores.
        sequences: over how many the squares are a sum.
        multiples: of the mean; scores above are outliers (OWL's M).
    """

    def scores(name: str) -> Tensor:
        norms = (squares[name] / sequences).sqrt().float()
        return weights[name].float().abs() * norms.to(weights[name].device)

    pooled = Distribution(f"block {block}, scores")
    each: dict[str, Distribution] = {}
    for name in squares:
        each[name] = Distribution(f"block {block}, scores of {name}")
        each[name].first_look(scores(name))
        pooled.pool(each[name])
    for one in (pooled, *each.values()):
        one.aim([MEDIAN], multiples)
    for name, one in each.items():
        one.second_look(scores(name))
        pooled.second_look(scores(name))
    return {name: _row(one, multiples) for name, one in {"": pooled, **each}.items()}


def alpha_rows(weights: Mapping[str, Float[Tensor, "out in"]]) -> dict[str, Row]:
    """Tail exponents of each matrix, and under the name "" their mean over the block's matrices, as published."""
    rows: dict[str, Row] = {name: dict(tail_exponents(weight)) for name, weight in weights.items()}
    known = {alpha: [row[alpha] for row in rows.values() if row[alpha] is not None] for alpha in ALPHAS}
    return {"": {alpha: sum(some) / len(some) if some else None for alpha, some in known.items()}, **rows}


def check_weights(weights: Mapping[str, Tensor], block: int) -> None:
    """Raise ArtifactError naming block and matrix if a weight is NaN or infinite, in an expert that no token reaches too."""
    for name, weight in weights.items():
        check_finite(weight, f"block {block}, weights of {name}")


def score_columns(multiples: Sequence[float]) -> list[str]:
    """Columns of importance.csv that come from scores."""
    return ["score_mean", "score_median", *(column_name(one, "score_outliers_") for one in multiples)]


def _row(scores: Distribution, multiples: Sequence[float]) -> Row:
    if scores.count == 0:
        return {}
    values = [scores.mean, scores.percentile(MEDIAN), *(scores.share_above(one) for one in multiples)]
    return dict(zip(score_columns(multiples), values, strict=True))
