"""Numbers and names as a reader sees them. Pure functions to strings; a missing number is an en dash, never `nan`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

MISSING = "–"
MINUS = "\u2212"
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float | None, digits: int = 4) -> str:
    """`digits` significant digits: 24.10, 0.01234, 27,520, 1.23×10⁹."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    power = math.floor(math.log10(float(f"{abs(value):.{digits - 1}e}")))
    if power >= 7 or power < -4:
        text = f"{value / 10.0**power:.{max(digits - 2, 0)}f}×10{str(power).translate(_RAISED)}"
    else:
        text = f"{value:,.{max(digits - 1 - power, 0)}f}"
    return text.replace("-", MINUS)


def fixed(value: float | None, decimals: int = 3, sign: bool = False) -> str:
    """`decimals` places, with a plus sign if asked; scientific where that would be a wall of digits."""
    if value is None or not math.isfinite(value):
        return MISSING
    if abs(value) >= 1e6:
        return ("+" if sign and value > 0 else "") + number(value)
    text = f"{value:+,.{decimals}f}" if sign else f"{value:,.{decimals}f}"
    if float(text.replace(",", "")) == 0:  # no "-0.000"
        text = text.lstrip("+-")
    return text.replace("-", MINUS)


def between(low: float | None, high: float | None, decimals: int | None = None) -> str:
    """`20.99 to 28.14`; with `decimals`, a range of differences: `+0.171 to +0.242`."""
    ends = [number(end) if decimals is None else fixed(end, decimals, sign=True) for end in (low, high)]
    return f"{ends[0]} to {ends[1]}"


def percent(share: float | None, decimals: int = 1) -> str:
    """0.5 -> `50.0%`."""
    return MISSING if share is None or not math.isfinite(share) else fixed(share * 100, decimals) + "%"


def whole(value: float | None) -> str:
    """134515008 -> `134,515,008`."""
    return MISSING if value is None or not math.isfinite(value) else f"{int(value):,}"


def plain(value: Any) -> str:
    """A value of a contract or of params.yaml, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:g}" if math.isfinite(value) else MISSING
    if isinstance(value, str):
        return repr(value) if value != value.strip() or not value else value
    if isinstance(value, Sequence):
        return "[" + ", ".join(plain(item) for item in value) + "]"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {plain(inner)}" for key, inner in value.items())
    return str(value)


def counted(count: int, noun: str, many: str = "") -> str:
    """`1 block`, `3 blocks`."""
    return f"{count:,} {noun if count == 1 else many or noun + 's'}"


def runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """[3, 12, 13, 14] -> [(3, 4), (12, 15)]: maximal runs `[start, stop)` of adjacent indices."""
    found: list[tuple[int, int]] = []
    for index in sorted(set(indices)):
        if found and found[-1][1] == index:
            found[-1] = (found[-1][0], index + 1)
        else:
            found.append((index, index + 1))
    return found


def spans(indices: Sequence[int]) -> str:
    """[3, 12, 13, 14] -> `3, 12–14`."""
    return ", ".join(str(start) if stop == start + 1 else f"{start}–{stop - 1}" for start, stop in runs(indices))


def blocks(indices: Sequence[int]) -> str:
    """[12, 13] -> `blocks 12–13`; [3] -> `block 3`."""
    return f"block{'' if len(set(indices)) == 1 else 's'} {spans(indices)}"


def listing(parts: Sequence[str]) -> str:
    """`a, b and c`."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1] if parts else ""


def sentence(text: str) -> str:
    """`text` with a capital letter and a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
