"""`python -m pipeline.runner NAME` runs one stage with exactly what dvc.yaml declares for it.

Everything is checked before the stage starts: params.yaml as a whole, the declared inputs, the folder written to.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from pathlib import Path

from pipeline.checking import check_params, unread_notes
from pipeline.console import say
from pipeline.errors import PalimpsestError
from pipeline.files import DATA, Files
from pipeline.graph import Node, read_graph
from pipeline.link import leave
from pipeline.params import read_params, stage_params
from pipeline.reported import is_wanted, run_reported


def run_stage(name: str, root: Path = Path()) -> None:
    """Run stage `name` (`capture`, `evaluation@dense`) in the project folder `root`.

    Raises PalimpsestError for anything the user can mend.
    """
    graph = read_graph(root / "dvc.yaml")
    if name not in graph:
        raise PalimpsestError(f"dvc.yaml: no stage '{name}'; there are {', '.join(graph)}")
    node = graph[name]
    package = name.split("@")[0]
    raw = read_params(root / "params.yaml")
    sections = check_params(raw)
    for line in unread_notes(package, sections[package]) if package in sections else ():
        say(line)
    params = stage_params(package, raw, list(node.params))
    inputs, outputs = Files(name, "deps", node.reads, root), Files(name, "outs", node.writes, root)
    _check_inputs(name, inputs, graph)
    _check_writable(root / DATA)
    importlib.import_module(f"stages.{package}.run").run(params, inputs, outputs)
    missing = [str(path) for path in outputs.values() if not path.exists()]
    if missing:
        raise PalimpsestError(f"stage '{name}' ended without writing {', '.join(missing)}")


def _check_inputs(stage: str, inputs: Files, graph: dict[str, Node]) -> None:
    owner = {path: node.name for node in graph.values() for path in node.writes}
    for name, path in inputs.items():
        if not path.exists():
            make = f"run: dvc repro {owner[name]}" if name in owner else "it belongs to the project; restore it with git"
            raise PalimpsestError(f"{path}: needed by stage '{stage}' and not there; {make}")


def _check_writable(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PalimpsestError(f"{folder}: no permission to write; check who owns the folder")


_interrupted: list[int] = []


def _interrupt(number: int, _: object) -> None:
    """Note the signal, since a library that it lands in may turn the exception into one of its own."""
    _interrupted.append(number)
    raise KeyboardInterrupt


def main(arguments: list[str]) -> int:
    """Entry point; returns the exit status."""
    if len(arguments) != 1:
        print("usage: python -m pipeline.runner NAME   (a stage of dvc.yaml)", file=sys.stderr)
        return 2
    start = time.monotonic()
    signal.signal(signal.SIGINT, _interrupt)
    try:
        if is_wanted():
            node = read_graph().get(arguments[0])
            outputs = [Path(DATA) / path for path in node.writes] if node else []
            run_reported(arguments[0], outputs, lambda: run_stage(arguments[0]))
        else:
            run_stage(arguments[0])
    except PalimpsestError as error:
        print(f"\n{arguments[0]}: {error}\n", file=sys.stderr, flush=True)
        return 1
    except OSError as error:  # a full disk, a file that may not be read: nothing a traceback would explain
        print(f"\n{arguments[0]}: {error.filename or DATA}: {error.strerror or error}\n", file=sys.stderr, flush=True)
        return 1
    except BaseException:
        if not _interrupted:
            raise
        print(f"\n{arguments[0]}: interrupted\n", file=sys.stderr, flush=True)
        return 130
    print(f"  {arguments[0]}: done in {time.monotonic() - start:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
