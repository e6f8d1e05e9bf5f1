"""removal.json by every criterion, and one clear message for what cannot be."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from pipeline.errors import PalimpsestError
from pipeline.files import Files
from pipeline.params import ParamsError, stage_params
from stages.removal.run import run

INPUTS = ("redundancy_blocks.csv", "redundancy_pairs.csv")


def choose(root: Path, cosines: dict[tuple[int, int], float], /, depth: int = 6, **removal: Any) -> dict[str, Any]:
    """Run the stage on tables in which all other pairs have cosine 0."""
    (root / "data").mkdir(exist_ok=True)
    pairs = [{"i": i, "j": j, "cosine": cosines.get((i, j), 0.0)} for i, j in combinations(range(depth + 1), 2)]
    pd.DataFrame(pairs).to_csv(root / "data" / "redundancy_pairs.csv", index=False)
    rows = [{"block": block, "influence": 1 - cosines.get((block, block + 1), 0.0)} for block in range(depth)]
    pd.DataFrame(rows).to_csv(root / "data" / "redundancy_blocks.csv", index=False)
    params = stage_params("removal", {"removal": removal}, ["removal"])
    outputs = Files("removal", "outs", ("removal.json",), root)
    run(params, Files("removal", "deps", INPUTS, root), outputs)  # type: ignore[arg-type]
    return json.loads(outputs["removal.json"].read_text())


def test_none(tmp_path: Path) -> None:
    assert choose(tmp_path, {}, method="none") == {"removed": [], "scores": {}, "method": "none"}


@pytest.mark.parametrize(
    ("given", "removed"),
    [
        ([4], [4]),
        ([-1], [5]),
        ([0, -1], [0, 5]),
        ([3, 1, 2], [1, 2, 3]),
        ([-6, 0], [0]),
        ([1, 1, -5], [1]),
        ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
    ],
)
def test_a_list_may_count_from_the_end_and_touch_protected_blocks(given: list[int], removed: list[int], tmp_path: Path) -> None:
    assert choose(tmp_path, {}, method="list", blocks=given) == {"removed": removed, "scores": {}, "method": "list"}


def test_streamline(tmp_path: Path) -> None:
    result = choose(tmp_path, {(0, 2): 0.99, (1, 3): 0.5, (2, 4): 0.75, (4, 6): 0.9}, method="streamline", count=2)
    assert result == {"removed": [2, 3], "scores": {"1": 0.5, "2": 0.75, "3": 0.0}, "method": "streamline"}
    free = choose(tmp_path, {(0, 2): 0.99, (4, 6): 0.9}, method="streamline", count=2, protect=[])
    assert free["removed"] == [0, 1] and set(free["scores"]) == {"0", "1", "2", "3", "4"}
    assert choose(tmp_path, {(0, 2): 0.9, (4, 6): 0.99}, method="streamline", count=2, protect=[])["removed"] == [4, 5]


def test_shortgpt(tmp_path: Path) -> None:
    cosines = {(0, 1): 0.99, (1, 2): 0.1, (2, 3): 0.7, (3, 4): 0.3, (4, 5): 0.8}
    result = choose(tmp_path, cosines, method="shortgpt", count=2)
    assert result["removed"] == [2, 4] and result["scores"] == pytest.approx({"1": 0.9, "2": 0.3, "3": 0.7, "4": 0.2})


def test_all_that_is_not_protected_may_go(tmp_path: Path) -> None:
    for method in ("streamline", "shortgpt"):
        assert choose(tmp_path, {}, method=method, count=4)["removed"] == [1, 2, 3, 4]
        assert choose(tmp_path, {}, method=method, count=5, protect=[])["removed"] == [0, 1, 2, 3, 4], "one always stays"


@pytest.mark.parametrize(
    ("removal", "message"),
    [
        ({"method": "list", "blocks": [6]}, r"removal\.blocks = 6: the model has 6 blocks; allowed: -6 to 5"),
        ({"method": "list", "blocks": [2, -7]}, r"removal\.blocks = -7: .*allowed: -6 to 5"),
        ({"method": "list", "blocks": [0, 1, 2, 3, 4, 5]}, r"removal\.blocks names all 6 blocks"),
        (
            {"method": "streamline", "count": 5},
            r"removal\.count = 5: the model has 6 blocks, 2 of them protected; allowed: 1 to 4",
        ),
        ({"method": "shortgpt", "count": 6, "protect": []}, r"removal\.count = 6: .*allowed: 1 to 5"),
        (
            {"method": "streamline", "count": 2, "protect": [1, 3, 5]},
            r"removal\.count = 2: no 2 adjacent blocks.*protect \[1, 3, 5\]",
        ),
        ({"method": "streamline", "count": 1, "protect": [9]}, r"removal\.protect = 9: .*allowed: -6 to 5"),
        (
            {"method": "shortgpt", "count": 1, "protect": [0, 1, 2, 3, 4, 5]},
            r"none can go: set removal\.method: none or protect fewer",
        ),
    ],
)
def test_what_cannot_be_says_so_in_one_line(removal: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(PalimpsestError, match=message) as caught:
        choose(tmp_path, {}, **removal)
    assert "\n" not in str(caught.value) and not (tmp_path / "data" / "removal.json").exists()


def test_a_list_without_blocks_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match="method 'list' needs blocks"):
        choose(tmp_path, {}, method="list")


def test_a_model_of_one_block(tmp_path: Path) -> None:
    with pytest.raises(PalimpsestError, match=r"removal\.count = 3: the model has 1 blocks.*removal\.method: none"):
        choose(tmp_path, {}, depth=1, method="streamline")
    assert choose(tmp_path, {}, depth=1, method="none")["removed"] == []
