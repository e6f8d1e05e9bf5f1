"""lm-eval's definition of a task: found by name among its own and the user's, without reading all of them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval.tasks
import yaml
from lm_eval.tasks._yaml_loader import load_yaml

from pipeline.errors import PalimpsestError

BUILT_IN = Path(lm_eval.tasks.__file__).parent
_NAME = re.compile(r"""^(task|group):[ \t]*["']?([\w.:/+-]+)["']?[ \t]*(?:#.*)?$""", re.MULTILINE)


def read_definitions(names: Sequence[str], own: Path | None) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Task -> its file and what it says, with what it includes and its functions resolved. The user's go first.

    Raises PalimpsestError naming the task, for one that there is not, a group of tasks, or a definition that cannot be read.
    """
    files = {**_index(BUILT_IN), **(_index(own) if own is not None else {})}
    found = {}
    for name in names:
        if ("task", name) not in files:
            raise PalimpsestError(f"zeroshot.tasks: {_unknown(name, files)}")
        path = files["task", name]
        config = _load(path)
        if config.get("task") != name or "class" in config:
            raise PalimpsestError(f"zeroshot.tasks: '{name}' is made by code ({path.name}), which is not run here")
        found[name] = path, config
    return found


def _index(folder: Path) -> dict[tuple[str, str], Path]:
    """("task" or "group", name) -> file. Raises PalimpsestError for a folder without definitions."""
    paths = sorted(folder.rglob("*.yaml"))
    if not paths:
        raise PalimpsestError(f"zeroshot.definitions: no .yaml file in {folder}")
    found: dict[tuple[str, str], Path] = {}
    for path in paths:  # some 14,000 of lm-eval's own, which would take a minute to parse
        for kind, name in _NAME.findall(path.read_text(encoding="utf-8", errors="replace")):
            found.setdefault((kind, name), path)
    return found


def _load(path: Path) -> dict[str, Any]:
    try:
        config = load_yaml(path)
    except (yaml.YAMLError, ValueError, OSError, ImportError, AttributeError) as error:
        raise PalimpsestError(f"{path}: no definition of a task ({' '.join(str(error).split())[:300]})") from None
    return {key: value for key, value in config.items() if key not in ("tag", "group", "task_list")}


def _unknown(name: str, files: dict[tuple[str, str], Path]) -> str:
    if ("group", name) in files:
        return f"'{name}' is a group of tasks; name its tasks"
    close = difflib.get_close_matches(name, [known for kind, known in files if kind == "task"], n=3)
    hint = f"did you mean {', '.join(close)}? " if close else ""
    return f"no task '{name}'; {hint}`lm_eval ls tasks` prints lm-eval's names, zeroshot.definitions is for your own"
