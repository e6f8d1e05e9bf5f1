"""What the rules for sharing out sparsity go by: the names of their scores, and how each would rank the blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from stages.report.columns import Columns, Floats
from stages.report.naming import method
from stages.report.results import Results
from stages.report.strips import strips

RISES = {"loss": "Rise in loss", "kl": "KL from the dense model"}


def score_name(params: dict[str, Any]) -> str:
    """The score of the method in use, as the title of a picture."""
    allocation = params["allocation"]
    knobs = allocation.get(allocation["method"], {})
    names = {
        "pals": lambda: f"{knobs['percentile']:g}% of |activations| lie below, {knobs['source'].replace('_', ' ')}",
        "owl": lambda: f"Outliers: % of scores above {knobs['multiple']:g} times their mean",
        "dlp": lambda: f"{knobs['reducer'].capitalize()} of the scores |W|·‖x‖",
        "alphapruning": lambda: f"Tail exponent α of the weights' spectra ({knobs['fit']})",
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
    found = _measured(results, params["allocation"])
    if not found:
        return ""
    ranked = {name: _shares(values) for name, values in found.items()}
    title = "How each rule ranks the blocks"
    chosen = method(params["allocation"]["method"])
    return strips(title, ranked, chosen if chosen in ranked else "", ("pruned most", "spared most"), _description(ranked))


def _measured(results: Results, allocation: dict[str, Any]) -> dict[str, Floats]:
    """Rule -> its score for each block, turned so that a high one is spared; rules that tell no block apart left out."""
    weights, ends = _whole_blocks(results.importance), results.statistics.ordered("block")
    places = np.array([name == allocation["pals"]["source"].removeprefix("block_") for name in ends.words("place")], dtype=bool)
    percentile = f"p{allocation['pals']['percentile']!r}".removesuffix(".0")
    owl = f"score_outliers_{allocation['owl']['multiple']!r}".removesuffix(".0")
    scores = {
        "pals": ends.pick(places).numbers(percentile),
        "owl": weights.numbers(owl),
        "dlp": -weights.numbers(f"score_{allocation['dlp']['reducer']}"),
        "alphapruning": -weights.numbers(f"alpha_{allocation['alphapruning']['fit']}"),
        "gradient": weights.numbers({"gradient": "gradient", "weighted": "weighted_gradient"}[allocation["gradient"]["kind"]]),
        "measured": results.sensitivity.ordered("block").numbers("rise"),
    }
    told = {method(name): values for name, values in scores.items() if len(set(values[np.isfinite(values)])) > 1}
    return {name: values for name, values in told.items() if len(values) == results.blocks}


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
