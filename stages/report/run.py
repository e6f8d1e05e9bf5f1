"""report: read every table, compare the variants, draw, and write the page, its pictures, plot data and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.artifacts import write_json, write_table, write_text
from pipeline.console import say
from pipeline.drawing.chart import standalone
from pipeline.files import Files
from stages.report import Params
from stages.report.answers import Score
from stages.report.comparison import digest
from stages.report.page import compare, parts, render
from stages.report.plots import plot_tables
from stages.report.results import read_results


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write `report.html`, `pictures/*.svg`, `plots/*.csv` and `metrics.json`. Raises ArtifactError for a broken input."""
    sections = params.model_dump()
    results = read_results(inputs)
    comparison = compare(results, sections["evaluation"]["resamples"], sections["evaluation"]["seed"])
    made = parts(results, comparison, sections)

    write_text(outputs["report.html"], render(results, comparison, made, sections))
    _fill(outputs["pictures"], {f"{part.name}.svg": standalone(part.panels) for part in made if part.panels})
    _empty(outputs["plots"])
    for name, table in plot_tables(results, [one.name for one in comparison.groups[0]], comparison.scores).items():
        write_table(outputs["plots"] / name, table)
    metrics = {
        name: {
            "perplexity": one.perplexity,
            "low": one.low,
            "high": one.high,
            "tokens": one.tokens,
            "sparsity": one.sparsity,
            "parameters": one.parameters,
            "bytes": one.bytes,
            "contract": digest(one.protocol),
            **_on_tasks([score for score in comparison.scores if score.variant == name]),
        }
        for name, one in results.variants.items()
    }
    write_json(outputs["metrics.json"], metrics)
    say(f"report: {outputs['report.html']}")


def _on_tasks(scores: Sequence[Score]) -> dict[str, Any]:
    """Accuracy of a variant by task, and a word for what it was measured under; nothing where no task was."""
    if not scores:
        return {}
    return {
        "accuracy": {one.task: one.share for one in scores if one.measure == "accuracy"},
        "accuracy_contract": digest({one.task: digest(one.contract) for one in scores}),
    }


def _fill(folder: Path, texts: Mapping[str, str]) -> None:
    """Write `texts` as the only files of `folder`."""
    _empty(folder)
    for name, text in texts.items():
        write_text(folder / name, text)


def _empty(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
