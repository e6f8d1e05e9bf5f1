"""Sparsity per block beside the score that led to it and the activations behind the score."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.drawing.axes import fitting, linear
from pipeline.drawing.chart import Key
from pipeline.drawing.notation import number, percent
from stages.report.columns import Columns, Floats
from stages.report.naming import method
from stages.report.results import Results
from stages.report.sections import Part, block_panel, calibration
from stages.report.sections.scores import rankings, ranks, rise_errors, score_name
from stages.report.shares import Shares, per_block_score, read_shares, rounding

SIDES = (("input", "block input", "blue", "ring"), ("output", "block output", "rust", "square"))


def sparsity(results: Results, params: dict[str, Any]) -> Part:
    """Sparsity, score and activation percentile of each block."""
    percentile = choose_percentile(results.statistics, params["allocation"])
    shares = read_shares(results.allocation, results.masks)
    blocks, taken = shares.blocks, shares.taken
    scores = per_block_score(results.allocation)
    asked, scored = bool((shares.asked > 0).any() or (taken > 0).any()), len(set(scores[np.isfinite(scores)])) > 1
    panels = [_sparsity(results, shares, params["allocation"]["sparsity"])] if asked else []
    panels += [_score(results, blocks, scores, params)] if asked and scored else []
    panels += [picture] if (picture := rankings(results, params)) else []
    panels += [_activations(results, percentile)] if percentile else []
    readings = [_spread(results, blocks, taken, params["allocation"]["sparsity"]), *rounding(shares, params["masking"])]
    readings += _link(blocks, taken, scores) if asked and scored else []
    readings += (
        ["No score told the blocks apart, so sparsity does not depend on the activations shown here."]
        if asked and not scored
        else []
    )
    readings += _extremes(results.statistics, percentile)
    rule = f"the allocation ({method(params['allocation']['method'])})"
    wish = f"; rings are what {rule} asks" if shares.missed.any() else f", as {rule} asks"
    what = f"Sparsity is the share of its prunable weights that each block gives up{wish}"
    sparse = f"{what}{'; the score is what that went by' if scored else ''}. " if asked else ""
    bars = " Bars reach one standard error over windows." if scored and params["allocation"]["method"] == "measured" else ""
    caption = (
        f"{sparse}Activations: absolute values at each block's input and output over {calibration(params)}, dense model.{bars}"
    )
    heading = "Where the zeros go, and why" if asked else "How large the activations are"
    return Part("sparsity", heading, caption, tuple(panels), tuple(readings))


def choose_percentile(statistics: Columns, allocation: dict[str, Any]) -> str:
    """The column to draw: the one the allocation used, else p99, else the highest there is; empty if there is none."""
    there = [name for name in statistics if name[:1] == "p" and name[1:].replace(".", "", 1).isdigit()]
    used = [f"p{allocation['pals']['percentile']!r}".removesuffix(".0")] if allocation["method"] == "pals" else []
    choices = [*used, "p99", *sorted(there, key=lambda name: -float(name[1:]))]
    return next((name for name in choices if name in there), "")


def _sparsity(results: Results, shares: Shares, target: float) -> str:
    """Bars for what was taken, diamonds for matrices where they are asked one by one, rings for what was asked instead."""
    each = shares.taken_each if any(results.allocation.words("matrix")) else np.zeros(0)
    y = linear([target, *shares.taken, *shares.asked, *each], include=[0.0], as_percent=True)
    keys = [Key("one of its matrices", "ink", "diamond")] if len(each) else []
    keys += [Key("asked", "rust", "ring")] if shares.missed.any() else []
    panel = block_panel(results, "Sparsity per block", y, [*keys, Key("target", "", "dash")])
    panel.level(target)
    tips = [f"block {block}: {percent(share, 2)}" for block, share in zip(shares.blocks, shares.taken, strict=True)]
    panel.bars(shares.blocks, shares.taken.tolist(), "blue", tips)
    if len(each):
        tips = [f"block {b}, {name}: {percent(one, 2)}" for (b, name), one in zip(shares.matrices, each, strict=True)]
        panel.points([block for block, _ in shares.matrices], each.tolist(), "ink", "diamond", tips)
    if shares.missed.any():
        tips = [f"block {block}, asked: {percent(share, 2)}" for block, share in zip(shares.blocks, shares.asked, strict=True)]
        panel.points(shares.blocks, shares.asked.tolist(), "rust", "ring", tips)
    return panel.svg(f"sparsity from {percent(shares.taken.min())} to {percent(shares.taken.max())}")


def _score(results: Results, blocks: list[int], scores: Floats, params: dict[str, Any]) -> str:
    measured = params["allocation"]["method"] == "measured"
    spread = np.nan_to_num(rise_errors(results, blocks)) if measured else np.zeros(len(blocks))
    panel = block_panel(results, score_name(params), fitting(np.concatenate([scores - spread, scores + spread])))
    if spread.any():
        panel.whiskers(blocks, (scores - spread).tolist(), (scores + spread).tolist(), "green")
    panel.line(blocks, scores.tolist(), "green")
    tips = [f"block {block}: {number(score)}" for block, score in zip(blocks, scores, strict=True)]
    panel.points(blocks, scores.tolist(), "green", "dot", tips)
    return panel.svg(f"score from {number(float(np.nanmin(scores)))} to {number(float(np.nanmax(scores)))}")


def _activations(results: Results, percentile: str) -> str:
    sides = {place: _side(results.statistics, place) for place, *_ in SIDES}
    title = f"{_ordinal(percentile)} percentile of |activation|"
    y = fitting(np.concatenate([side.numbers(percentile) for side in sides.values()]))
    panel = block_panel(results, title, y, [Key(label, tone, mark) for _, label, tone, mark in SIDES])
    for place, label, tone, mark in SIDES:
        blocks, values = sides[place].whole("block"), sides[place].numbers(percentile).tolist()
        panel.line(blocks, values, tone)
        tips = [f"{label} {block}: {number(value)}" for block, value in zip(blocks, values, strict=True)]
        panel.points(blocks, values, tone, mark, tips)
    return panel.svg(title)


def _side(statistics: Columns, place: str) -> Columns:
    return statistics.pick(np.array([one == place for one in statistics.words("place")])).ordered("block")


def _ordinal(percentile: str) -> str:
    text = percentile[1:]
    plain = "." in text or text.endswith(("11", "12", "13"))
    return text + ("th" if plain else {"1": "st", "2": "nd", "3": "rd"}.get(text[-1], "th"))


def _spread(results: Results, blocks: list[int], shares: Floats, target: float) -> str:
    low, high = int(shares.argmin()), int(shares.argmax())
    masked = results.variants["masked"]
    of = f" ({masked.zeros:,} of {masked.prunable:,})" if masked.zeros is not None and masked.prunable is not None else ""
    counted = f"counted in the masked model: {percent(masked.sparsity, 2)} of the prunable weights{of}"
    if shares[high] == 0:
        return f"No block gives up any weights; {counted}."
    if shares[high] - shares[low] < 1e-9:
        return f"Every block gives up {percent(shares[low], 2)}; {counted}."
    ends = [f"{percent(shares[end], 2)} (block {blocks[end]})" for end in (low, high)]
    return f"From {ends[0]} to {ends[1]} for a target of {percent(target, 2)}; {counted}."


def _link(blocks: list[int], shares: Floats, scores: Floats) -> list[str]:
    known = np.isfinite(scores)
    if known.sum() < 3 or len(set(shares[known])) < 2:
        return []
    rank = float(np.corrcoef(ranks(shares[known]), ranks(scores[known]))[0, 1])
    top = int(np.nanargmax(scores))
    text = f"Sparsity and score have a rank correlation of {number(rank, 3)} over {int(known.sum())} blocks"
    return [f"{text}; block {blocks[top]}, with the highest score, gives up {percent(shares[top], 2)}."]


def _extremes(statistics: Columns, percentile: str) -> list[str]:
    table = _side(statistics, "output")
    values, blocks = table.numbers(percentile), table.whole("block")
    if not np.isfinite(values).any():
        return []
    top, median = int(np.nanargmax(values)), float(np.nanmedian(values))
    size = f"{number(values[top], 3)}{f'; median over blocks {number(median, 3)}' if len(values) > 1 else ''}"
    text = f"The {_ordinal(percentile)} percentile at the output is highest in block {blocks[top]} ({size})"
    peaks = np.divide(table.numbers("max"), values, out=np.full(len(values), np.nan), where=values > 0)
    if np.isfinite(peaks).any():
        worst = int(np.nanargmax(peaks))
        text += f"; in block {blocks[worst]} the largest value is {number(peaks[worst], 3)} times that block's percentile"
    return [text + "."]
