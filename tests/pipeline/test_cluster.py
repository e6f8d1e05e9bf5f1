"""Studies on Dask workers that share nothing with the project but a bare git repository and a folder as DVC remote."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
from ruamel.yaml import YAML

from pipeline.errors import PalimpsestError
from pipeline.reproduce import reproduce
from pipeline.study.cells import Job, Outcome
from pipeline.study.elsewhere import find_source
from pipeline.study.mapping import check_dask, finish
from pipeline.study.plan import Cell, Plan
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


def test_workers_with_nothing_in_common_share_the_stages_and_go_on_when_one_dies(toy: Path, cluster: Cluster) -> None:
    """The first worker's stages would take longer than the test; it is killed while one runs."""
    cluster.worker("first", TOY_SECONDS="600")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    command = [sys.executable, "-m", "pipeline", "study", "one", "--address", cluster.address]
    study = subprocess.Popen(command, cwd=toy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    home = str(cluster.folder / "first")
    wait_until(lambda: stages_below(home))
    cluster.worker("second", TOY_SECONDS="0.3")
    cluster.worker("third", TOY_SECONDS="0.3")
    cluster.kill("first")
    wait_until(lambda: not stages_below(home))  # they end with their worker

    output, _ = study.communicate(timeout=240)
    assert study.returncode == 0, output
    (common,) = [line for line in output.splitlines() if line.startswith("common stages")]
    assert "model, tokens, capture, statistics" in common
    cells = [line for line in output.splitlines() if line.startswith("[")]
    assert len(cells) == 2 and all("(ran masking, evaluation@masked)" in line for line in cells), "the rest came by the remote"
    assert list(pd.read_csv(toy / "data/studies/one.csv").cell) == ["wanda", "magnitude"]
    assert not (toy / "data/model").exists() and set(os.listdir(cluster.folder / "second/.cache")) == {"palimpsest"}

    shown = run(toy, "dvc", "exp", "list", "--name-only").stdout.split()
    assert set(shown) == {"one-wanda", "one-magnitude"}
    again = run(toy, "pipeline", "study", "one", "--address", cluster.address)
    assert again.returncode == 0 and again.stdout.count("all from the cache") == 3, "experiments of a first run are replaced"
    for how in (["pull", "origin"], ["apply"]):  # `apply` complains of what the cell did not run
        run(toy, "dvc", "exp", *how, "one-magnitude")
    answers = reproduce(["evaluation@masked"], root=toy, say=lambda line: None)
    assert len(answers) == 9 and set(answers.values()) == {"unchanged"}


def stages_below(folder: str) -> list[psutil.Process]:
    """Stages of the toy that run somewhere below `folder`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "stage.py" in process.cmdline() and process.cwd().startswith(folder):
                found.append(process)
    return found


def test_what_workers_could_not_get_is_refused_before_any_work(toy: Path, tmp_path: Path) -> None:
    """Each refusal, and how it is mended; the address is looked at last."""

    def refused(*options: str) -> str:
        with pytest.raises(PalimpsestError) as error:
            find_source(*options or (None,), root=toy)
        return str(error.value)

    assert find_source(None, toy).remote == "results"
    assert "no DVC remote 'elsewhere'" in refused("elsewhere") and "there are: results" in refused("elsewhere")
    (tmp_path / "results").rmdir()
    assert f"{tmp_path / 'results'} is not there" in refused()
    (tmp_path / "results").mkdir()
    (toy / "data/corpus/mine.txt").write_text("text")
    assert "mine.txt" in refused() and "git add --force" in refused()
    (toy / "data/corpus/mine.txt").unlink()
    (toy / "params.yaml").write_text((toy / "params.yaml").read_text() + "\n")
    assert "params.yaml" in refused() and "commit and push" in refused()
    commit(toy)
    assert "is not at git remote 'origin'" in refused()
    git(toy, "push", "--quiet", "origin", "HEAD")
    revision = find_source(None, toy).revision
    (tmp_path / "code.git").rename(tmp_path / "gone.git")
    assert "does not answer" in refused()
    git(toy, "remote", "remove", "origin")
    assert "no git remote 'origin'" in refused() and len(revision) == 40


def test_a_cell_that_takes_every_worker_along_is_a_row_that_says_so() -> None:
    from distributed.scheduler import KilledWorker

    handle: Future[Outcome] = Future()
    handle.set_exception(KilledWorker("one-wanda", None, 3))  # type: ignore[arg-type]
    cell = Cell("wanda", {}, {}, None)
    outcome = finish(handle, Job("one-wanda", cell, Plan(**STUDY), Path(), None))
    assert outcome.cell is cell and outcome.result is None and "every Dask worker that tried it died" in outcome.error


def test_an_address_where_no_scheduler_answers_is_refused() -> None:
    for address in ("tcp://127.0.0.1:9", "nonsense://x"):
        with pytest.raises(PalimpsestError, match=f"--address {address}: no Dask scheduler answers there"):
            check_dask(address)
