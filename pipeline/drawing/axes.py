"""Axes of a chart: a range, a scale, and ticks a person can read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.drawing.notation import MINUS, number


@dataclass(frozen=True)
class Axis:
    """A range with ticks. `at` maps a value to its share of the axis, 0 at the low end."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def at(self, value: float) -> float:
        """Share of the axis's length, clipped to it."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        place = math.log(max(value, self.low)) if self.log else value
        return min(max((place - low) / (high - low), 0.0), 1.0)


def finite(values: Iterable[float]) -> list[float]:
    """Those that can be drawn."""
    return [float(value) for value in values if math.isfinite(value)]


def linear(values: Iterable[float], include: Sequence[float] = (), as_percent: bool = False, count: int = 5) -> Axis:
    """An axis over `values` and `include`, a little beyond both, with about `count` round ticks."""
    known = finite([*values, *include]) or [0.0, 1.0]
    low, high = min(known), max(known)
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        pad = abs(high) * 0.1 or 0.5
        low, high = low - pad, high + pad
    margin = (high - low) * 0.05
    low = low if low in include else low - margin
    high = high if high in include else high + margin
    step = _step((high - low) / count)
    first = math.ceil(low / step - 1e-9)
    ticks = [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]
    scale = 100 if as_percent else 1
    decimals = max(0, -math.floor(math.log10(step * scale) + 1e-9))
    return Axis(low, high, tuple((tick, _label(tick * scale, decimals) + "%" * as_percent) for tick in ticks))


def logarithmic(values: Iterable[float]) -> Axis:
    """A logarithmic axis over the positive ones of `values`; ticks at powers of ten, or at 1-2-5 if there are few."""
    known = [value for value in finite(values) if value > 0] or [1.0, 10.0]
    low, high = min(known) / 1.12, max(known) * 1.12
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    step = max(1, math.ceil(math.log10(high / low) / 6))
    ticks = [10.0**power for power in powers if power % step == 0 and low <= 10.0**power <= high]
    if len(ticks) < 3:
        ticks = [lead * 10.0**power for power in powers for lead in (1, 2, 5) if low <= lead * 10.0**power <= high]
    if len(ticks) < 2:
        return linear(known)
    return Axis(low, high, tuple((tick, number(tick, 1)) for tick in ticks), log=True)


def wide(values: Iterable[float], ratio: float = 8.0) -> bool:
    """Whether positive `values` span so much that a linear axis would hide most of them."""
    known = finite(values)
    return bool(known) and min(known) > 0 and max(known) / min(known) > ratio


def fitting(values: Iterable[float], include: Sequence[float] = ()) -> Axis:
    """A logarithmic axis where the values need one, else a linear one."""
    values = list(values)
    return logarithmic(values) if wide(values) else linear(values, include)


def indices(count: int) -> Axis:
    """An axis for `count` blocks or boundaries numbered from 0."""
    step = next((step for step in (1, 2, 5, 10, 20, 50, 100) if count / step <= 12), 200)
    return Axis(-0.5, count - 0.5, tuple((float(tick), str(tick)) for tick in range(0, count, step)))


def names(labels: Sequence[str]) -> Axis:
    """An axis with one place per label."""
    return Axis(-0.5, len(labels) - 0.5, tuple((float(place), label) for place, label in enumerate(labels)))


def _step(rough: float) -> float:
    """The round step nearest to `rough` on a logarithmic scale."""
    power = 10.0 ** math.floor(math.log10(rough))
    return power * min((1, 2, 5, 10), key=lambda lead: abs(math.log(lead * power / rough)))


def _label(value: float, decimals: int) -> str:
    if abs(value) >= 1e5:
        return number(value, 2)
    text = f"{value:,.{decimals}f}"
    return (text.lstrip("-") if float(text.replace(",", "")) == 0 else text).replace("-", MINUS)
