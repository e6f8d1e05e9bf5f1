"""The worked example of docs/add-a-method.md does what it says, in a copy of the code."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.closure import ROOT

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
GUIDE = (ROOT / "docs/add-a-method.md").read_text()


def code(language: str, place: int) -> str:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)[place]


def apply(diff: str, root: Path) -> list[str]:
    """Apply a diff whose hunks have no line numbers; each has to fit exactly once. Returns the files."""
    files = re.split(r"^--- a/.*\n\+\+\+ b/(.*)\n", diff, flags=re.MULTILINE)[1:]
    for name, hunks in zip(files[::2], files[1::2], strict=True):
        text = (root / name).read_text()
        for hunk in filter(None, hunks.split("@@\n")):
            lines = hunk.splitlines()
            old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] in kinds) for kinds in ((" ", "-"), (" ", "+")))
            assert text.count(old) == 1, f"{name} has no such place, or many:\n{old}"
            text = text.replace(old, new)
        (root / name).write_text(text)
    return files[::2]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for folder in ("pipeline", "stages", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("params.yaml", "dvc.yaml", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    (tmp_path / "stages/allocation/depth.py").write_text(code("python", 0))
    assert len(apply(code("diff", 0), tmp_path)) == 3
    return tmp_path


def test_the_example_runs_and_passes_the_contract(copy: Path) -> None:
    test = "import numpy as np\n\nfrom stages.allocation import Allocation\nfrom stages.allocation.run import METHODS\n"
    test += f"from tests.kernels.test_allocation import layers_of\n\n\n{code('python', 1)}"
    (copy / "tests/kernels/test_depth.py").write_text(test)
    contract = "allowed_method or states_every_key or code_dependencies or spares_the_first"
    files = ("tests/kernels/test_depth.py", "tests/contract/test_graph.py")
    done = subprocess.run([*PYTEST, "-rA", *files, "-k", contract], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "PASSED tests/kernels/test_depth.py::test_depth_spares" in done.stdout
    assert "PASSED tests/contract/test_graph.py::test_every_allowed_method_exists[allocation]" in done.stdout


def test_a_forgotten_step_is_named(copy: Path) -> None:
    """What the guide says of the tests: they name what was forgotten."""
    run = copy / "stages/allocation/run.py"
    run.write_text(run.read_text().replace('    "depth": depth,\n', ""))
    done = subprocess.run([*PYTEST, "tests/contract/test_graph.py"], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 1 and "depth" in done.stdout
