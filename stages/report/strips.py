"""Rows of cells, one per block: several ways to rank the blocks, to be compared at a glance."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

import numpy as np

from pipeline.drawing.axes import indices
from pipeline.drawing.chart import LETTER, WIDTH
from stages.report.columns import Floats
from stages.report.heatmap import shade

ROW = 22


def strips(title: str, rows: Mapping[str, Floats], chosen: str, ends: tuple[str, str], description: str) -> str:
    """An `<svg>` with one row of cells per entry of `rows`.

    Args:
        rows: label -> a number from 0 (dark) to 1 (light) for each block, NaN for none.
        chosen: the label to mark; empty for none.
        ends: what 0 and 1 stand for.
        description: read out where the picture cannot be seen.
    """
    blocks = max(len(values) for values in rows.values())
    left, top = 22 + LETTER * max(map(len, rows)), 52
    cell = (WIDTH - 12 - left) / blocks
    body = [f'<text class="title" x="0" y="13">{escape(title)}</text>', *_scale(ends)]
    for place, (label, values) in enumerate(rows.items()):
        y = top + place * ROW
        mark = "▸ " if label == chosen else ""
        body.append(f'<text class="name" x="{left - 7:.1f}" y="{y + 14}" text-anchor="end">{mark}{escape(label)}</text>')
        for block, value in enumerate(values):
            if np.isfinite(value):
                tip = f"{label}, block {block}: {value:.2f}"
                body.append(
                    f'<rect fill="{shade(float(value))}" shape-rendering="crispEdges" x="{left + block * cell:.2f}" y="{y}" '
                    f'width="{cell:.2f}" height="{ROW - 4}"><title>{escape(tip)}</title></rect>'
                )
    bottom = top + len(rows) * ROW
    for tick, label in indices(blocks).ticks:
        body.append(
            f'<text class="tick" x="{left + (tick + 0.5) * cell:.1f}" y="{bottom + 12}" text-anchor="middle">{label}</text>'
        )
    body.append(f'<text class="tick" x="{(left + WIDTH - 12) / 2:.1f}" y="{bottom + 29}" text-anchor="middle">block</text>')
    return (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 36:g}" role="img" '
        f'aria-label="{escape(description)}">' + "".join(body) + "</svg>"
    )


def _scale(ends: tuple[str, str]) -> list[str]:
    """The two ends of the scale and the shades between them."""
    start, step = 8 + LETTER * len(ends[0]), 7
    shades = [f'<rect fill="{shade(i / 11)}" x="{start + i * step:.1f}" y="25" width="{step}" height="11"/>' for i in range(12)]
    words = [(0.0, ends[0]), (start + 12 * step + 8, ends[1])]
    return [*shades, *(f'<text class="tick" x="{x:.1f}" y="35">{escape(word)}</text>' for x, word in words)]
