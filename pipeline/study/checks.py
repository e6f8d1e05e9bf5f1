"""What a study's file asks for, checked against params.yaml and dvc.yaml before anything runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.checking import check_params, unread_keys
from pipeline.errors import PalimpsestError
from pipeline.graph import Node, edges
from pipeline.params import ParamsError, Section
from pipeline.reproduce import descendants, overrides
from pipeline.study.plan import Cell, Plan, StudyError, merged, varied_keys

TABLE = ("cell", "seed", "contract", "low", "high", "error")  # columns that results.py writes


def check_plan(plan: Plan, path: Path, graph: Mapping[str, Node]) -> None:
    """What the file says, by itself and against dvc.yaml. Raises StudyError naming the file and key."""
    for stage in plan.stages:
        if stage not in graph:
            raise StudyError(f"{path}: stages: no stage '{stage}'; there are {', '.join(graph)}")
    for key, file in [("result", plan.result), *((f"show.{one}", file) for one, file in plan.show.items())]:
        _check_written(key, file, plan, path, graph)
    columns = [*plan.measures, *plan.show]
    taken = [one for one in columns if not one or columns.count(one) > 1 or one in (*TABLE, *varied_keys(plan))]
    if taken:
        raise StudyError(f"{path}: measures, show: {taken[0]!r} is empty, named twice or a column of every study's table")
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


def check_cells(cells: Sequence[Cell], path: Path, params: Mapping[str, Any]) -> None:
    """Every cell's values, and that no two are the same. Raises StudyError naming the file, the cell and the key."""
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
        try:
            for key, value in cell.settings.items():
                overrides(key, value)
        except PalimpsestError as error:
            raise StudyError(f"{path}: cell {cell.name}: {error}") from None
        key = str(json.loads(json.dumps(whole, sort_keys=True, default=str), parse_int=float))  # 0 is 0.0
        if key in seen:
            raise StudyError(f"{path}: the cells {seen[key]} and {cell.name} are the same")
        seen[key] = cell.name


def check_effect(cells: Sequence[Cell], plan: Plan, path: Path, params: Mapping[str, Any], graph: Mapping[str, Node]) -> None:
    """That a stage which runs reads every key in which cells differ, with the other settings of one cell at least.

    Raises StudyError naming the first that is read by none, or in none.
    """
    read = {section for name in needed_stages(plan, graph) for section in graph[name].params}
    given = [("vary", plan.vary), *(("cells", one) for one in plan.cells), ("seeds", plan.seeds)]
    for group, key in ((group, key) for group, keys in given for key in keys):
        section = key.split(".")[0]
        if section not in read:
            readers = [name for name, node in graph.items() if section in node.params]
            raise StudyError(
                f"{path}: {group}.{key}: no stage that runs for {', '.join(plan.stages)} reads '{section}', so it would change "
                f"nothing; stages that do: {', '.join(readers)}"
            )
    idle: dict[str, list[str]] = {}  # key -> of each cell that has it, why nothing reads it there; "" where it is read
    for cell in cells:
        sections = check_params(merged(params, cell.settings))
        for key in cell.varied:
            idle.setdefault(key, []).append(_why_unread(key, sections))
        if plan.seeds:  # which go together, so that one of them is enough
            reasons = [_why_unread(key, sections) for key in plan.seeds]
            idle.setdefault(f"seeds.{', '.join(plan.seeds)}", []).append(reasons[0] if all(reasons) else "")
    for key, reasons in idle.items():
        if all(reasons):
            raise StudyError(f"{path}: {key}: nothing reads it in any cell ({reasons[0]}), so it would change nothing")


def _why_unread(key: str, sections: Mapping[str, Section]) -> str:
    """`allocation.method is uniform` if that is why nothing reads `key`; empty if something does."""
    name, inner = key.split(".")[:2]
    by, _ = unread_keys(sections[name]).get(inner, ("", ()))
    return f"{name}.{by} is {getattr(sections[name], by) or 'empty'}" if by else ""


def needed_stages(plan: Plan, graph: Mapping[str, Node]) -> list[str]:
    """The stages that a cell brings up to date, in the graph's order."""
    needed = descendants(plan.stages, {(end, start) for start, end in edges(graph)})
    return [name for name in graph if name in needed]


def _check_written(key: str, file: str, plan: Plan, path: Path, graph: Mapping[str, Node]) -> None:
    """That `file` is a JSON file of a stage that runs."""
    written = {one: name for name in needed_stages(plan, graph) for one in graph[name].writes if one.endswith(".json")}
    if file in written:
        return
    others = [name for name, node in graph.items() if file in node.writes and file.endswith(".json")]
    there = ", ".join(f"{one} ({name})" for one, name in written.items()) or "none"
    mend = f"add '{others[0]}' to stages, or name one that" if others else "name one that"
    raise StudyError(
        f"{path}: {key}: none of the stages that run for {', '.join(plan.stages)} writes a JSON file data/{file}; "
        f"{mend} they write: {there}"
    )
