"""How much of each block's work a straight line explains."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.drawing.axes import Axis, linear, logarithmic
from pipeline.drawing.chart import Key
from pipeline.drawing.notation import counted, number, percent, plain
from stages.report.columns import Columns
from stages.report.results import Results
from stages.report.sections import Part, block_panel, calibration

MOST_PANELS = 8


def peeling(results: Results, params: dict[str, Any]) -> Part:
    """A panel per reach: held-out error of the linear reference and the block's own error, per block."""
    heading, table = "How much of each block a straight line explains", results.peeling.ordered("block")
    if not len(table):
        asked = plain(params["peeling"]["reach"])
        nothing = f"No reference was fitted: every target (peeling.reach: {asked}) lies behind the last block."
        return Part("peeling", heading, "", (), (nothing,))
    reach = table.numbers("target") - table.numbers("block")
    reaches = sorted({int(one) for one in reach})
    shown = {one: table.pick(reach == one) for one in reaches[:MOST_PANELS]}
    y = _axis(table)
    readings = [_reading(one, rows) for one, rows in shown.items()] + _failures(table)
    readings += [f"The first {len(shown)} of {len(reaches)} reaches are shown."] if len(reaches) > len(shown) else []
    caption = (
        "For each block and each target boundary, the best linear map from the block's input, fitted in closed form on "
        f"{calibration(params)}, {percent(params['peeling']['held_out'])} of them kept out of the fit. Error: distance to "
        "the target as a share of the step from the input to it. The block's own error is that of its output as a guess at the "
        "same target; at its own output it is 0 by definition. A reference that comes closer than the block shows that better "
        "steps toward that boundary exist on these windows; one that does not proves nothing."
    )
    panels = tuple(_panel(results, one, rows, y) for one, rows in shown.items())
    return Part("peeling", heading, caption, panels, tuple(readings))


def _axis(table: Columns) -> Axis:
    """From 0, unless a fit failed so badly that all others would lie on the floor."""
    values = np.concatenate([table.numbers("heldout_error"), table.numbers("own_error")])
    return logarithmic(values) if (values[np.isfinite(values)] > 3).any() else linear(values, include=[0.0])


def _panel(results: Results, reach: int, rows: Columns, y: Axis) -> str:
    at, held, own = rows.whole("block"), rows.numbers("heldout_error"), rows.numbers("own_error")
    series = [(held, "linear, held out", "blue", "dot")]
    if (own > 0).any():
        series.insert(0, (own, "block's own", "rust", "ring"))
    target = "its own output" if reach == 1 else f"{reach} boundaries ahead"
    panel = block_panel(results, f"Target: {target}", y, [Key(name, tone, mark) for _, name, tone, mark in reversed(series)])
    if y.low < 1 < y.high:
        panel.level(1.0)
    for values, name, tone, mark in series:
        panel.line(at, values.tolist(), tone)
        tips = [f"block {block}: {name} {number(value, 3)}" for block, value in zip(at, values, strict=True)]
        panel.points(at, values.tolist(), tone, mark, tips)
    return panel.svg(f"held-out error per block, target: {target}")


def _reading(reach: int, rows: Columns) -> str:
    at, held, own = rows.whole("block"), rows.numbers("heldout_error"), rows.numbers("own_error")
    where = "At its own output" if reach == 1 else f"{reach} boundaries ahead"
    if not np.isfinite(held).any():
        return f"{where}: no held-out error was recorded."
    low, high, median = int(np.nanargmin(held)), int(np.nanargmax(held)), float(np.nanmedian(held))
    text = f"{where}: the linear reference leaves {number(median, 3)} of the step at the median block"
    if low != high:
        text += f", least in block {at[low]} ({number(held[low], 3)}), most in block {at[high]} ({number(held[high], 3)})"
    known = np.isfinite(own) & np.isfinite(held)
    if reach > 1 and known.any():
        closer = int((held[known] < own[known]).sum())
        text += f"; it ends closer to the target than the block's own output in {closer} of {counted(int(known.sum()), 'block')}"
    return text + "."


def _failures(table: Columns) -> list[str]:
    held = table.numbers("heldout_error")
    bad = int((held >= 1).sum())
    if not bad:
        return []
    worst = int(np.nanargmax(held))
    where = f"block {table.whole('block')[worst]} to boundary {table.whole('target')[worst]}"
    text = f"{bad} of {counted(len(table), 'reference')} {'has' if bad == 1 else 'have'} a held-out error of 1 or more"
    rest = f"no better than predicting no step at all (largest {number(held[worst], 3)}, {where})"
    return [f"{text}, {rest}: too few tokens for the fit, or nothing linear to find."]
