"""The comparison that a run ends with, as plain text, from the files the report stage and the evaluations wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.artifacts import human_bytes, read_json, read_table
from pipeline.files import DATA

ORDER = ("dense", "masked", "removed", "compressed")
HEADER = ["variant", "perplexity", "interval", "tokens", "zeros", "parameters", "size"]


def comparison(root: Path = Path()) -> str:
    """One row per variant with its confidence interval; below it the protocol behind the numbers and the report's path.

    Variants measured under unlike protocols stand in tables of their own.

    Raises ArtifactError if the run has not got that far.
    """
    metrics = read_json(root / DATA / "metrics.json")
    details = {name: read_json(root / DATA / "evaluation" / f"{name}.json") for name in metrics}
    order = sorted(metrics, key=ORDER.index) if set(metrics) <= set(ORDER) else list(metrics)
    alike: dict[str, list[str]] = {}
    for name in order:
        alike.setdefault(_protocol(details[name]), []).append(name)
    warning = "The variants were NOT measured alike; a number must not be compared with one of another table."
    lines = [warning, ""] if len(alike) > 1 else []
    for protocol, names in alike.items():
        lines += [*_columns([HEADER] + [_row(name, metrics[name]) for name in names]), "", f"protocol   {protocol}"]
        lines += [""] * (len(alike) > 1)
    lines += _on_tasks(root, order)
    return "\n".join([*lines, f"report     {root / DATA / 'report.html'}"])


def _on_tasks(root: Path, variants: Sequence[str]) -> list[str]:
    """Accuracy on tasks, a row per task, measure and contract, and what the numbers rest on; nothing where none was measured."""
    path = root / DATA / "plots" / "zeroshot.csv"
    if not path.exists():
        return []
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    for one in read_table(path, ("task", "measure", "variant", "accuracy", "error", "p", "contract")).to_dict("records"):
        rows.setdefault((one["task"], one["measure"], one["contract"]), {})[one["variant"]] = one
    if not rows:
        return []
    cells = [["task", "measure", "examples", *variants]]
    for (task, measure, _), found in rows.items():
        count = f"{next(iter(found.values()))['examples']:,}"
        cells.append([task, measure, count, *(_share(found.get(name)) for name in variants)])
    lines = ["", *_columns(cells + _means(rows, variants)), "", "p          exact McNemar test against dense, example by example"]
    tasks = read_json(root / DATA / "zeroshot" / "dense.json")["tasks"]
    terms = [one["contract"] for one in tasks.values()]
    shared = {key: value for key, value in terms[0].items() if all(one.get(key) == value for one in terms)} if terms[1:] else {}
    lines += [f"contract   {describe(shared)}"] if shared else []
    own = [{key: value for key, value in one.items() if key not in shared and key != "task"} for one in terms]
    return lines + [f"           {name}: {describe(one)}" for name, one in zip(tasks, own, strict=True)]


def _share(one: Mapping[str, Any] | None) -> str:
    if one is None:
        return ""
    text = f"{one['accuracy']:.1%} ± {100 * one['error']:.1f}"
    return text if one["p"] != one["p"] else f"{text} (p {one['p']:.2g})"


def _means(rows: Mapping[tuple[str, str, str], Mapping[str, Any]], variants: Sequence[str]) -> list[list[str]]:
    """Mean accuracy over the tasks, for variants measured on all of them, each under one contract."""
    tasks = [found for (_, measure, _), found in rows.items() if measure == "accuracy"]
    names = [task for task, measure, _ in rows if measure == "accuracy"]
    if len(tasks) < 2 or len(set(names)) < len(names):
        return []
    means = [
        f"{sum(found[name]['accuracy'] for found in tasks) / len(tasks):.1%}" if all(name in found for found in tasks) else ""
        for name in variants
    ]
    return [[f"mean of {len(tasks)}", "accuracy", "", *means]]


def _row(name: str, row: dict[str, Any]) -> list[str]:
    numbers = [f"{row['perplexity']:.2f}", f"{row['low']:.2f} to {row['high']:.2f}", f"{row['tokens']:,}"]
    return [name, *numbers, f"{row['sparsity']:.1%}", f"{row['parameters']:,}", human_bytes(row["bytes"])]


def _protocol(detail: dict[str, Any]) -> str:
    return f"{describe(detail['contract'])}; interval {detail['confidence']:.0%}, bootstrap over windows"


def describe(contract: Mapping[str, Any]) -> str:
    """All that has to be equal for two numbers to be comparable, as text."""
    return ", ".join(f"{key if '.' in key else key.replace('_', ' ')} {_short(value)}" for key, value in sorted(contract.items()))


def _short(value: Any) -> str:
    """A checksum by its first digits; the file has all of them."""
    return f"{value[:12]}…" if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) else str(value)


def _columns(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first, *others = widths
    return ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows]
