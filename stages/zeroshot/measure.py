"""A task measured on a variant: lm-eval asks and judges, this project answers."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import redirect_stderr
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lm_eval.evaluator import evaluate

from pipeline.console import say
from pipeline.errors import PalimpsestError
from stages.decoder.compute import Compute
from stages.decoder.variant import Variant
from stages.zeroshot import Zeroshot
from stages.zeroshot.results import Example, Result
from stages.zeroshot.streamed import StreamedLM
from stages.zeroshot.tasks import Task


class Measurement:
    """One variant, to be measured on any number of tasks."""

    def __init__(self, variant: Variant, compute: Compute, wanted: Zeroshot, folder: Path):
        """`folder`: where scratch files lie."""
        self._model = StreamedLM(variant, wanted.batch_size, compute.batch_tokens, folder)
        self._dtype = str(variant.decoder.dtype).removeprefix("torch.")

    def contract(self, task: Task) -> dict[str, Any]:
        """All that has to be equal for two accuracies on the task to be comparable."""
        added = self._model.tok_encode("a")[: -len(self._model.tok_encode("a", add_special_tokens=False)) or None]
        return {
            **task.terms,
            "special_tokens": self._model.tokenizer.decode(added) if added else "none",
            "max_length": self._model.max_length,
            "dtype": self._dtype,
            "harness": f"lm-eval {version('lm-eval')}",
        }

    def measure(self, task: Task, contract: dict[str, Any]) -> Result:
        """Run the task. Raises PalimpsestError if it scores an example with anything but right or wrong."""
        before = self._model.truncated
        with redirect_stderr(io.StringIO()):  # progress bars
            found: Any = evaluate(self._model, {"tasks": {task.name: task.harness}}, limit=task.limit, bootstrap_iters=0)
        if self._model.truncated > before:
            say(f"{task.name}: {self._model.truncated - before} answers are judged behind a context cut at its beginning")
        samples = found["samples"][task.name]
        first = [one for one in samples if one["filter"] == samples[0]["filter"]]
        return Result(task.name, contract, tuple(_example(task, one) for one in sorted(first, key=lambda one: one["doc_id"])))


def _example(task: Task, sample: Mapping[str, Any]) -> Example:
    answers = [(float(likely), bool(greedy)) for likely, greedy in sample["filtered_resps"]]
    likely = [one for one, _ in answers]
    if task.harness.OUTPUT_TYPE == "multiple_choice":
        likely = likely[: len(task.harness.doc_to_choice(sample["doc"]))]  # behind them, where asked for, without the question
        choice = str(max(range(len(likely)), key=likely.__getitem__))
    else:
        choice = "greedy" if answers[0][1] else ""
    normalised = sample.get("acc_norm")
    return Example(
        example=int(sample["doc_id"]),
        target=str(sample["target"]),
        choice=choice,
        correct=_whole(task, sample["acc"]),
        correct_normalised=None if normalised is None else _whole(task, normalised),
        loglikelihoods=tuple(likely),
    )


def _whole(task: Task, score: Any) -> int:
    if score not in (0, 1):
        raise PalimpsestError(f"zeroshot.tasks: '{task.name}' scores an example with {score}, not as right or wrong")
    return int(score)
