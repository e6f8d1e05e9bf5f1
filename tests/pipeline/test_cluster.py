"""Studies on Dask workers that share nothing with the project but a bare git repository and a folder as DVC remote."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from ruamel.yaml import YAML

from tests.toy import REPOSITORY, make_toy, run

STUDY: dict[str, Any] = {
    "question": "Which?",
    "stages": ["evaluation@masked"],
    "result": "evaluation/masked.json",
    "vary": {"masking.method": ["wanda", "magnitude"]},
    "baseline": {"masking.method": "wanda"},
}


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """The toy project with a study, pushed to `code.git`, with the folder `results` as DVC remote."""
    root = make_toy(tmp_path / "project")
    (root / "studies").mkdir()
    YAML().dump(STUDY, root / "studies/one.yaml")
    (tmp_path / "results").mkdir()
    assert run(root, "dvc", "remote", "add", "--default", "results", str(tmp_path / "results")).returncode == 0
    commit(root)
    subprocess.run(["git", "clone", "--quiet", "--bare", str(root), str(tmp_path / "code.git")], check=True)
    git(root, "remote", "add", "origin", str(tmp_path / "code.git"))
    return root


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


def commit(root: Path) -> None:
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "a step")


class Cluster:
    """A Dask scheduler on loopback, and workers each with a home and a folder of its own."""

    def __init__(self, folder: Path):
        self.folder, self.processes = folder, {}
        folder.mkdir()
        note = folder / "scheduler.json"
        self.start(
            "scheduler",
            "dask",
            "scheduler",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--no-dashboard",
            "--scheduler-file",
            str(note),
        )
        wait_until(lambda: note.exists() and note.stat().st_size > 0)
        self.address = YAML(typ="safe").load(note)["address"]

    def worker(self, name: str, **environment: str) -> None:
        """Start one; it joins when it is ready."""
        command = ["dask", "worker", self.address, "--nthreads", "1", "--no-dashboard", "--no-nanny", "--name", name]
        self.start(name, *command, **environment)

    def start(self, name: str, *command: str, **environment: str) -> None:
        home = self.folder / name
        home.mkdir()
        python = str(Path(sys.executable).parent)
        kept = {"PATH": os.pathsep.join([python, os.environ["PATH"]]), "PYTHONPATH": str(REPOSITORY), "HOME": str(home)}
        log = (home / "log").open("w")
        program = [sys.executable, "-m", "distributed.cli.dask_" + command[1], *command[2:]]
        self.processes[name] = subprocess.Popen(program, cwd=home, env={**kept, **environment}, stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        """As a machine that goes away."""
        self.processes.pop(name).kill()

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()  # told to end together they wait for each other
            process.wait(timeout=30)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    started = Cluster(tmp_path / "cluster")
    yield started
    started.close()


def wait_until(there: Any, seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while not (value := there()):
        assert time.monotonic() < end, "not in time"
        time.sleep(0.1)
    return value


def test_two_workers_with_nothing_in_common_share_the_stages(toy: Path, cluster: Cluster, tmp_path: Path) -> None:
    cluster.worker("first", TOY_SECONDS="0.3")
    cluster.worker("second", TOY_SECONDS="0.3")
    done = run(toy, "pipeline", "study", "one", "--address", cluster.address)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    (common,) = [line for line in lines if line.startswith("common stages")]
    assert "model, tokens, capture, statistics" in common
    cells = [line for line in lines if line.startswith("[")]
    assert len(cells) == 2 and all("(ran masking, evaluation@masked)" in line for line in cells), "the rest came by the remote"
    assert list(pd.read_csv(toy / "data/studies/one.csv").cell) == ["wanda", "magnitude"]
    assert not (toy / "data/model").exists() and not (toy / "data/masks.safetensors").exists()
    assert {path.name for path in (tmp_path / "cluster").glob("*/.cache/palimpsest")} == {"palimpsest"}
    shown = run(toy, "dvc", "exp", "list", "--name-only").stdout.split()
    assert set(shown) == {"one-wanda", "one-magnitude"}
    pulled = run(toy, "dvc", "exp", "apply", "one-magnitude")
    assert pulled.returncode == 0 or "pull" in pulled.stderr
