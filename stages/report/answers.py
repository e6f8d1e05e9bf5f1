"""Accuracy on tasks: read, with an interval, and paired with the dense model example by example."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from pipeline.artifacts import ArtifactError, producer, read_json, read_table
from pipeline.drawing.notation import plain

MEASURES = {"accuracy": "correct", "normalised": "correct_normalised"}  # name -> column of zeroshot/<variant>.csv


@dataclass(frozen=True)
class Answers:
    """One task as one variant answered it. `contract` is all that must agree for a comparison."""

    variant: str
    task: str
    contract: Mapping[str, str]
    correct: Mapping[str, NDArray[np.bool_]]  # measure -> [example]


@dataclass(frozen=True)
class Score:
    """A share of right answers. `lost` and `gained`: examples that dense alone, or this variant alone, has right."""

    variant: str
    task: str
    measure: str
    contract: Mapping[str, str]
    examples: int
    share: float
    error: float  # standard error, sqrt(p (1 - p) / (n - 1))
    low: float
    high: float
    lost: int | None = None  # None where there is no dense model to compare with
    gained: int | None = None
    p: float | None = None


def read_answers(variant: str, summary: Path, examples: Path) -> list[Answers]:
    """What stage `zeroshot` wrote of a variant. Raises ArtifactError naming the file if the two do not fit."""
    tasks = read_json(summary).get("tasks", {})
    table = read_table(examples, ("task", "example", *MEASURES.values()))
    found = []
    for task, detail in tasks.items():
        rows = table.loc[table["task"] == task].sort_values(by="example")
        if len(rows) != detail["examples"] or not len(rows):
            raise ArtifactError(
                f"{examples}: {len(rows)} examples of {task}, but {summary.name} has {detail['examples']}; {producer(examples)}"
            )
        correct = {}
        for measure, column in MEASURES.items():
            values = np.asarray(rows[column], dtype=np.float64)
            if np.isin(values, (0.0, 1.0)).all():
                correct[measure] = values.astype(bool)
            elif measure == "accuracy" or not np.isnan(values).all():
                raise ArtifactError(f"{examples}: '{column}' of {task} has other values than 0 and 1; {producer(examples)}")
        found.append(Answers(variant, task, {key: plain(value) for key, value in detail["contract"].items()}, correct))
    return found


def compare_answers(answers: Sequence[Answers], confidence: float) -> list[Score]:
    """A score per variant, task and measure, paired with the dense model's of the same task and contract where there is one."""
    dense = {one.task: one for one in answers if one.variant == "dense"}
    scores = []
    for one in answers:
        base = dense.get(one.task)
        alike = base is not None and base is not one and base.contract == one.contract
        for measure, correct in one.correct.items():
            pair = base.correct.get(measure) if base is not None and alike else None
            scores.append(_score(one, measure, correct, pair, confidence))
    return scores


def mcnemar(lost: int, gained: int) -> float:
    """Two-sided exact p-value of McNemar's test: are `lost` and `gained` of the discordant pairs equally likely?

    Twice the binomial tail of the smaller one with probability 1/2, at most 1 (McNemar 1947, in its exact form).
    """
    count = lost + gained
    tail = sum(math.comb(count, one) for one in range(min(lost, gained) + 1))
    return min(1.0, float(2 * tail / 2**count))


def wilson(right: int, count: int, confidence: float) -> tuple[float, float]:
    """(low, high) of a share of `right` out of `count`, by Wilson's score interval (1927): it stays within 0 and 1."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, room = right / count, z * z / count
    middle = (share + room / 2) / (1 + room)
    half = z / (1 + room) * math.sqrt(share * (1 - share) / count + room / (4 * count))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def _score(one: Answers, measure: str, correct: NDArray[np.bool_], base: NDArray[np.bool_] | None, confidence: float) -> Score:
    right, count = int(correct.sum()), len(correct)
    share = right / count
    error = math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else 0.0
    low, high = wilson(right, count, confidence)
    score = Score(one.variant, one.task, measure, one.contract, count, share, error, low, high)
    if base is None:
        return score
    lost, gained = int((base & ~correct).sum()), int((~base & correct).sum())
    return Score(**{**vars(score), "lost": lost, "gained": gained, "p": mcnemar(lost, gained)})
