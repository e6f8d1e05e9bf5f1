"""One cell of a study: a DVC experiment in a folder of its own, here or wherever a Dask worker is."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from pipeline.errors import PalimpsestError
from pipeline.files import DATA
from pipeline.params import read_params, section_models
from pipeline.reproduce import CORPUS, StageFailed, drop_experiments, experiment
from pipeline.study.elsewhere import Source, check_out, push_results
from pipeline.study.nested import contract_of, look_up
from pipeline.study.plan import Cell, Plan, Settings, merged

_reading = threading.Lock()  # DVC's own reader is not made for threads
Say = Callable[[str], object]


@dataclass(frozen=True)
class Outcome:
    """A cell that has run: the content of its result file, or why there is none."""

    cell: Cell
    result: Mapping[str, Any] | None
    error: str = ""
    ran: tuple[str, ...] = ()  # stages that really ran; the others came from the cache
    shown: Mapping[str, Any] = field(default_factory=dict)  # what the plan asks to see beside the measures


@dataclass(frozen=True)
class Job:
    """All that running a cell needs to know, wherever that happens."""

    name: str  # of the experiment
    cell: Cell
    plan: Plan
    place: Path | Source  # the project's folder on this machine; or where a worker elsewhere gets it from
    threads: int | None  # that each of its stages computes with; None: what the worker was started with


def run_cell(job: Job, say: Say = lambda _: None) -> Outcome:
    """Run one cell and read its result; what goes wrong is in the outcome. Raises StageFailed if it was interrupted."""
    try:
        root = check_out(job.place) if isinstance(job.place, Source) else job.place
        answers = _experiment(job, root, say)
        ran = tuple(stage for stage, answer in answers.items() if answer == "ran")
        if isinstance(job.place, Source):
            push_results(job.name, job.place, root)
        result = read_result(job.name, job.plan, root) if job.plan.result else {}
        shown = {key: _value(_read(job.name, file, root), key, file) for key, file in job.plan.show.items()}
        return Outcome(job.cell, result, ran=ran, shown=shown)
    except PalimpsestError as error:
        if str(error).endswith("interrupted"):
            raise
        return Outcome(job.cell, None, " ".join(str(error).split()))


def _experiment(job: Job, root: Path, say: Say) -> Mapping[str, str]:
    """Run the experiment. One of its name, left by a worker that died or by an earlier study in this clone, is replaced."""
    settings = dict(job.cell.settings)
    options: dict[str, Any] = {
        "pull": isinstance(job.place, Source),
        "say": say,
        "root": root,
        "environment": _threads(job.threads),
    }
    try:
        return experiment(job.name, settings, job.plan.stages, **options)
    except StageFailed as error:
        if "conflicts with existing experiment" not in str(error):
            raise
    drop_experiments([job.name], root)
    return experiment(job.name, settings, job.plan.stages, **options)


def _threads(asked: int | None) -> dict[str, str]:
    """For every library that asks: a Dask worker sets each of these to 1 unless it was started with another value."""
    count = str(asked) if asked else os.environ.get("OMP_NUM_THREADS")
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), count) if count else {}


def read_result(experiment: str, plan: Plan, root: Path) -> Mapping[str, Any]:
    """The result file of an experiment, from the cache, with every measure under its whole path and `contract` that of them.

    Raises StageFailed if it is not there or lacks a measure.
    """
    result = _read(experiment, plan.result, root)
    values = {measure: _value(result, measure, plan.result) for measure in plan.measures}
    for measure, value in values.items():
        if not isinstance(value, int | float):
            why = result.get("note") or repr(value)  # what the stage itself says of it
            raise StageFailed("", f"{DATA}{plan.result}: '{measure}' is no number there ({why})")
    contract = contract_of(result, plan.measures)
    return {**result, **values, **({"contract": contract} if contract else {})}


def from_anywhere(settings: Settings, root: Path) -> dict[str, Any]:
    """`settings`, and beside them each key of params.yaml that names a file or folder of the project by a relative path, made
    absolute: a cell runs in a folder of its own, with what git knows and the files of data/corpus.

    To be asked before the first cell runs: for an instant of each, `dvc exp run` has that cell's values in params.yaml.

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


def _value(found: Mapping[str, Any], path: str, file: str) -> Any:
    """The value at a dotted path. Raises StageFailed naming the file and what is there instead."""
    try:
        return look_up(found, path)
    except PalimpsestError as error:
        note = f" ({found['note']})" if "note" in found else ""  # what the stage itself says of it
        raise StageFailed("", f"{DATA}{file}: {error}{note}") from None


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
