"""Stages through DVC, with DVC's own answer for each: unchanged, restored from the cache, or ran.

DVC's command line is used, not its Python internals: it is the part of DVC that is documented and stable.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from pipeline import leash
from pipeline.errors import PalimpsestError

Outcome = Literal["unchanged", "restored", "ran"]
Say = Callable[[str], None]

_ANSWERS: tuple[tuple[re.Pattern[str], Outcome], ...] = (
    (re.compile(r"Stage '(\S+)' didn't change, skipping"), "unchanged"),
    (re.compile(r"Stage '(\S+)' is cached - skipping run, checking out outputs"), "restored"),
    (re.compile(r"Running stage '(\S+)':"), "ran"),
)
_NOISE = re.compile(
    r"Use `dvc push`|Updating lock file|Data and pipelines are up to date|ERROR: failed to reproduce|> "
    r"|WARNING: No file hash info|Reproducing experiment|Ran experiment|To apply the results of an experiment|\tdvc exp apply"
)

_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)  # what Hydra takes for text in the place of a mapping's key
_WORDS = {"true", "false", "null", "nan", "inf"}  # but for these

CORPUS = "data/corpus"
FETCHED = "data/demo"  # archives that stages keep, so as not to fetch them again
OWN = (CORPUS, "data/tasks")  # the user's own files, which git does not bring along

_running: set[subprocess.Popen[str]] = set()
_stopping = threading.Event()


class StageFailed(PalimpsestError):
    """A stage ended with an error. The message is the stage's own, after its name; or DVC's, if DVC failed (stage "")."""

    def __init__(self, stage: str, message: str):
        super().__init__(f"{stage}: {message}" if stage else message)
        self.stage = stage


def reproduce(
    targets: Sequence[str] = (),
    *,
    force: bool = False,
    single: bool = False,
    say: Say = print,
    root: Path = Path(),
    environment: dict[str, str] | None = None,
) -> dict[str, Outcome]:
    """Run `dvc repro` and report what it answered for each stage, in order.

    Args:
        targets: stages to bring up to date; none means all.
        force: run them even if nothing changed.
        single: these stages alone, not what they depend on.
        say: called with every line that the stages and DVC print.
        environment: variables added for the stages.

    Raises:
        StageFailed: with the message of the stage that failed, or of DVC.
    """
    options = ["--force"] * force + ["--single-item"] * single
    return _follow(["repro", *options, *targets], say, root, environment)


def experiment(
    name: str,
    settings: Mapping[str, object],
    targets: Sequence[str],
    *,
    pull: bool = False,
    force: bool = False,
    say: Say = print,
    root: Path = Path(),
    environment: dict[str, str] | None = None,
) -> dict[str, Outcome]:
    """Run a DVC experiment in a folder of its own that shares the cache. There must be none of this name yet.

    Args:
        name: what `dvc exp show` calls it.
        settings: dotted key of params.yaml -> value, set for this experiment alone.
        pull: take from the DVC remote what is there already, and no more of it than the stages that run need.
        targets, force, say, environment: as for `reproduce`.

    Raises:
        StageFailed: with the message of the stage that failed, or of DVC.
    """
    values = [f"--set-param={one}" for key, value in settings.items() for one in overrides(key, value)]
    files = [(folder, one.name) for folder in OWN for one in sorted((root / folder).glob("[!.]*"))]
    own = [f"--copy-paths={folder}/{name}" for folder, name in files if name != "README.md"]
    own += [f"--copy-paths={FETCHED}"] * (root / FETCHED).is_dir()
    options = ["--temp", f"--name={name}", *["--pull", "--allow-missing"] * pull, *["--force"] * force]
    return _follow(["exp", "run", *options, *own, *values, *targets], say, root, environment)


def drop_experiments(names: Iterable[str], root: Path = Path()) -> None:
    """Forget the experiments of these names, if there are any; what they computed stays in the cache."""
    there = set(ask_dvc(["exp", "list", "--all-commits", "--name-only"], root).split())
    gone = [name for name in names if name in there]
    if gone:
        ask_dvc(["exp", "remove", *gone], root)


def ask_dvc(arguments: list[str], root: Path = Path()) -> str:
    """What DVC prints. Raises StageFailed with its message if it fails."""
    with _dvc(arguments, root, None) as process:
        output = process.communicate()[0]
    if process.returncode:
        raise StageFailed("", _reason("", output.splitlines()))
    return output


def overrides(key: str, value: object) -> list[str]:
    """What `dvc exp run --set-param` takes to give `key` this value; a mapping would else join the one that is there.

    Raises PalimpsestError naming a key inside a mapping that DVC would read as something else.
    """
    odd = next(_odd_names(value), None)
    if odd is not None:
        raise PalimpsestError(
            f"{key}: {odd!r} as a name in a mapping cannot be handed to DVC; allowed: a letter, then letters, digits, _ . -"
        )
    return [f"{key}=null"] * isinstance(value, dict) + [f"{key}={_hydra(value)}"]


def _hydra(value: object) -> str:
    """A value in the grammar of `dvc exp run --set-param`, Hydra's: a backslash counts before a quote and at the end alone."""
    if isinstance(value, str):
        quoted = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + "\\'" * bool(found[2]), value)
        return "'" + re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", quoted) + "'"
    if isinstance(value, list):
        return f"[{','.join(map(_hydra, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_hydra(inner)}' for key, inner in value.items())}}}"
    return json.dumps(value)


