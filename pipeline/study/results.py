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
from pipeline.study.compare import CONFIDENCE, Comparison, by_contract, smallest_wilcoxon, word
from pipeline.study.plan import Settings, Study, varied_keys
from pipeline.table import describe

UNLIKE = "The cells were NOT all measured alike; a number must not be compared with one of another table."
CLAIM = 0.05  # below this a test is usually called significant


def write_results(study: Study, outcomes: Sequence[Outcome], compared: Sequence[Comparison], root: Path) -> None:
    """Write both files, atomically."""
    folder = root / DATA / "studies"
    rows = []
    for outcome in outcomes:
        result = outcome.result or {}
        row = {"cell": outcome.cell.name, **{key: _text(value) for key, value in outcome.cell.varied.items()}}
        row |= {"seed": outcome.cell.seed, "contract": word(result)}
        row |= {measure: result.get(measure) for measure in study.plan.measures}
        row |= {key: _text(outcome.shown.get(key, "")) for key in study.plan.show}
        if "interval" in result:
            row |= {"low": result["interval"][0], "high": result["interval"][1]}
        rows.append(row | {"error": outcome.error})
    write_table(folder / f"{study.name}.csv", pd.DataFrame(rows))
    windows = {outcome.cell.name: list(outcome.result.get("windows", [])) for outcome in outcomes if outcome.result}
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
        if outcome.result is None or "contract" not in outcome.result:
            continue
        same = next((one for one in found if one["contract"] == outcome.result["contract"]), None)
        if same is None:
            found.append({"contract": outcome.result["contract"], "cells": [outcome.cell.name]})
        else:
            same["cells"].append(outcome.cell.name)
    return found


def table(study: Study, outcomes: Sequence[Outcome], compared: Sequence[Comparison]) -> str:
    """The comparison as plain text, with what the numbers rest on."""
    groups, found = by_contract(compared), {word(one): one for one in contracts(outcomes)}
    lines = [UNLIKE] if len(groups) > 1 else []
    for group in groups:
        lined = rows(study, group)
        widths = [max(map(len, column)) for column in zip(*lined, strict=True)]
        lines += ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in lined] + [""]
        stated = found.pop(next((one.contract for one in group if one.contract), ""), None)
        lines += [f"Contract: {describe(stated['contract'])}.", *[""] * (len(groups) > 1)] if stated else []
    lines += remarks(study, compared)
    lines += [f"Contract of {', '.join(one['cells'])}: {describe(one['contract'])}." for one in found.values()]
    return "\n".join([*lines, f"Written: {DATA}studies/{study.name}.csv, .json and .html"])


def rows(study: Study, compared: Sequence[Comparison]) -> list[list[str]]:
    """The table's cells as text, its head first. A column without any entry is left out."""
    keys, paired = varied_keys(study.plan), bool(study.plan.baseline)
    seeds = max((one.n for one in compared), default=0)
    head = [*(key.removesuffix(".method") for key in keys), *study.plan.measures, "sd" if seeds > 1 else "interval"]
    head += ["difference", f"{CONFIDENCE:.0%} interval", "worse in"] * paired
    head += ["t-test", "Wilcoxon", "effect"] * (paired and seeds > 1) + [*study.plan.show, "note"]
    lined = [head]
    for one in compared:
        row = _row(one, keys, study.plan.measures, seeds, paired)
        lined.append([*row, *(one.shown.get(key, "") for key in study.plan.show), one.note])
    used = [index for index in range(len(head)) if any(row[index] for row in lined[1:])]
    return [[row[index] for index in used] for row in lined]


def remarks(study: Study, compared: Sequence[Comparison]) -> list[str]:
    """How the columns are to be read."""
    if not study.plan.baseline:
        return []
    base = ", ".join(f"{key} = {_text(value)}" for key, value in study.plan.baseline.items())
    seeds = max((one.n for one in compared), default=0)
    if any(one.difference_low is not None for one in compared):
        said = [
            f"Difference: loss in nats per token less that of {base}, paired by window; the interval is a bootstrap over "
            "windows, which are not all of different articles; worse in: share of windows."
        ]
    else:
        said = [f"Difference: {study.plan.measures[0]} less that of {base}{', paired by seed' if seeds > 1 else ''}."]
    if seeds > 1:
        said.append(
            "Tests are paired over seeds, two-sided, corrected by Holm's rule; effect: mean difference over its deviation."
        )
        tested = sum(one.wilcoxon is not None for one in compared)
        least = smallest_wilcoxon(seeds) * tested
        if least > CLAIM:
            corrected = f", corrected for {tested} settings" if tested > 1 else ""
            few = f"{seeds} seeds cannot give less than p = {least:.2g} by Wilcoxon{corrected}"
            said.append(f"{few}: too few to claim anything by it.")
    return said


def label(varied: Settings) -> str:
    """What tells a cell from the others, in one line."""
    return " · ".join(_text(value) for value in varied.values())


def _row(one: Comparison, keys: Sequence[str], measures: Sequence[str], seeds: int, paired: bool) -> list[str]:
    row = [_text(one.varied.get(key, "")) for key in keys]
    row += [_number(one.values.get(measure), 2 if measure == "perplexity" else 4) for measure in measures]
    row.append(_number(one.deviation) if seeds > 1 else _between(one.low, one.high, 2))
    if paired:
        row += [_number(one.difference, 3, sign=True), _between(one.difference_low, one.difference_high, 3)]
        row.append("" if one.windows_worse is None else f"{one.windows_worse:.0%}")
        if seeds > 1:
            row += [_p(one.t_test), _p(one.wilcoxon), _number(one.effect, 2, sign=True)]
    return row


def _number(value: float | None, digits: int = 2, sign: bool = False) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:{'+' if sign else ''}.{digits}f}"


def _between(low: float | None, high: float | None, digits: int) -> str:
    return "" if low is None or high is None else f"{low:.{digits}f} to {high:.{digits}f}"


def _p(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
