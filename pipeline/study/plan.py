"""What a study is: what its file may say, and the cells that it is spelled out into."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from pipeline.errors import PalimpsestError

Settings = Mapping[str, Any]  # dotted key of params.yaml -> value


class StudyError(PalimpsestError):
    """A study's file asks for something that cannot be run or compared."""


class Plan(BaseModel):
    """What studies/NAME.yaml may say."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    question: str
    stages: list[str] = Field(min_length=1)  # what each cell brings up to date
    result: str  # the file below data/ that a cell is judged by
    # numbers in it, inner ones by dotted path (tasks.arc_easy.accuracy); cells are compared by the first
    measures: list[str] = Field(default=["perplexity"], min_length=1)
    show: dict[str, str] = {}  # further columns: a key or dotted path, and the JSON file below data/ that has it
    curve: bool = False  # the last key varied is an order (checkpoints of one training run): draw the measures along it
    least: list[str] = []  # with curve: measures whose least value so far is drawn too (bounds that stay once they are found)
    fixed: dict[str, Any] = {}
    vary: dict[str, list[Any]] = {}  # every combination is a cell
    cells: list[dict[str, Any]] = []  # further cells, spelled out
    seeds: dict[str, list[int]] = {}  # every cell runs with each value; of several keys the first, the second, … of each together
    baseline: dict[str, Any] = {}  # a cell is compared with the one that differs from it in these keys alone


@dataclass(frozen=True)
class Cell:
    """One run: `settings` says all that it sets, `varied` what tells it from the other cells, seed apart."""

    name: str
    settings: Settings
    varied: Settings
    seed: int | None


@dataclass(frozen=True)
class Study:
    """A checked study."""

    name: str
    plan: Plan
    cells: tuple[Cell, ...]

    def baseline_of(self, cell: Cell) -> Settings | None:
        """What the cell that `cell` is compared with varies; None if `cell` is a baseline itself or there is none."""
        other = {key: self.plan.baseline.get(key, value) for key, value in cell.varied.items()}
        there = any(dict(one.varied) == other for one in self.cells)
        return other if self.plan.baseline and there and other != dict(cell.varied) else None


def varied_keys(plan: Plan) -> list[str]:
    """The keys in which cells differ, those of `vary` first."""
    return [*plan.vary, *sorted({key for one in plan.cells for key in one} - set(plan.vary))]


def merged(params: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """`params` with the dotted keys of `settings` set."""
    result = copy.deepcopy(dict(params))
    for key, value in settings.items():
        *path, last = key.split(".")
        inner = result
        for part in path:
            if not isinstance(inner.get(part), dict):
                inner[part] = {}
            inner = inner[part]
        inner[last] = value
    return result