def _odd_names(value: object) -> Iterator[object]:
    """The names of mappings, at any depth, that Hydra's grammar does not take as text."""
    if isinstance(value, dict):
        yield from (name for name in value if not _NAME.fullmatch(str(name)) or str(name).lower() in _WORDS)
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _odd_names(inner)


def _follow(arguments: list[str], say: Say, root: Path, environment: dict[str, str] | None) -> dict[str, Outcome]:
    """Run DVC, hand on what it prints, and collect its answer for each stage."""
    answers: dict[str, Outcome] = {}
    current, lines = "", []
    with _dvc(arguments, root, environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            line = line.rstrip()
            name, outcome = answer_in(line)
            if outcome:
                current, lines = name, []
                answers[name] = outcome
            lines.append(line)
            if line and not _NOISE.match(line):
                say(line)
        status = process.wait()
    if _stopping.is_set():
        raise StageFailed(current, "interrupted")
    if status:
        raise StageFailed(current, _reason(current, lines))
    return answers


def changed_stages(root: Path = Path()) -> set[str]:
    """Stages that DVC sees changed now, asked in one go. What lies below them may change too once they have run."""
    with _dvc(["status", "--json"], root, None) as process:
        output = process.communicate()[0]
    try:
        return set(json.loads(output.strip().splitlines()[-1]))
    except (ValueError, IndexError):
        raise PalimpsestError(_reason("", output.splitlines())) from None


def stop() -> None:
    """End every DVC that runs, and the stages under it, and let no other start in this process."""
    _stopping.set()
    for process in list(_running):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does: stages remove what they have half-written


def descendants(starts: Iterable[str], edges: set[tuple[str, str]]) -> set[str]:
    """`starts` and all that can be reached from them along `edges`."""
    reached, front = set(starts), set(starts)
    while front:
        front = {end for start, end in edges if start in front} - reached
        reached |= front
    return reached


@contextmanager
def _dvc(arguments: list[str], root: Path, environment: dict[str, str] | None) -> Iterator[subprocess.Popen[str]]:
    """Start DVC so that `python` in dvc.yaml means this very interpreter; end it if the block is left early."""
    if _stopping.is_set():
        raise PalimpsestError("interrupted")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    watched, held = os.pipe()  # `held` stays open here, and closes by itself when this process dies
    process = subprocess.Popen(
        # A stage that runs beside this one may hold the lock while DVC hashes a large output: wait, do not fail.
        [sys.executable, "-I", "-S", leash.__file__, sys.executable, "-m", "dvc", "--wait-for-lock", *arguments],
        cwd=root,
        env={**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1", "DVC_NO_ANALYTICS": "1", **(environment or {})},
        stdin=watched,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that `stop` reaches the stages too
    )
    os.close(watched)
    _running.add(process)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        process.wait()
        os.close(held)
        _running.discard(process)


def answer_in(line: str) -> tuple[str, Outcome | None]:
    """(stage, DVC's answer for it) if the line is one, else ("", None)."""
    for pattern, outcome in _ANSWERS:
        match = pattern.fullmatch(line.removeprefix("WARNING: "))
        if match:
            return match[1], outcome
    return "", None


def _reason(stage: str, lines: list[str]) -> str:
    """The stage's own message if it gave one (`NAME: what is wrong`), else DVC's, else the last line."""
    own = [index for index, line in enumerate(lines) if stage and line.startswith(f"{stage}: ")]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    said = [line for line in lines if line.strip() and not line.startswith("ERROR: ")]
    if own:
        message = lines[own[-1] :]
        end = next((index for index, line in enumerate(message) if line.startswith("ERROR: ")), len(message))
        return "\n".join(line for line in message[:end] if line.strip()).removeprefix(f"{stage}: ")
    if stage and said:
        return f"{said[-1]} ({errors[-1]})" if errors else said[-1]
    return "\n".join(errors or said[-6:]) or "dvc ended without a word"
