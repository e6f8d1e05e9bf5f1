"""What a study leaves behind: data/studies/NAME.csv (a row per cell and seed), NAME.json (the comparison), and its table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from pipeline.artifacts import write_json, write_table
from pipeline.files import DATA
from pipeline.study.cells import Outcome
from pipeline.study.compare import CONFIDENCE, Comparison, smallest_wilcoxon
from pipeline.study.plan import Study, varied_keys
from pipeline.table import describe

CLAIM = 0.05  # below this a test is usually called significant


def write_results(study: Study, outcomes: Sequence[Outcome], compared: Sequence[Comparison], root: Path) -> None:
    """Write both files, atomically."""
    folder = root / DATA / "studies"
    rows = []
    for outcome in outcomes:
        result = outcome.result or {}
        low, high = result.get("interval", (None, None))
        row = {"cell": outcome.cell.name, **{key: _text(value) for key, value in outcome.cell.varied.items()}}
        row |= {"seed": outcome.cell.seed, "perplexity": result.get("perplexity"), "low": low, "high": high}
        rows.append(row | {"sparsity": result.get("sparsity"), "error": outcome.error})
    write_table(folder / f"{study.name}.csv", pd.DataFrame(rows))
    windows = {outcome.cell.name: list(outcome.result["windows"]) for outcome in outcomes if outcome.result}
    write_json(
        folder / f"{study.name}.json",
        {
            "question": study.plan.question,
            "fixed": study.plan.fixed,
            "baseline": study.plan.baseline,
            "contracts": contracts(outcomes),
            "comparison": [asdict(one) for one in compared],
            "windows": windows,
        },
    )


def contracts(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """The distinct contracts the cells were measured under, with the cells of each."""
    found: list[dict[str, Any]] = []
    for outcome in outcomes:
        if outcome.result is None:
            continue
        same = next((one for one in found if one["contract"] == outcome.result["contract"]), None)
        if same is None:
            found.append({"contract": outcome.result["contract"], "cells": [outcome.cell.name]})
        else:
            same["cells"].append(outcome.cell.name)
    return found


def table(study: Study, outcomes: Sequence[Outcome], compared: Sequence[Comparison]) -> str:
    """The comparison as plain text, with what the numbers rest on."""
    keys = varied_keys(study.plan)
    seeds = max((one.n for one in compared), default=0)
    head = [*(key.removesuffix(".method") for key in keys), "perplexity", "sd" if seeds > 1 else "interval"]
    head += ["difference", f"{CONFIDENCE:.0%} interval", "worse in"] * bool(study.plan.baseline)
    head += ["t-test", "Wilcoxon", "effect"] * (seeds > 1 and bool(study.plan.baseline)) + ["note"]
    rows = [head, *(_row(one, keys, seeds, bool(study.plan.baseline)) for one in compared)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.append("")
    if study.plan.baseline:
        base = ", ".join(f"{key} = {_text(value)}" for key, value in study.plan.baseline.items())
        lines.append(f"difference  loss in nats per token less that of {base}, paired by window; bootstrap over windows")
        if seeds > 1 and smallest_wilcoxon(seeds) > CLAIM:
            lines.append(
                f"Wilcoxon    {seeds} seeds cannot give less than p = {smallest_wilcoxon(seeds):.2g}: too few to claim by it"
            )
    for one in contracts(outcomes):
        said = describe(one["contract"])
        lines.append(f"contract    {said}" + (f" (of {len(one['cells'])} cells)" if len(contracts(outcomes)) > 1 else ""))
    return "\n".join([*lines, f"written     {DATA}studies/{study.name}.csv, .json"])


def _row(one: Comparison, keys: Sequence[str], seeds: int, paired: bool) -> list[str]:
    row = [_text(one.varied.get(key, "")) for key in keys] + [_number(one.perplexity)]
    row.append(_number(one.deviation) if seeds > 1 else _between(one.low, one.high, 2))
    if paired:
        row += [_number(one.difference, 3, sign=True), _between(one.difference_low, one.difference_high, 3)]
        row.append("" if one.windows_worse is None else f"{one.windows_worse:.0%}")
        if seeds > 1:
            row += [_p(one.t_test), _p(one.wilcoxon), _number(one.effect, 2, sign=True)]
    return [*row, one.note]


def _number(value: float | None, digits: int = 2, sign: bool = False) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:{'+' if sign else ''}.{digits}f}"


def _between(low: float | None, high: float | None, digits: int) -> str:
    return "" if low is None or high is None else f"{low:.{digits}f} to {high:.{digits}f}"


def _p(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
