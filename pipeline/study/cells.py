"""Running a study's cells: each a DVC experiment in a folder of its own, all sharing the cache."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import PalimpsestError
from pipeline.files import DATA
from pipeline.graph import Node, edges, read_graph
from pipeline.reproduce import StageFailed, descendants, drop_experiments, experiment
from pipeline.study.plan import Cell, Plan, Study

_reading = threading.Lock()  # DVC's own reader is not made for threads
Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """A cell that has run: the content of its result file, or why there is none."""

    cell: Cell
    result: Mapping[str, Any] | None
    error: str = ""
    ran: tuple[str, ...] = ()  # stages that really ran; the others came from the cache


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
        answers = experiment(name, cell.settings, study.plan.stages, say=quiet, root=root, environment=dict(environment))
        ran = tuple(stage for stage, answer in answers.items() if answer == "ran")
        return Outcome(cell, read_result(name, study.plan, root), ran=ran)
    except StageFailed as error:
        if str(error).endswith("interrupted"):
            raise
        return Outcome(cell, None, " ".join(str(error).split()))


def read_result(experiment: str, plan: Plan, root: Path) -> Mapping[str, Any]:
    """The result file of an experiment, from the cache. Raises StageFailed if it is not there or lacks a measure."""
    import dvc.api
    from dvc.exceptions import DvcException

    name = f"{DATA}{plan.result}"
    try:
        with _reading:
            result = json.loads(dvc.api.read(name, repo=str(root), rev=experiment))
    except (DvcException, OSError, ValueError) as error:
        raise StageFailed("", f"{name} of experiment {experiment}: {error}") from None
    for measure in plan.measures:
        if not isinstance(result, dict) or not isinstance(result.get(measure), int | float):
            raise StageFailed("", f"{name}: '{measure}' is no number there ({result.get(measure)!r})")
    return result


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
