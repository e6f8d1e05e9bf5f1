"""How well the operators that stand in for removed runs explain what those runs did."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.drawing.axes import fitting, linear, names
from pipeline.drawing.chart import Key, Panel
from pipeline.drawing.notation import blocks, number, percent, plain, spans, whole
from stages.report.columns import Columns
from stages.report.naming import method
from stages.report.results import Results
from stages.report.sections import Part, Table, block_panel, calibration

HEADS = {
    "ridge": "Ridge",
    "train_error": "Error, fitted",
    "heldout_error": "Error, held out",
    "condition": "Condition",
    "antisymmetric_share": "Antisymmetric",
    "norm": "Norm",
    "sinks": "Sinks",
    "sink_error": "Error on sinks",
    "rest_error": "Error on the rest",
}
MEANING = {
    "ridge": "Ridge: damping on the diagonal of the Gram matrix, relative to its mean; the larger, the smaller the operator",
    "condition": "Condition: the largest over the smallest eigenvalue of the damped Gram matrix; towards 10¹⁴ the fit becomes "
    "rounding noise, far below it is safe",
    "antisymmetric_share": "Antisymmetric: the share of the operator that turns the stream rather than stretches it (0.71 for a "
    "random matrix); no rescaling of channels, in whatever basis, has any",
    "norm": "Norm: the size of the operator's change M; 0 would leave the stream as it is",
    "sinks": "Sinks: tokens before or behind the gap whose norm is beyond ghost.sink_threshold times the median; "
    "their errors are on held-out windows, for the operator as it runs",
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
    if params["ghost"]["ridge_rule"] == "held_out":
        caption += " The ridge was chosen on the windows held out, so the errors there are a little too good."
    grown = results.growth.ordered("boundary")
    if len(grown):
        caption += (
            " Behind the gap the error is the distance to the dense stream, as a share of that stream's norm, on held-out "
            "windows, sinks left out."
        )
        if (results.masks.numbers("sparsity") > 0).any():
            caption += " The kept blocks are masked in both curves, so they part from the dense stream before any gap."
    panels = (_errors(table), *([_growth(results, grown)] if len(grown) else []))
    readings = (*_readings(table), *_spoilt_sinks(table, params["ghost"]["sinks"]), *_grown(grown), *_meanings(table))
    return Part("ghost", heading, caption, panels, readings, _table(table))


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


def _growth(results: Results, grown: Columns) -> str:
    """Distance to the dense stream behind each block, with the operators and without."""
    series = [
        ("no operator", "rust", "ring", _rest(grown, "removed")),
        ("with operators", "blue", "dot", _rest(grown, "restored")),
    ]
    y = fitting([value for *_, values in series for value in values], include=[0.0])
    panel = block_panel(results, "Distance to the dense stream behind it", y, [Key(name, t, m) for name, t, m, _ in series[::-1]])
    behind = [boundary - 1 for boundary in grown.whole("boundary")]
    for name, tone, mark, values in series:
        panel.line(behind, values, tone)
        tips = [f"behind block {at}: {name} {number(value, 3)}" for at, value in zip(behind, values, strict=True)]
        panel.points(behind, values, tone, mark, tips)
    return panel.svg("distance to the dense stream behind each block, with the operators and without")


def _rest(grown: Columns, name: str) -> list[float]:
    """The errors over tokens that are no sinks, where they were told apart."""
    return grown.numbers(f"{name}_rest" if f"{name}_rest" in grown else name).tolist()


def _grown(grown: Columns) -> list[str]:
    if not len(grown):
        return []
    ends = [number(_rest(grown, name)[-1], 3) for name in ("restored", "removed")]
    last = grown.whole("boundary")[-1] - 1
    text = f"Behind block {last}, the last one, the stream is off by {ends[0]} with the operators and {ends[1]} without"
    return [f"{text}, of its norm."]


def _spoilt_sinks(table: Columns, sinks: str) -> list[str]:
    """A warning where sinks come out worse than if nothing stood in their blocks' place."""
    errors = table.numbers("sink_error")
    bad = [f"{run} ({number(error, 3)})" for run, error in zip(_runs(table), errors, strict=True) if error > 1]
    if not bad:
        return []
    other = {"restore": "bypass", "bypass": "restore"}.get(sinks, "restore or bypass")
    return [
        f"On sinks the error is above 1 for blocks {', '.join(bad)}: with ghost.sinks: {sinks} they come out worse than without "
        f"an operator, whatever the rest gains; try {other}."
    ]


def _meanings(table: Columns) -> list[str]:
    shown = [text for name, text in MEANING.items() if np.isfinite(table.numbers(name)).any()]
    return [". ".join(shown) + "."] if shown else []


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
        cells = [_cell(name, float(values[index])) for name, values in there.items()]
        rows.append((run, *operators[index], *cells))
    heads = ("Blocks", *(["Operator"] if "operator" in table else []), *(HEADS[name] for name in there))
    return Table(heads, tuple(rows)).tall()


def _cell(name: str, value: float) -> str:
    if name == "sinks":
        return whole(value)
    return plain(value) if name == "ridge" else number(value, 3)
