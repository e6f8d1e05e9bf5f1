"""studies/NAME.yaml, spelled out into cells and checked before anything runs."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipeline.checking import check_params
from pipeline.errors import PalimpsestError
from pipeline.params import ParamsError, read_params

FOLDER = Path("studies")
Settings = Mapping[str, Any]  # dotted key of params.yaml -> value


class StudyError(PalimpsestError):
    """A study's file asks for something that cannot be run or compared."""


class Plan(BaseModel):
    """What studies/NAME.yaml may say."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    question: str
    stages: list[str] = Field(min_length=1)  # what each cell brings up to date
    result: str  # the file below data/ that a cell is judged by
    measures: list[str] = Field(default=["perplexity"], min_length=1)  # numbers in it; cells are compared by the first
    show: dict[str, str] = {}  # further columns: a key, and the JSON file below data/ that has it
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


def read_study(name: str, root: Path = Path()) -> Study:
    """Read and check studies/NAME.yaml against params.yaml and dvc.yaml.

    Raises StudyError or ParamsError naming the file and key, for: no such study, an unknown key, an empty grid, two cells
    alike, an unknown stage, a value that a stage refuses.
    """
    path = root / FOLDER / f"{name}.yaml"
    plan = _read_plan(path, name)
    _check_plan(plan, path, root)
    keys = list(plan.vary)
    seeds = [dict(zip(plan.seeds, values, strict=True)) for values in zip(*plan.seeds.values(), strict=True)]
    combinations = [dict(zip(keys, values, strict=True)) for values in itertools.product(*plan.vary.values())] if keys else []
    varied = [*combinations, *plan.cells]
    every = varied_keys(plan)
    cells = []
    for one in varied:
        for seed in seeds or [{}]:
            number = next(iter(seed.values()), None)
            cells.append(Cell(_name(one, every, number), {**plan.fixed, **one, **seed}, one, number))
    _check_cells(cells, path, read_params(root / "params.yaml"))
    if len({cell.name for cell in cells}) < len(cells):  # values that read alike as words
        cells = [replace(cell, name=f"{cell.name}-{_digest(cell.settings)}") for cell in cells]
    return Study(name, plan, tuple(cells))


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


def _read_plan(path: Path, name: str) -> Plan:
    try:
        raw = YAML(typ="safe", pure=True).load(path)
    except FileNotFoundError:
        there = ", ".join(sorted(one.stem for one in path.parent.glob("*.yaml"))) or "none"
        raise StudyError(f"{path}: no such study; there are: {there}") from None
    except YAMLError as error:
        raise StudyError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    try:
        return Plan.model_validate(raw)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, one['loc'])) or name}: {_plain(one)}" for one in error.errors()]
        raise StudyError("\n".join(f"{path}: {line}" for line in lines)) from None


def _plain(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return f"unknown key; allowed: {', '.join(Plan.model_fields)}"
    return error["msg"].replace("Input should", "should").replace("Field required", "missing")


def _check_plan(plan: Plan, path: Path, root: Path) -> None:
    from pipeline.graph import edges, read_graph
    from pipeline.reproduce import descendants

    graph = read_graph(root / "dvc.yaml")
    for stage in plan.stages:
        if stage not in graph:
            raise StudyError(f"{path}: stages: no stage '{stage}'; there are {', '.join(graph)}")
    writers = [name for name, node in graph.items() if plan.result in node.writes]
    if not writers or writers[0] not in plan.stages:
        needed = f"add '{writers[0]}' to stages" if writers else "see dvc.yaml for what stages write"
        raise StudyError(f"{path}: result: none of the stages named writes data/{plan.result}; {needed}")
    for key, file in plan.show.items():
        makes = [name for name, node in graph.items() if file in node.writes]
        back = {(end, start) for start, end in edges(graph)}
        if not file.endswith(".json") or not makes or makes[0] not in descendants(plan.stages, back):
            raise StudyError(f"{path}: show.{key}: none of the stages that run writes a JSON file data/{file}")
    stray = [measure for measure in plan.least if measure not in plan.measures or not plan.curve]
    if stray:
        raise StudyError(f"{path}: least: {stray[0]} is not drawn; name one of the measures of a study with curve: true")
    if len({len(values) for values in plan.seeds.values()}) > 1:
        counts = ", ".join(f"{key} has {len(values)}" for key, values in plan.seeds.items())
        raise StudyError(f"{path}: seeds: keys that go together need equally many values; {counts}")
    empty = [f"{group}.{key}" for group in ("vary", "seeds") for key, values in getattr(plan, group).items() if not values]
    if empty or not (plan.vary or plan.cells):
        raise StudyError(f"{path}: {empty[0] if empty else 'vary and cells'}: empty, so there is nothing to run")
    strange = [key for key in plan.baseline if key not in plan.vary and not any(key in one for one in plan.cells)]
    if strange:
        raise StudyError(f"{path}: baseline.{strange[0]}: not varied in this study")
    for key, value in plan.baseline.items():
        if value not in [*plan.vary.get(key, []), *(one[key] for one in plan.cells if key in one)]:
            raise StudyError(f"{path}: baseline.{key} = {value!r}: no cell has that value, so there is nothing to compare with")
    twice = [key for key in plan.seeds if key in plan.vary or key in plan.fixed]
    twice += [key for key in plan.vary if key in plan.fixed]
    if twice:
        raise StudyError(f"{path}: {twice[0]}: given twice (fixed, vary and seeds exclude each other)")


def _check_cells(cells: list[Cell], path: Path, params: Mapping[str, Any]) -> None:
    seen: dict[str, str] = {}
    for cell in cells:
        for key in cell.settings:
            if "." not in key:
                raise StudyError(f"{path}: cell {cell.name}: '{key}' is a section; name a key of it, as in allocation.method")
        whole = merged(params, cell.settings)
        try:
            check_params(whole, source=f"{path}: cell {cell.name}")
        except ParamsError as error:
            raise StudyError(str(error)) from None
        key = str(json.loads(json.dumps(whole, sort_keys=True, default=str), parse_int=float))  # 0 is 0.0
        if key in seen:
            raise StudyError(f"{path}: the cells {seen[key]} and {cell.name} are the same")
        seen[key] = cell.name


def _name(varied: Settings, keys: list[str], seed: int | None) -> str:
    """`wanda-pals-seed3`: readable, and fit for the name of a DVC experiment."""
    parts = [_word(varied[key]) for key in keys if key in varied] + ([] if seed is None else [f"seed{seed}"])
    text = "-".join(part for part in parts if part) or "plain"
    if len(text) > 60:
        text = f"{text[:51]}-{_digest(varied)}"
    return text


def _digest(settings: Settings) -> str:
    return hashlib.sha256(json.dumps(dict(settings), sort_keys=True, default=str).encode()).hexdigest()[:8]


def _word(value: Any) -> str:
    text = "-".join(map(str, value)) if isinstance(value, list) else str(value)
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.").replace("..", ".")
