"""How well the operators that stand in for removed runs explain what those runs did."""

from __future__ import annotations

from typing import Any

import numpy as np

from stages.report.axes import linear, names
from stages.report.chart import Key, Panel
from stages.report.columns import Columns
from stages.report.notation import blocks, method, number, percent, plain, spans
from stages.report.results import Results
from stages.report.sections import Part, Table, calibration

HEADS = {
    "ridge": "Ridge",
    "train_error": "Error, fitted",
    "heldout_error": "Error, held out",
    "condition": "Condition",
    "antisymmetric_share": "Antisymmetric",
    "norm": "Norm",
}


def ghost(results: Results, params: dict[str, Any]) -> Part:
    """A table and a picture of errors per run, or a sentence saying why there are none."""
    heading, table = "How well the ghosts stand in", results.ghost.ordered("start")
    if not len(table):
        return Part("ghost", heading, "", (), (_nothing(results, params),))
    caption = (
        f"One operator per run of removed blocks, fitted in closed form on {calibration(params)}, "
        f"{percent(params['ghost']['held_out'])} of them kept out of the fit. Error: the distance that is left, as a share of "
        "the step the removed blocks made; 1 is what leaving them out without an operator gives."
    )
    return Part("ghost", heading, caption, (_errors(table),), _readings(table), _table(table))


def _nothing(results: Results, params: dict[str, Any]) -> str:
    if not results.removed:
        return "No block was removed, so there is nothing to stand in for."
    return f"No operator was fitted (ghost.method: {params['ghost']['method']}): nothing stands in for {blocks(results.removed)}."


def _errors(table: Columns) -> str:
    train, held, runs = table.numbers("train_error"), table.numbers("heldout_error"), _runs(table)
    panel = Panel(
        "Error of each operator, relative to the step",
        linear([*train, *held], include=[0.0, 1.0]),
        names(runs),
        x_label="error, 1 = no operator",
        height=max(34 * len(table), 60),
        rows=True,
        keys=[Key("windows fitted on", "blue", "ring"), Key("windows held out", "rust", "square")],
    )
    places = list(range(len(table)))
    panel.level(1.0, vertical=True)
    panel.whiskers(places, np.minimum(train, held).tolist(), np.maximum(train, held).tolist(), "ink")
    panel.points(train.tolist(), places, "blue", "ring", [f"fitted: {number(value, 3)}" for value in train])
    panel.points(held.tolist(), places, "rust", "square", [f"held out: {number(value, 3)}" for value in held])
    return panel.svg("; ".join(f"{run}: held-out error {number(value, 3)}" for run, value in zip(runs, held, strict=True)))


def _runs(table: Columns) -> list[str]:
    return [spans(range(start, stop)) for start, stop in zip(table.whole("start"), table.whole("stop"), strict=True)]


def _readings(table: Columns) -> tuple[str, ...]:
    train, held = table.numbers("train_error"), table.numbers("heldout_error")
    if not np.isfinite(held).any():
        return ("No held-out error was recorded, so nothing can be said beyond the windows of the fit.",)
    labels = [f"blocks {run}" if "–" in run else f"block {run}" for run in _runs(table)]
    bad = [labels[index] for index in np.flatnonzero(held >= 1)]
    warning = [f"Above 1 on held-out windows, that is worse than leaving a hole: {', '.join(bad)}."] if bad else []
    if len(table) == 1:
        fitted = f", against {number(train[0], 3)} on the windows it was fitted on" if np.isfinite(train[0]) else ""
        return (f"The operator for {labels[0]} leaves {number(held[0], 3)} of the step on held-out windows{fitted}.", *warning)
    best, worst, gap = int(np.nanargmin(held)), int(np.nanargmax(held)), held - train
    text = f"Held-out error runs from {number(held[best], 3)} ({labels[best]}) to {number(held[worst], 3)} ({labels[worst]})"
    if np.isfinite(gap).any():
        most = int(np.nanargmax(gap))
        text += f"; the widest gap to the fit is {number(gap[most], 3)} ({labels[most]})"
    return (text + ".", *warning)


def _table(table: Columns) -> Table:
    there = {name: table.numbers(name) for name in HEADS if np.isfinite(table.numbers(name)).any()}
    operators = [[method(name)] for name in table.words("operator")] if "operator" in table else [[]] * len(table)
    rows = []
    for index, run in enumerate(_runs(table)):
        cells = [plain(float(values[index])) if name == "ridge" else number(values[index], 3) for name, values in there.items()]
        rows.append((run, *operators[index], *cells))
    return Table(("Blocks", *(["Operator"] if "operator" in table else []), *(HEADS[name] for name in there)), tuple(rows))
