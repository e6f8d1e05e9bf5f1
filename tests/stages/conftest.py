"""Projects on tiny checkpoints in which every stage has run, made once per family and copied for tests that change them."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.project import Project

Finished = Callable[..., Project]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from threads, and lose much where other work shares the processor."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """`finished(family)`: blocks 1 and 2 of 4 removed, half of the weights masked, every stage run. Do not change it."""
    made: dict[str, Project] = {}

    def make(family: str) -> Project:
        if family not in made:
            project = Project(tmp_path_factory.mktemp(family), family)
            project.run_until("zeroshot@compressed", removal={"method": "list", "blocks": [1, 2]})
            made[family] = project
        return made[family]

    return make


@pytest.fixture
def copied(finished: Finished, tmp_path: Path) -> Finished:
    """`copied(family)`: a finished project that the test may change."""

    def make(family: str) -> Project:
        return copy_project(finished(family), tmp_path / f"{family}-copy")

    return make


def copy_project(project: Project, root: Path) -> Project:
    """The same files and parameters below another folder."""
    shutil.copytree(project.root, root)
    twin = copy.copy(project)
    twin.root, twin.data, twin.params = root, root / "data", copy.deepcopy(project.params)
    return twin
