"""studies/NAME.yaml, read, checked and spelled out into cells before anything runs."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipeline.graph import read_graph
from pipeline.params import at_line, read_params
from pipeline.study.checks import check_cells, check_effect, check_plan
from pipeline.study.plan import Cell, Plan, Settings, Study, StudyError, varied_keys

FOLDER = Path("studies")


def read_study(name: str, root: Path = Path()) -> Study:
    """Read and check studies/NAME.yaml against params.yaml and dvc.yaml.

    Raises StudyError or ParamsError naming the file and key, for: no such study, an unknown key, an empty grid, two cells
    alike, an unknown stage, a value that a stage refuses, a key that nothing reads in the study, a file that none writes.
    """
    path = root / FOLDER / f"{name}.yaml"
    plan, graph = _read_plan(path), read_graph(root / "dvc.yaml")
    check_plan(plan, path, graph)
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
    params = read_params(root / "params.yaml")
    check_cells(cells, path, params)
    check_effect(cells, plan, path, params, graph)
    if len({cell.name for cell in cells}) < len(cells):  # values that read alike as words
        cells = [replace(cell, name=f"{cell.name}-{_digest(cell.settings)}") for cell in cells]
    return Study(name, plan, tuple(cells))


def _read_plan(path: Path) -> Plan:
    try:
        raw = YAML(typ="safe", pure=True).load(path)
    except FileNotFoundError:
        there = ", ".join(sorted(one.stem for one in path.parent.glob("*.yaml"))) or "none"
        raise StudyError(f"{path}: no such study; there are: {there}") from None
    except YAMLError as error:
        raise StudyError(at_line(path, error)) from None
    if not isinstance(raw, dict):
        what = "empty" if raw is None else f"a mapping of keys is expected, found {type(raw).__name__}"
        raise StudyError(f"{path}: {what}; a study needs question, stages, result, and vary or cells")
    try:
        return Plan.model_validate(raw)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, one['loc']))}: {_plain(one)}" for one in error.errors()]
        raise StudyError("\n".join(f"{path}: {line}" for line in lines)) from None


def _plain(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return f"unknown key; allowed: {', '.join(Plan.model_fields)}"
    return error["msg"].replace("Input should", "should").replace("Field required", "missing")


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
