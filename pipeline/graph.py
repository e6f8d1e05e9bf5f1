"""dvc.yaml, as the runner, the flow and the contract tests read it: stages with their paths, `foreach` spelled out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from pipeline.errors import PalimpsestError
from pipeline.files import DATA

DVC_FILE = Path("dvc.yaml")


@dataclass(frozen=True)
class Node:
    """One stage of dvc.yaml. `reads` and `writes` are paths below data/, `code` is what else it depends on."""

    name: str
    command: str
    reads: tuple[str, ...]
    code: tuple[str, ...]
    writes: tuple[str, ...]
    params: tuple[str, ...]


def read_graph(path: Path = DVC_FILE) -> dict[str, Node]:
    """Stage name -> Node, in the order of the file. Raises PalimpsestError if dvc.yaml is missing."""
    try:
        raw = YAML(typ="safe", pure=True).load(path)
    except FileNotFoundError:
        raise PalimpsestError(f"{path}: not found; run this from the project's folder") from None
    nodes: dict[str, Node] = {}
    for name, body in raw["stages"].items():
        if "foreach" not in body:
            nodes[name] = _node(name, body)
            continue
        for key, item in body["foreach"].items():
            nodes[f"{name}@{key}"] = _node(f"{name}@{key}", _fill(body["do"], {"key": key, "item": item}))
    return nodes


def edges(nodes: Mapping[str, Node]) -> set[tuple[str, str]]:
    """(from, to) for every stage that reads what another writes."""
    owner = {path: node.name for node in nodes.values() for path in node.writes}
    return {(owner[path], node.name) for node in nodes.values() for path in node.reads if path in owner}


def _node(name: str, body: dict[str, Any]) -> Node:
    deps = [_path(dep) for dep in body.get("deps", [])]
    outs = [_path(out) for kind in ("outs", "metrics", "plots") for out in body.get(kind, [])]
    strip = lambda paths: tuple(path.removeprefix(DATA) for path in paths)  # noqa: E731
    return Node(
        name=name,
        command=body["cmd"],
        reads=strip(dep for dep in deps if dep.startswith(DATA)),
        code=tuple(dep for dep in deps if not dep.startswith(DATA)),
        writes=strip(outs),
        params=tuple(body.get("params", [])),
    )


def _path(entry: Any) -> str:
    return entry if isinstance(entry, str) else next(iter(entry))


def _fill(value: Any, names: dict[str, Any]) -> Any:
    """Replace `${item.reads}` and the like by what they stand for, as DVC does."""
    if isinstance(value, dict):
        return {_fill(key, names): _fill(inner, names) for key, inner in value.items()}
    if isinstance(value, list):
        return [_fill(inner, names) for inner in value]
    if not isinstance(value, str):
        return value
    whole = re.fullmatch(r"\$\{([\w.]+)\}", value)
    if whole:
        return _look_up(whole[1], names)
    return re.sub(r"\$\{([\w.]+)\}", lambda match: str(_look_up(match[1], names)), value)


def _look_up(dotted: str, names: dict[str, Any]) -> Any:
    value: Any = names
    for part in dotted.split("."):
        value = value[part]
    return value
