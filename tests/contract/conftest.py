"""One toy project with everything run once, copied for each test that changes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.reproduce import reproduce
from tests.toy import copy_toy, make_toy


@pytest.fixture(scope="session")
def finished_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Do not change it: `toy` gives a copy."""
    root = make_toy(tmp_path_factory.mktemp("toy"))
    answers = reproduce(root=root, say=lambda line: None)
    assert set(answers.values()) == {"ran"}
    return root


@pytest.fixture
def toy(finished_toy: Path, tmp_path: Path) -> Path:
    """A finished project that the test may change."""
    return copy_toy(finished_toy, tmp_path / "project")
