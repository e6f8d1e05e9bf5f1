"""The project's own DAG under the real DVC, with stages that take milliseconds: what they write depends on all they may read."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from ruamel.yaml import YAML

from pipeline.artifacts import write_table
from pipeline.graph import read_graph

REPOSITORY = Path(__file__).parent.parent
COPIED = (".dvc/config", ".dvc/.gitignore", ".dvcignore", ".gitignore", "dvc.yaml", "params.yaml", "pipeline", "stages")
# Writes each output from the content of every input and of every section of params.yaml that dvc.yaml declares.
STAGE = """\
import hashlib, json, os, re, sys, time
from pathlib import Path
node = json.loads(Path("nodes.json").read_text())[sys.argv[1]]
sections = dict(part.split(":", 1) for part in re.split(r"\\n(?=[a-z]+:)", Path("params.yaml").read_text()) if part[0] != "#")
seen = hashlib.sha256(sys.argv[1].encode())
for name in node["params"]:
    seen.update(sections[name].encode())
for name in node["reads"]:
    path = Path("data", name)
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        seen.update(file.read_bytes())
print("  working", flush=True)
time.sleep(float(os.environ.get("TOY_SECONDS", "0")))
if os.environ.get("TOY_FAILS") == sys.argv[1]:
    print(f"\\n{sys.argv[1]}: data/x.csv: no column 'y'; run z again\\n", file=sys.stderr)
    sys.exit(1)
for name in node["writes"]:
    path = Path("data", name) if "." in name else Path("data", name, "picture.svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    word = hashlib.sha256(seen.digest() + name.encode()).hexdigest()
    loss = [1 + digit / 16 for digit in hashlib.sha256(word.encode()).digest()[:4]]
    judged = {"perplexity": sum(loss), "interval": [1, 9], "windows": loss, "contract": {"corpus": "toy"}, "sparsity": 0.5}
    path.write_text(json.dumps({"value": 1.5, "word": word, **judged}) if path.suffix == ".json"
                    else f"block,word\\n0,{word}\\n1,{word}\\n" if path.suffix == ".csv"
                    else f"<svg xmlns='http://www.w3.org/2000/svg'><text y='9'>{word}</text></svg>")
"""


def make_toy(root: Path) -> Path:
    """A project in `root` with nothing run yet."""
    for name in COPIED:
        source, target = REPOSITORY / name, root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, target)
    for own in ("corpus", "tasks"):
        (root / "data" / own).mkdir(parents=True)
        (root / "data" / own / "README.md").write_text("text\n")
    (root / "stage.py").write_text(STAGE)
    graph = read_graph(root / "dvc.yaml")
    nodes = {name: {"params": node.params, "reads": node.reads, "writes": node.writes} for name, node in graph.items()}
    (root / "nodes.json").write_text(json.dumps(nodes))
    # Shared code is left out of the deps: DVC would spend most of a test's time on writing it into dvc.lock.
    dvc = re.sub(r"(pipeline|stages/decoder)/\w+\.py,?\s*", "", (root / "dvc.yaml").read_text().split("\nplots:")[0])
    quick = f"{sys.executable} -I -S stage.py"
    (root / "dvc.yaml").write_text(dvc.replace("python -m pipeline.runner", quick))
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    return root


def write_removal_inputs(data: Path) -> None:
    """What the real stage `removal` reads, for a model of six blocks of which nothing costly was measured."""
    pairs = [(i, j, 1 - 0.01 * (j - i)) for i in range(7) for j in range(i + 1, 7)]
    write_table(data / "redundancy_pairs.csv", pd.DataFrame(pairs, columns=["i", "j", "cosine"]))
    write_table(data / "redundancy_blocks.csv", pd.DataFrame({"block": range(6), "influence": 0.1, "influence_error": 0.0}))
    write_table(data / "search_steps.csv", pd.DataFrame(columns=["step", "block", "divergence", "removed"]))
    write_table(data / "search_windows.csv", pd.DataFrame(columns=["start", "stop", "divergence"]))


def copy_toy(toy: Path, root: Path) -> Path:
    """The same project elsewhere, with its cache and results."""
    shutil.copytree(toy, root, symlinks=True, ignore=shutil.ignore_patterns("tmp", ".prefect"))
    return root


def set_key(root: Path, dotted: str, value: Any) -> None:
    """Change one key of params.yaml, and nothing else in it."""
    yaml = YAML()
    params = yaml.load(root / "params.yaml")
    section, *parts = dotted.split(".")
    inner = params[section]
    for part in parts[:-1]:
        inner = inner[part]
    assert inner[parts[-1]] != value, "a change that changes nothing tests nothing"
    inner[parts[-1]] = value
    yaml.dump(params, root / "params.yaml")


def run(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE ...` in the project, without what the caller's environment says of Prefect."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    inherited["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", "")])  # dvc.yaml says `python`
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=root,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
