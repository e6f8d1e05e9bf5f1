"""What the rules for sharing out sparsity go by: the names of their scores, and how each would rank the blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from stages.report.columns import Columns, Floats
from stages.report.naming import method
from stages.report.results import Results
from stages.report.shares import per_block_score
from stages.report.strips import strips

RISES = {"loss": "Rise in loss", "kl": "KL from the dense model"}


def score_name(params: dict[str, Any]) -> str:
    """The score of the method in use, as the title of a picture."""
    allocation = params["allocation"]
    knobs = allocation.get(allocation["method"], {})
    names = {
        "pals": lambda: f"{knobs['percentile']:g}% of |activations| lie below, {_pals_place(knobs)}",
        "owl": lambda: f"Outliers: % of scores above {knobs['multiple']:g} times their mean",
        "dlp": lambda: f"{knobs['reducer'].capitalize()} of the scores |W|·‖x‖",
        "alphapruning": lambda: f"Tail exponent α of the weights' spectra ({', '.join(_alpha_fit(knobs))})",
        "gradient": lambda: "Mean |∂L/∂W|" if knobs["kind"] == "gradient" else "Mean |W · ∂L/∂W|",
        "measured": lambda: f"{RISES.get(params['sensitivity']['method'], 'Rise')} with one block pruned alone, nats",
        "random": lambda: "Random numbers",
    }
    return names.get(allocation["method"], lambda: "Score the allocation went by")()


def rise_errors(results: Results, blocks: list[int]) -> Floats:
    """Standard error of the measured rise of each block; NaN where there is none."""
    errors = dict(zip(results.sensitivity.whole("block"), results.sensitivity.numbers("error").tolist(), strict=True))
    return np.array([errors.get(block, np.nan) for block in blocks])


def rankings(results: Results, params: dict[str, Any]) -> str:
    """A picture of how every rule would rank the blocks; empty where none was measured."""
    found = _for_each_rule(results, params["allocation"])
    if not found:
        return ""
    ranked = {name: _shares(values) for name, values in found.items()}
    title = "How each rule ranks the blocks"
    chosen = method(params["allocation"]["method"])
    return strips(title, ranked, chosen if chosen in ranked else "", ("pruned most", "spared most"), _description(ranked))


def _for_each_rule(results: Results, allocation: dict[str, Any]) -> dict[str, Floats]:
    """Rule -> its score for each block, turned so that a high one is spared; rules that tell no block apart left out.

    The rule in use has the score that the allocation went by, all others what they would read of the same tables.
    """
    weights = _whole_blocks(results.importance)
    owl = f"score_outliers_{allocation['owl']['multiple']!r}".removesuffix(".0")
    scores = {
        "pals": _percentiles(results, allocation["pals"]),
        "owl": weights.numbers(owl),
        "dlp": weights.numbers(f"score_{allocation['dlp']['reducer']}"),
        "alphapruning": weights.numbers(_alpha_column(allocation["alphapruning"])),
        "gradient": weights.numbers({"gradient": "gradient", "weighted": "weighted_gradient"}[allocation["gradient"]["kind"]]),
        "measured": results.sensitivity.ordered("block").numbers("rise"),
    }
    scores[allocation["method"]] = per_block_score(results.allocation)
    pruned = {"dlp", "alphapruning", *(["pals"] if allocation["pals"]["sign"] == "spare_low" else [])}  # where the score is high
    told = {name: values for name, values in scores.items() if len(set(values[np.isfinite(values)])) > 1}
    whole = {name: values for name, values in told.items() if len(values) == results.blocks}
    return {method(name): -values if name in pruned else values for name, values in whole.items()}


def _percentiles(results: Results, knobs: dict[str, Any]) -> Floats:
    """What PALS would go by, [block]; the mean over sequences of matrices' inputs is weighted by their widths."""
    column = f"p{knobs['percentile']!r}".removesuffix(".0")
    column += "_per_sequence" if knobs["pooling"] == "mean_of_sequences" else ""
    table = results.statistics.ordered("block")
    if knobs["source"] == "linear_inputs" and knobs["pooling"] == "mean_of_sequences":
        rows = table.pick((table.numbers("parameters") > 0) & np.isfinite(table.numbers(column)))
        of, widths, many = np.array(rows.whole("block"), dtype=int), rows.numbers("width"), results.blocks
        total = np.bincount(of, widths * rows.numbers(column), many)
        count = np.bincount(of, widths, many)
        return np.divide(total, count, out=np.full(len(total), np.nan), where=count > 0)
    place = "linears" if knobs["source"] == "linear_inputs" else knobs["source"].removeprefix("block_")
    return table.pick(np.array([name == place for name in table.words("place")], dtype=bool)).numbers(column)


def _pals_place(knobs: dict[str, Any]) -> str:
    mean = ", mean of windows" if knobs["pooling"] == "mean_of_sequences" else ""
    return knobs["source"].replace("_", " ") + mean


def _alpha_column(knobs: dict[str, Any]) -> str:
    """The column of importance.csv."""
    return "_".join(["alpha", *_alpha_fit(knobs)])


def _alpha_fit(knobs: dict[str, Any]) -> list[str]:
    """What the tail was fitted by; only one that is scanned for the peak has a corrected window."""
    corrected = knobs["fit"] == "peak" and knobs["window"] == "corrected"
    return [knobs["fit"], *["corrected"] * corrected]


def _whole_blocks(importance: Columns) -> Columns:
    return importance.pick(np.array([not name for name in importance.words("matrix")], dtype=bool)).ordered("block")


def _shares(values: Floats) -> Floats:
    """Ranks from 0 to 1, equal values sharing their mean rank; NaN stays."""
    known = np.isfinite(values)
    shares = np.full(len(values), np.nan)
    shares[known] = ranks(values[known]) / max(known.sum() - 1, 1)
    return shares


def ranks(values: Floats) -> Floats:
    """Ranks from 0, equal values sharing their mean rank."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count + 1) / 2)[place]


def _description(ranked: dict[str, Floats]) -> str:
    return "; ".join(f"{name} would spare block {int(np.nanargmax(values))} most" for name, values in ranked.items())
