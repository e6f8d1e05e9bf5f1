"""The map of all boundary pairs: one cell per pair (i < j), coloured by its value, with chosen cells outlined."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from pipeline.drawing.chart import WIDTH
from pipeline.drawing.notation import fixed

SHADES = 16
# From dark to light in lightness as well as in hue, so that it reads in grey and for every kind of colour vision.
_STOPS = ((0, 32, 81), (60, 77, 110), (127, 124, 117), (187, 175, 113), (253, 234, 69))


def heatmap(title: str, values: NDArray[np.float64], marked: Sequence[tuple[int, int]], description: str) -> str:
    """An `<svg>` of the upper triangle of `values`.

    Args:
        values: [boundary, boundary]; NaN where nothing is known. Only i < j is drawn.
        marked: cells (i, j) to outline.
        description: read out where the picture cannot be seen.
    """
    count = len(values)
    left, top = 34, 42
    side = WIDTH - left - 4
    cell = side / count
    low, clipped, high = _range(values)
    body = [f'<text class="title" x="0" y="13">{escape(title)}</text>']
    body += _cells(values, low, high, left, top, cell)
    for i, j in marked:
        place = f'x="{left + j * cell:.2f}" y="{top + i * cell:.2f}" width="{cell:.2f}" height="{cell:.2f}"'
        tip = f"boundaries {i} and {j}: {fixed(float(values[i, j]), 4)}"
        body.append(f'<rect class="halo" {place}/><rect class="chosen" {place}><title>{tip}</title></rect>')
    body += _labels(count, left, top, cell)
    body += _scale(low, high, clipped, bool(marked), left + 8, top + side * 0.62, side * 0.34)
    return (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + side + 10:g}" role="img" '
        f'aria-label="{escape(description)}">' + "".join(body) + "</svg>"
    )


def shade(share: float) -> str:
    """The colour at `share` (0 to 1) of the scale, as `#rrggbb`."""
    place = min(max(share, 0.0), 1.0) * (len(_STOPS) - 1)
    index = min(int(place), len(_STOPS) - 2)
    mixed = [round(a + (b - a) * (place - index)) for a, b in zip(_STOPS[index], _STOPS[index + 1], strict=True)]
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _range(values: NDArray[np.float64]) -> tuple[float, bool, float]:
    """Lowest and highest shade; a few values far below the rest share the darkest one, and the scale says so."""
    known = values[np.triu_indices(len(values), 1)]
    known = known[np.isfinite(known)]
    if not len(known):
        return 0.0, False, 1.0
    low, high = float(known.min()), float(known.max())
    bulk = float(np.quantile(known, 0.05))
    clipped = high > low and (bulk - low) > 0.25 * (high - low)
    low = bulk if clipped else low
    return low, clipped, high


def _cells(values: NDArray[np.float64], low: float, high: float, left: float, top: float, cell: float) -> list[str]:
    """One path per shade: small, however many pairs there are."""
    paths: dict[int, list[str]] = {}
    for i, j in zip(*np.triu_indices(len(values), 1), strict=True):
        if np.isfinite(values[i, j]):
            share = min(max((values[i, j] - low) / (high - low), 0.0), 1.0) if high > low else 0.5
            at = f"M{left + j * cell:.2f} {top + i * cell:.2f}"
            paths.setdefault(min(int(share * SHADES), SHADES - 1), []).append(f"{at}h{cell:.2f}v{cell:.2f}h-{cell:.2f}z")
    return [
        f'<path fill="{shade((index + 0.5) / SHADES)}" shape-rendering="crispEdges" d="{"".join(paths[index])}"/>'
        for index in sorted(paths)
    ]


def _labels(count: int, left: float, top: float, cell: float) -> list[str]:
    step = next((step for step in (1, 2, 5, 10, 20, 50, 100) if count / step <= 14), 200)
    parts = []
    for index in range(0, count, step):
        centre = (index + 0.5) * cell
        parts.append(f'<text class="tick" x="{left + centre:.1f}" y="{top - 6:.1f}" text-anchor="middle">{index}</text>')
        parts.append(f'<text class="tick" x="{left - 6:.1f}" y="{top + centre + 4:.1f}" text-anchor="end">{index}</text>')
    return parts


def _scale(low: float, high: float, clipped: bool, marked: bool, x: float, y: float, width: float) -> list[str]:
    part = width / SHADES
    size = f'y="{y:.1f}" width="{part + 0.3:.2f}" height="10"'
    body = [f'<rect x="{x + index * part:.2f}" {size} fill="{shade((index + 0.5) / SHADES)}"/>' for index in range(SHADES)]
    text = ("≤ " if clipped else "") + fixed(low, 3)
    body.append(f'<text class="tick" x="{x:.1f}" y="{y + 24:.1f}">{text}</text>')
    body.append(f'<text class="tick" x="{x + width:.1f}" y="{y + 24:.1f}" text-anchor="end">{fixed(high, 3)}</text>')
    if marked:
        body.append(f'<rect class="chosen" x="{x:.1f}" y="{y + 38:.1f}" width="11" height="11"/>')
        body.append(f'<text class="tick" x="{x + 18:.1f}" y="{y + 47.5:.1f}">input and output of a removed run</text>')
    return body
