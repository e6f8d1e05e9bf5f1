"""Small charts as SVG: a panel with axes and marks, coloured through the CSS variables of `pipeline.drawing.style`.

The same markup is set into the page, where it follows the page's light or dark theme, and written as a file of its own.
Text stays text. A series is told apart by shape as well as by colour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from pipeline.drawing.axes import Axis
from pipeline.drawing.style import THEME

WIDTH = 440
LETTER = 6.7  # mean width of a letter at 12 px


@dataclass(frozen=True)
class Key:
    """An entry of the legend: `mark` is one of dot, ring, square, diamond, line, dash, band, tick."""

    label: str
    tone: str
    mark: str = "dot"


class Panel:
    """One chart. Values outside what can be drawn (NaN, infinity) leave a gap."""

    def __init__(
        self,
        title: str,
        x: Axis,
        y: Axis,
        *,
        x_label: str = "",
        height: int = 170,
        keys: Sequence[Key] = (),
        rows: bool = False,
        notes: Sequence[str] = (),
    ):
        """
        Args:
            x, y: the axes. With `rows`, y runs downward and its ticks name rows.
            height: of the plotting area, in pixels at the native width of 440.
            notes: with `rows`, a text at the right end of each row.
        """
        self.title, self.x, self.y, self.x_label, self.rows, self.notes = title, x, y, x_label, rows, notes
        self._legend, legend_rows = _legend(keys)
        self.top = 24 + 18 * legend_rows + 8
        self.left = max(30, 12 + LETTER * max((len(label) for _, label in y.ticks), default=0))
        self.right = WIDTH - (12 + LETTER * max((len(note) for note in notes), default=0))
        self.bottom = self.top + height
        self.height = self.bottom + (40 if x_label else 25)
        self._back: list[str] = []
        self._marks: list[str] = []

    def px(self, value: float) -> float:
        """Horizontal place of a value, in pixels."""
        return round(self.left + self.x.at(value) * (self.right - self.left), 1)

    def py(self, value: float) -> float:
        """Vertical place of a value, in pixels."""
        share = self.y.at(value)
        return round(self.top + (share if self.rows else 1 - share) * (self.bottom - self.top), 1)

    def bands(self, places: Sequence[tuple[int, int]], tip: str) -> None:
        """Shade `[start, stop)` ranges of an index axis, behind everything else."""
        for start, stop in places:
            left, right = self.px(start - 0.5), self.px(stop - 0.5)
            self._back.append(
                f'<rect class="band" x="{left}" y="{self.top}" width="{max(right - left, 1):.1f}" '
                f'height="{self.bottom - self.top}"><title>{escape(tip)}</title></rect>'
            )

    def level(self, value: float, vertical: bool = False) -> None:
        """A dashed reference line across the panel."""
        if vertical:
            self._back.append(_line("level", self.px(value), self.top, self.px(value), self.bottom))
        else:
            self._back.append(_line("level", self.left, self.py(value), self.right, self.py(value)))

    def line(self, xs: Sequence[float], ys: Sequence[float], tone: str, dashed: bool = False) -> None:
        """A line through the points; broken where one is missing."""
        path, pen = [], "M"
        for x, y in zip(xs, ys, strict=True):
            if not self._drawable(x, y):
                pen = "M"
                continue
            path.append(f"{pen}{self.px(x)} {self.py(y)}")
            pen = "L"
        if path:
            self._marks.append(f'<path class="line {tone}{" dashed" if dashed else ""}" d="{"".join(path)}"/>')

    def points(self, xs: Sequence[float], ys: Sequence[float], tone: str, mark: str, tips: Sequence[str]) -> None:
        """A mark per point, each with a text that shows when pointed at."""
        size = 1.0 if len(xs) <= 48 else 0.7
        for x, y, tip in zip(xs, ys, tips, strict=True):
            if self._drawable(x, y):
                self._marks.append(_mark(mark, tone, self.px(x), self.py(y), tip, size))

    def bars(self, xs: Sequence[float], ys: Sequence[float], tone: str, tips: Sequence[str]) -> None:
        """Bars from the foot of the panel; for axes that start at zero."""
        width = max((self.px(1) - self.px(0)) * 0.72, 1.0) if self.x.high - self.x.low > 1 else 40.0
        for x, y, tip in zip(xs, ys, tips, strict=True):
            if self._drawable(x, y):
                top = self.py(y)
                self._marks.append(
                    f'<rect class="fill {tone}" x="{self.px(x) - width / 2:.1f}" y="{top}" width="{width:.1f}" '
                    f'height="{self.bottom - top:.1f}"><title>{escape(tip)}</title></rect>'
                )

    def whiskers(
        self, at: Sequence[float], lows: Sequence[float], highs: Sequence[float], tone: str, strong: bool = False
    ) -> None:
        """Intervals: along y at each x, or along x at each row."""
        kind = f"whisker {tone}{' strong' if strong else ''}"
        for place, low, high in zip(at, lows, highs, strict=True):
            if not all(map(math.isfinite, (low, high))):
                continue
            if self.rows:
                self._marks.append(_line(kind, self.px(low), self.py(place), self.px(high), self.py(place)))
            else:
                self._marks.append(_line(kind, self.px(place), self.py(low), self.px(place), self.py(high)))

    def ticks(self, row: float, xs: Sequence[float], tone: str) -> None:
        """A short upright stroke per value along a row: all of a distribution at once."""
        y = self.py(row)
        path = "".join(f"M{self.px(x)} {y - 7:.1f}v14" for x in xs if math.isfinite(x))
        if path:
            self._marks.append(f'<path class="strokes {tone}" d="{path}"/>')

    def svg(self, description: str) -> str:
        """The panel as an `<svg>` element; `description` is read out where it cannot be seen."""
        body = [f'<text class="title" x="0" y="13">{escape(self.title)}</text>', *self._legend, *self._back]
        body += self._frame() + self._marks
        return (
            f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height:g}" role="img" '
            f'aria-label="{escape(description)}">' + "".join(body) + "</svg>"
        )

    def _drawable(self, x: float, y: float) -> bool:
        return math.isfinite(x) and math.isfinite(y) and not (self.y.log and y <= 0) and not (self.x.log and x <= 0)

    def _frame(self) -> list[str]:
        parts = []
        for value, label in self.y.ticks:
            y = self.py(value)
            if not self.rows:
                parts.append(_line("grid", self.left, y, self.right, y))
            parts.append(_text("name" if self.rows else "tick", self.left - 7, y + 4, label, "end"))
        for value, label in self.x.ticks:
            x = self.px(value)
            if self.rows:
                parts.append(_line("grid", x, self.top, x, self.bottom))
            parts.append(_text("tick", x, self.bottom + 16, label, "middle"))
        for place, note in enumerate(self.notes):
            parts.append(_text("name", WIDTH, self.py(place) + 4, note, "end"))
        parts.append(_line("axis", self.left, self.bottom, self.right, self.bottom))
        if self.x_label:
            parts.append(_text("tick", (self.left + self.right) / 2, self.bottom + 33, self.x_label, "middle"))
        return parts


def standalone(panels: Sequence[str]) -> str:
    """`<svg>` elements side by side, two to a row, as one SVG file with its own light theme."""
    sizes = [tuple(map(float, panel.split('viewBox="0 0 ', 1)[1].split('"', 1)[0].split())) for panel in panels]
    columns, gap = min(2, len(panels)), 28
    parts, y = [], 0.0
    for start in range(0, len(panels), columns):
        row = list(zip(panels, sizes, strict=True))[start : start + columns]
        for column, (panel, (width, height)) in enumerate(row):
            place = f'<svg x="{column * (WIDTH + gap)}" y="{y:g}" width="{width:g}" height="{height:g}"'
            parts.append(panel.replace("<svg", place, 1))
        y += max(height for _, (_, height) in row) + gap
    width, height = columns * (WIDTH + gap) - gap, y - gap
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 32}" height="{height + 32:g}" '
        f'viewBox="-16 -16 {width + 32} {height + 32:g}"><style>{THEME}</style>'
        f'<rect x="-16" y="-16" width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _legend(keys: Sequence[Key]) -> tuple[list[str], int]:
    parts, x, row = [], 0.0, 0
    for key in keys:
        width = 26 + LETTER * len(key.label)
        if x and x + width > WIDTH:
            x, row = 0.0, row + 1
        y = 31 + 18 * row
        parts.append(_mark(key.mark, key.tone, x + 7, y, "") + _text("tick", x + 18, y + 4, key.label, "start"))
        x += width + 8
    return parts, (row + 1) if keys else 0


def _mark(mark: str, tone: str, x: float, y: float, tip: str, size: float = 1.0) -> str:
    title = f"<title>{escape(tip)}</title>" if tip else ""
    half, tall = 3 * size, 4.6 * size
    corners = f"l{tall:g} {tall:g}-{tall:g} {tall:g}-{tall:g}-{tall:g}z"
    place = f'x="{x - half:.1f}" y="{y - half:.1f}" width="{2 * half:g}" height="{2 * half:g}"'
    shapes = {
        "dot": f'<circle class="fill {tone}" cx="{x:.1f}" cy="{y:.1f}" r="{3.4 * size:.2g}">{title}</circle>',
        "ring": f'<circle class="ring {tone}" cx="{x:.1f}" cy="{y:.1f}" r="{3.2 * size:.2g}">{title}</circle>',
        "square": f'<rect class="fill {tone}" {place}>{title}</rect>',
        "diamond": f'<path class="fill {tone}" d="M{x:.1f} {y - tall:.1f}{corners}">{title}</path>',
        "line": f'<path class="line {tone}" d="M{x - 7:.1f} {y:.1f}h14"/>',
        "dash": f'<path class="level" d="M{x - 7:.1f} {y:.1f}h14"/>',
        "band": f'<rect class="band" x="{x - 6:.1f}" y="{y - 6:.1f}" width="12" height="12"/>',
        "tick": f'<path class="strokes {tone}" d="M{x:.1f} {y - 6:.1f}v12"/>',
    }
    return shapes[mark]


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="{kind}" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'


def _text(kind: str, x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
