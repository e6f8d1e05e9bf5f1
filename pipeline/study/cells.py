"""Running a study's cells: each a DVC experiment in a folder of its own, all sharing the cache."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from pipeline.errors import PalimpsestError
from pipeline.files import DATA
from pipeline.graph import Node, edges, read_graph
from pipeline.params import read_params, section_models
from pipeline.reproduce import CORPUS, StageFailed, descendants, drop_experiments, experiment
from pipeline.study.plan import Cell, Plan, Settings, Study, merged

_reading = threading.Lock()  # DVC's own reader is not made for threads
Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """A cell that has run: the content of its result file, or why there is none."""

    cell: Cell
    result: Mapping[str, Any] | None
    error: str = ""
    ran: tuple[str, ...] = ()  # stages that really ran; the others came from the cache
    shown: Mapping[str, Any] = field(default_factory=dict)  # what the plan asks to see beside the measures


def run_cells(study: Study, workers: int = 1, say: Say = print, root: Path = Path()) -> list[Outcome]:
    """Run every cell, `workers` at a time, and return their outcomes in the study's order.

    What two cells share runs once: of all cells that ask the same of a stage the first runs it, and the others wait for
    that cell and find the results in the cache. A cell that fails is reported and the rest goes on; what a killed study
    had done is found in the cache when it is run again.
    """
    waits = first_runners(study, read_graph(root / "dvc.yaml"))
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers))} if workers > 1 else {}
    drop_experiments([experiment_name(study, cell) for cell in study.cells], root)
    running: dict[int, Future[Outcome]] = {}

    def run(index: int) -> Outcome:
        for earlier in waits[index]:
            running[earlier].exception()
        outcome = run_cell(study, study.cells[index], environment, root)
        done = sum(future.done() for future in running.values()) + 1
        measure = study.plan.measures[0]
        said = f"{measure} {outcome.result[measure]:.4g}" if outcome.result else outcome.error
        ran = f"ran {', '.join(outcome.ran)}" if outcome.ran else "all from the cache"
        say(f"[{done}/{len(study.cells)}] {outcome.cell.name}: {said}" + (f" ({ran})" if outcome.result else ""))
        return outcome

    with ThreadPoolExecutor(workers) as pool:  # starts in order, so a cell only ever waits for one that has started
        for index in range(len(study.cells)):
            running[index] = pool.submit(run, index)
        try:
            return [running[index].result() for index in range(len(study.cells))]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run_cell(study: Study, cell: Cell, environment: Mapping[str, str], root: Path) -> Outcome:
    """Run one cell and read its result."""
    name = experiment_name(study, cell)
    try:
        quiet: Say = lambda _: None  # noqa: E731
        settings = from_anywhere(cell.settings, root)
        answers = experiment(name, settings, study.plan.stages, say=quiet, root=root, environment=dict(environment))
        ran = tuple(stage for stage, answer in answers.items() if answer == "ran")
        shown = {key: _read(name, file, root).get(key) for key, file in study.plan.show.items()}
        return Outcome(cell, read_result(name, study.plan, root), ran=ran, shown=shown)
    except StageFailed as error:
        if str(error).endswith("interrupted"):
            raise
        return Outcome(cell, None, " ".join(str(error).split()))


def read_result(experiment: str, plan: Plan, root: Path) -> Mapping[str, Any]:
    """The result file of an experiment, from the cache. Raises StageFailed if it is not there or lacks a measure."""
    result = _read(experiment, plan.result, root)
    for measure in plan.measures:
        if not isinstance(result.get(measure), int | float):
            why = result.get("note") or repr(result.get(measure))  # what the stage itself says of it
            raise StageFailed("", f"{DATA}{plan.result}: '{measure}' is no number there ({why})")
    return result


def from_anywhere(settings: Settings, root: Path) -> dict[str, Any]:
    """`settings`, and beside them each key of params.yaml that names a file or folder of the project by a relative path, made
    absolute: a cell runs in a folder of its own, with what git knows and the files of data/corpus.

    Only keys that take any text are looked at (no method is taken for a folder of its name), and nothing inside data/.
    """
    whole, found = merged(read_params(root / "params.yaml"), settings), dict(settings)
    for section, model in section_models().items():
        for key, value in _texts(whole.get(section) or {}, model, section):
            moved = [_absolute(one, root) for one in value] if isinstance(value, list) else _absolute(value, root)
            if moved != value:
                found[key] = moved
    return found


def _texts(values: Mapping[str, Any], model: type[BaseModel], path: str) -> list[tuple[str, Any]]:
    """(dotted key, value) of all that may be any text, or a list of any texts."""
    found: list[tuple[str, Any]] = []
    for name, info in model.model_fields.items():
        kind, value = info.annotation, values.get(name)
        if isinstance(kind, type) and issubclass(kind, BaseModel) and isinstance(value, Mapping):
            found += _texts(value, kind, f"{path}.{name}")
        elif isinstance(value, str | list) and any(one in (str, list[str]) for one in (kind, *get_args(kind))):
            found.append((f"{path}.{name}", value))
    return found


def _absolute(value: str, root: Path) -> str:
    inside = Path(value).parts[:1] == (DATA.strip("/"),) or (root / CORPUS / value).exists()
    there = value and not Path(value).is_absolute() and not inside and (root / value).exists()
    return str((root / value).resolve()) if there else value


def _read(experiment: str, file: str, root: Path) -> Mapping[str, Any]:
    """A JSON file below data/ as an experiment left it, from the cache. Raises StageFailed if it is not there."""
    import dvc.api
    from dvc.exceptions import DvcException

    name = f"{DATA}{file}"
    try:
        with _reading:
            found = json.loads(dvc.api.read(name, repo=str(root), rev=experiment))
    except (DvcException, OSError, ValueError) as error:
        raise StageFailed("", f"{name} of experiment {experiment}: {error}") from None
    if not isinstance(found, dict):
        raise StageFailed("", f"{name} of experiment {experiment}: no object, so it has no keys")
    return found


def experiment_name(study: Study, cell: Cell) -> str:
    """What `dvc exp show` calls the cell."""
    return f"{study.name}-{cell.name}"


def first_runners(study: Study, graph: dict[str, Node]) -> list[list[int]]:
    """For each cell, the earlier cells that run something this cell needs in just the same way."""
    back = {(end, start) for start, end in edges(graph)}
    needed = [name for name in graph if name in descendants(study.plan.stages, back)]
    reads = {name: {section for one in descendants([name], back) for section in graph[one].params} for name in needed}
    first: dict[str, int] = {}
    waits: list[list[int]] = []
    for index, cell in enumerate(study.cells):
        mine = []
        for stage in needed:
            asked = {key: value for key, value in cell.settings.items() if key.split(".")[0] in reads[stage]}
            mine.append(first.setdefault(json.dumps([stage, asked], sort_keys=True), index))
        waits.append(sorted(set(mine) - {index}))
    return waits


def check_repository(root: Path = Path()) -> None:
    """Raise PalimpsestError if experiments cannot be made here: DVC keeps them in git."""
    if not (root / ".git").exists():
        raise PalimpsestError(
            "a study's cells are DVC experiments, which live in git; run: git init && git add . && git commit -m start"
        )
