"""A map of a value per block and matrix: one cell each, coloured from dark (low) to light (high)."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from pipeline.drawing.chart import LETTER, WIDTH
from pipeline.drawing.notation import fixed
from stages.report.heatmap import SHADES, shade

ROW, TOP = 22.0, 30.0


def grid(title: str, names: Sequence[str], values: NDArray[np.float64], description: str) -> str:
    """An `<svg>` with a row per matrix and a column per block.

    Args:
        names: of the rows.
        values: [matrix, block]; NaN where nothing is known, which leaves a gap.
        description: read out where the picture cannot be seen.
    """
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    left = 8 + LETTER * max(map(len, names), default=0)
    cell = (WIDTH - left - 4) / max(values.shape[1], 1)
    body = [f'<text class="title" x="0" y="13">{escape(title)}</text>']
    for row, name in enumerate(names):
        y = TOP + row * ROW
        body.append(f'<text class="tick" x="{left - 6:.1f}" y="{y + 15:.1f}" text-anchor="end">{escape(name)}</text>')
        for block, value in enumerate(values[row].tolist()):
            if np.isfinite(value):
                share = (value - low) / (high - low) if high > low else 0.5
                colour = shade((min(int(share * SHADES), SHADES - 1) + 0.5) / SHADES)
                place = f'x="{left + block * cell:.2f}" y="{y:.1f}" width="{cell:.2f}" height="{ROW - 2:g}"'
                tip = f"block {block}, {escape(name)}: {fixed(value, 4)}"
                body.append(f'<rect fill="{colour}" shape-rendering="crispEdges" {place}><title>{tip}</title></rect>')
    bottom = TOP + len(names) * ROW
    step = next((step for step in (1, 2, 5, 10, 20, 50, 100) if values.shape[1] / step <= 14), 200)
    for block in range(0, values.shape[1], step):
        x = left + (block + 0.5) * cell
        body.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 13:.1f}" text-anchor="middle">{block}</text>')
    body += _scale(low, high, left, bottom + 24)
    return (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 56:g}" role="img" '
        f'aria-label="{escape(description)}">' + "".join(body) + "</svg>"
    )


def _scale(low: float, high: float, x: float, y: float) -> list[str]:
    part = 160 / SHADES
    size = f'y="{y:.1f}" width="{part + 0.3:.2f}" height="10"'
    body = [f'<rect x="{x + index * part:.2f}" {size} fill="{shade((index + 0.5) / SHADES)}"/>' for index in range(SHADES)]
    body.append(f'<text class="tick" x="{x:.1f}" y="{y + 24:.1f}">{fixed(low, 3)}</text>')
    body.append(f'<text class="tick" x="{x + 160:.1f}" y="{y + 24:.1f}" text-anchor="end">{fixed(high, 3)}</text>')
    return body
