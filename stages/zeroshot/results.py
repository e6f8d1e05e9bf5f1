"""What a task gave: a row per example, and accuracies with standard errors."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.artifacts import ArtifactError, read_json, write_json, write_table, write_text


@dataclass(frozen=True)
class Example:
    """One example. `choice` is the most likely answer; of a single continuation, whether greedy decoding gives it."""

    example: int  # its place in the data, from 0
    target: str
    choice: str
    correct: int  # 0 or 1
    correct_normalised: int | None  # by likelihood per character, where the task defines it
    loglikelihoods: tuple[float, ...]  # of each answer, nats


@dataclass(frozen=True)
class Result:
    """A task that has been measured. `contract` is all that has to be equal for two accuracies to be comparable."""

    task: str
    contract: dict[str, Any]
    examples: tuple[Example, ...]


def accuracy(correct: Sequence[int]) -> tuple[float, float]:
    """(share of correct ones, its standard error sqrt(p (1 - p) / (n - 1)), as lm-eval gives it; 0 for a single example)."""
    count = len(correct)
    share = sum(correct) / count
    return share, math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else 0.0


def accuracies(result: Result) -> dict[str, float | int]:
    """The number of examples, accuracy and, where the task defines it, normalised accuracy, with errors."""
    share, error = accuracy([one.correct for one in result.examples])
    found: dict[str, float | int] = {"examples": len(result.examples), "accuracy": share, "error": error}
    normalised = [one.correct_normalised for one in result.examples if one.correct_normalised is not None]
    if normalised:
        found["normalised"], found["normalised_error"] = accuracy(normalised)
    return found


def summary(result: Result) -> str:
    """`51.0% ± 3.5 correct (normalised 48.0% ± 3.5) of 200 examples`."""
    found = accuracies(result)
    text = f"{found['accuracy']:.1%} ± {100 * found['error']:.1f} correct"
    if "normalised" in found:
        text += f" (normalised {found['normalised']:.1%} ± {100 * found['normalised_error']:.1f})"
    return f"{text} of {found['examples']:,} examples"


def write_results(summary_path: Path, examples_path: Path, results: Sequence[Result]) -> None:
    """Write both outputs of the stage; without results, files that say so."""
    tasks = {one.task: {**accuracies(one), "contract": one.contract} for one in results}
    write_json(summary_path, {"variant": summary_path.stem, "tasks": tasks})
    columns = ["task", *Example.__dataclass_fields__]
    if not results:
        write_text(examples_path, ",".join(columns) + "\n")
        return
    import pandas as pd

    rows = [
        {"task": one.task, **asdict(example), "loglikelihoods": " ".join(map(repr, example.loglikelihoods))}
        for one in results
        for example in one.examples
    ]
    write_table(examples_path, pd.DataFrame(rows, columns=columns).astype({"correct_normalised": "Int64"}))


class Kept:
    """A measured task, kept beside the outputs so that a killed run need not measure it again."""

    def __init__(self, folder: Path, name: str, fingerprint: str):
        """`fingerprint` is equal for what was measured under the same circumstances; a result of another one is not used."""
        self._path, self._fingerprint = folder / f"{name}.json", fingerprint

    def read(self) -> Result | None:
        """The result, or None where there is none that can be used."""
        try:
            raw = read_json(self._path)
            if raw["fingerprint"] != self._fingerprint:
                return None
            rows = [Example(**{**row, "loglikelihoods": tuple(row["loglikelihoods"])}) for row in raw["examples"]]
            return Result(raw["task"], raw["contract"], tuple(rows))
        except (ArtifactError, KeyError, TypeError):
            return None

    def write(self, result: Result) -> None:
        """Keep `result`."""
        write_json(self._path, {"fingerprint": self._fingerprint, **json.loads(json.dumps(asdict(result)))})
