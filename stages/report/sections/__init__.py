"""The parts of the page: each a heading, how it was measured, pictures, and sentences computed from the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.drawing.axes import Axis, indices
from pipeline.drawing.chart import Key, Panel
from pipeline.drawing.notation import blocks
from stages.report.results import Results


@dataclass(frozen=True)
class Table:
    """A table of ready text: column heads and rows."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def tall(self) -> Table:
        """The same with its longer side down, so that it fits a narrow page."""
        if len(self.rows) >= len(self.heads):
            return self
        lines = tuple(zip(self.heads, *self.rows, strict=True))
        return Table(lines[0], lines[1:])


@dataclass(frozen=True)
class Part:
    """One part of the page. `name` is also the name of its picture file."""

    name: str
    heading: str
    caption: str
    panels: tuple[str, ...]
    readings: tuple[str, ...]
    table: Table | None = None


def block_panel(results: Results, title: str, y: Axis, keys: Sequence[Key] = (), height: int = 170) -> Panel:
    """A panel with the blocks along x and the removed ones shaded."""
    shaded = [Key("removed", "", "band")] if results.removed else []
    panel = Panel(with_scale(title, y), indices(results.blocks), y, x_label="block", height=height, keys=[*keys, *shaded])
    panel.bands(results.gaps, f"removed: {blocks(results.removed)}" if results.removed else "")
    return panel


def with_scale(title: str, axis: Axis) -> str:
    """The title, saying so where the axis is logarithmic."""
    return f"{title}, logarithmic scale" if axis.log else title


def calibration(params: dict[str, Any]) -> str:
    """The text everything but perplexity was measured on, in words."""
    tokens = params["tokens"]
    return f"{tokens['calibration_windows']} calibration windows of {tokens['length']} tokens"
