"""The comparison that a run ends with, as plain text, from the files the report stage and the evaluations wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.artifacts import human_bytes, read_json
from pipeline.files import DATA

ORDER = ("dense", "masked", "removed", "compressed")
HEADER = ["variant", "perplexity", "interval", "tokens", "zeros", "parameters", "size"]


def comparison(root: Path = Path()) -> str:
    """One row per variant with its confidence interval; below it the protocol behind the numbers and the report's path.

    Raises ArtifactError if the run has not got that far.
    """
    metrics = read_json(root / DATA / "metrics.json")
    details = {name: read_json(root / DATA / "evaluation" / f"{name}.json") for name in metrics}
    order = sorted(metrics, key=ORDER.index) if set(metrics) <= set(ORDER) else list(metrics)
    lines = _columns([HEADER] + [_row(name, metrics[name]) for name in order])
    protocols = {name: _protocol(details[name]) for name in order}
    if len(set(protocols.values())) == 1:
        lines += ["", f"protocol   {protocols[order[0]]}"]
    else:
        lines += ["", "The variants were NOT measured alike:", *(f"{name}: {text}" for name, text in protocols.items())]
    return "\n".join([*lines, f"report     {root / DATA / 'report.html'}"])


def _row(name: str, row: dict[str, Any]) -> list[str]:
    numbers = [f"{row['perplexity']:.2f}", f"{row['low']:.2f} to {row['high']:.2f}", f"{row['tokens']:,}"]
    return [name, *numbers, f"{row['sparsity']:.1%}", f"{row['parameters']:,}", human_bytes(row["bytes"])]


def _protocol(detail: dict[str, Any]) -> str:
    return f"{describe(detail['contract'])}; interval {detail['confidence']:.0%}, bootstrap over windows"


def describe(contract: Mapping[str, Any]) -> str:
    """All that has to be equal for two perplexities to be comparable, as text."""
    return ", ".join(f"{key.replace('_', ' ')} {_short(value)}" for key, value in sorted(contract.items()))


def _short(value: Any) -> str:
    """A checksum by its first digits; the file has all of them."""
    return f"{value[:12]}…" if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) else str(value)


def _columns(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first, *others = widths
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows]
