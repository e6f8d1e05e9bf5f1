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

INPUTS = ("redundancy_blocks.csv", "redundancy_pairs.csv", "search_steps.csv", "search_windows.csv")
STEPS, WINDOWS = ["step", "block", "divergence", "removed"], ["start", "stop", "divergence"]


def choose(root: Path, cosines: dict[tuple[int, int], float], /, depth: int = 6, **removal: Any) -> dict[str, Any]:
    """Run the stage on tables in which all other pairs have cosine 0, and nothing else was measured."""
    pairs = [{"i": i, "j": j, "cosine": cosines.get((i, j), 0.0)} for i, j in combinations(range(depth + 1), 2)]
    rows = [{"block": block, "influence": 1 - cosines.get((block, block + 1), 0.0)} for block in range(depth)]
    return select(root, pd.DataFrame(pairs), pd.DataFrame(rows), **removal)


def select(
    root: Path,
    pairs: pd.DataFrame,
    blocks: pd.DataFrame,
    /,
    steps: pd.DataFrame | None = None,
    windows: pd.DataFrame | None = None,
    **removal: Any,
) -> dict[str, Any]:
    """Run the stage on these tables."""
    (root / "data").mkdir(exist_ok=True)
    empty = pd.DataFrame(columns=STEPS), pd.DataFrame(columns=WINDOWS)
    tables = blocks, pairs, empty[0] if steps is None else steps, empty[1] if windows is None else windows
    for name, table in zip(INPUTS, tables, strict=True):
        table.to_csv(root / "data" / name, index=False)
    params = stage_params("removal", {"removal": removal}, ["removal"])
    outputs = Files("removal", "outs", ("removal.json", "removal_scores.json", "removal_choices.csv"), root)
    run(params, Files("removal", "deps", INPUTS, root), outputs)  # type: ignore[arg-type]
    assert json.loads(outputs["removal.json"].read_text()).keys() == {"removed"}, "what lies behind runs again if it changes"
    scores = json.loads(outputs["removal_scores.json"].read_text())
    return {**json.loads(outputs["removal.json"].read_text()), "method": scores["method"], "scores": scores["scores"]}


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


def measured(depth: int = 6, **columns: list[float]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Tables in which each column of the adjacent pairs, or `deletion` of the blocks, is given."""
    pairs = pd.DataFrame([{"i": i, "j": j, "cosine": 0.0} for i, j in combinations(range(depth + 1), 2)])
    adjacent = (pairs.j == pairs.i + 1) & (pairs.j < depth)
    for name, values in columns.items():
        if name != "deletion":
            pairs.loc[adjacent, name] = values
    blocks = pd.DataFrame({"block": range(depth), "influence": 0.5})
    return pairs, blocks.assign(deletion=columns["deletion"]) if "deletion" in columns else blocks


def test_interchange_ties_are_broken_by_deletion(tmp_path: Path) -> None:
    """Blocks 2 and 3 share the least pair: alone, the one whose deletion costs less goes."""
    tables = measured(interchange=[0.1, 0.5, 0.2, 0.4, 0.1], deletion=[9.0, 8.0, 7.0, 0.5, 6.0, 5.0])
    result = select(tmp_path, *tables, method="interchange", count=1)
    assert result["removed"] == [4] and result["scores"] == {"1": 0.1, "2": 0.2, "3": 0.2, "4": 0.1}
    assert select(tmp_path, *tables, method="interchange", count=3)["removed"] == [1, 3, 4]
    assert select(tmp_path, *tables, method="interchange", count=1, credit="left")["scores"] == {
        "1": 0.5,
        "2": 0.2,
        "3": 0.4,
        "4": 0.1,
    }
    assert select(tmp_path, *tables, method="interchange", count=2, spacing=2)["removed"] == [1, 4]


def test_replacement_is_the_worse_direction_or_the_codes(tmp_path: Path) -> None:
    tables = measured(replacement_ij=[1.0, 0.1, 0.2, 0.9, 1.0], replacement_ji=[1.0, 0.8, 0.3, 0.2, 1.0])
    both = select(tmp_path, *tables, method="replacement", count=2)
    assert both["removed"] == [2, 3] and both["scores"] == {"1": 0.8, "2": 0.3, "3": 0.3, "4": 0.9}
    left = select(tmp_path, *tables, method="replacement", count=2, credit="left")
    assert left["removed"] == [1, 2] and left["scores"] == {"1": 0.1, "2": 0.2, "3": 0.9, "4": 1.0}


@pytest.mark.parametrize("lost", ["replacement_ij", "replacement_ji"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_half_a_replacement_is_none(lost: str, value: float, tmp_path: Path) -> None:
    """Pair 2, 3 would be the best by the direction that is finite."""
    one = [1.0, 0.3, 0.01, 0.2, 1.0]
    half = [1.0, 0.3, value, 0.2, 1.0]
    ij, ji = (half, one) if lost == "replacement_ij" else (one, half)
    for credit, scores in (("min", {"1": 0.3, "2": 0.3, "3": 0.2, "4": 0.2}), ("left", {"1": 0.3, "3": 0.2, "4": 1.0})):
        found = select(tmp_path, *measured(replacement_ij=ij, replacement_ji=ji), method="replacement", count=1, credit=credit)
        assert found["removed"] == [3] and found["scores"] == scores


def test_a_block_whose_deletion_is_not_finite_comes_last_of_equals(tmp_path: Path) -> None:
    tables = measured(interchange=[9.0, 9.0, 0.2, 9.0, 9.0], deletion=[1.0, 1.0, float("nan"), 5.0, 1.0, 1.0])
    assert select(tmp_path, *tables, method="interchange", count=1)["removed"] == [3]


def test_deletion_and_random(tmp_path: Path) -> None:
    tables = measured(deletion=[0.0, 3.0, 1.0, 2.0, 1.5, 0.0])
    assert select(tmp_path, *tables, method="deletion", count=2)["removed"] == [2, 4]
    draws = [tuple(select(tmp_path, *tables, method="random", count=2, seed=seed)["removed"]) for seed in range(12)]
    assert len(set(draws)) > 3 and all(set(draw) <= {1, 2, 3, 4} and len(draw) == 2 for draw in draws)
    assert draws[5] == tuple(select(tmp_path, *tables, method="random", count=2, seed=5)["removed"])


def test_the_channel_axis_may_choose_another_window(tmp_path: Path) -> None:
    pairs, blocks = measured()
    pairs["cosine_channel"] = ((pairs.i == 3) & (pairs.j == 5)).astype(float)
    pairs.loc[(pairs.i == 1) & (pairs.j == 3), "cosine"] = 0.9
    assert select(tmp_path, pairs, blocks, method="streamline", count=2)["removed"] == [1, 2]
    assert select(tmp_path, pairs, blocks, method="streamline", count=2, axis="channel")["removed"] == [3, 4]


def test_iterative_and_recoverable(tmp_path: Path) -> None:
    steps = pd.DataFrame([[1, 2, 0.1, 1], [1, 3, 0.2, 0], [2, 3, 0.5, 0], [2, 4, 0.3, 1]], columns=STEPS)
    windows = pd.DataFrame([[1, 3, 0.4], [2, 4, 0.3], [3, 5, 0.3], [1, 2, 0.01]], columns=WINDOWS)
    found = select(tmp_path, *measured(), steps=steps, windows=windows, method="iterative", count=2)
    assert found == {"removed": [2, 4], "scores": {"2": 0.1, "4": 0.3}, "method": "iterative"}
    assert select(tmp_path, *measured(), steps=steps, method="iterative", count=1)["removed"] == [2]
    found = select(tmp_path, *measured(), windows=windows, method="recoverable", count=2)
    assert found == {"removed": [2, 3], "scores": {"1": 0.4, "2": 0.3, "3": 0.3}, "method": "recoverable"}
    found = select(tmp_path, *measured(), windows=windows, method="recoverable", count=2, protect=[2])
    assert found["removed"] == [3, 4]
    for removal, message in (
        ({"method": "iterative", "count": 3}, r"removal\.count = 3: 2 steps were measured; set search\.steps: 3"),
        ({"method": "iterative", "count": 2, "protect": [4]}, r"removal\.protect has block 4.*search\.protect"),
        ({"method": "iterative", "count": 2, "spacing": 2}, r"removal\.spacing = 2: .*blocks 2 and 4; .*search\.spacing: 2"),
        ({"method": "recoverable", "count": 3}, r"removal\.count = 3: no window of 3 blocks.*add 3 to search\.windows"),
    ):
        with pytest.raises(PalimpsestError, match=message):
            select(tmp_path, *measured(), steps=steps, windows=windows, **removal)


def test_every_criterion_has_an_order_whatever_is_asked_for(tmp_path: Path) -> None:
    """And the first of an order is what goes where one block goes, ties too."""
    steps = pd.DataFrame([[1, 2, 0.1, 1], [1, 3, 0.2, 0]], columns=STEPS)
    tables = measured(interchange=[9.0, 9.0, 0.2, 9.0, 9.0], deletion=[1.0, 1.0, 7.0, 5.0, 1.0, 1.0])
    for removal in ({"method": "list", "blocks": [1]}, {"method": "none", "count": 99}, {"method": "interchange", "count": 1}):
        found = select(tmp_path, *tables, steps=steps, **removal)
        order = json.loads((tmp_path / "data/removal_scores.json").read_text())["order"]
        assert {"deletion", "interchange", "iterative", "shortgpt"} <= set(order)
    assert found["removed"] == [3] == [block for block, _ in order["interchange"]][:1], "2 and 3 tie; 3 costs less to delete"


@pytest.mark.parametrize("method", ["replacement", "interchange", "deletion"])
def test_what_was_not_measured_names_the_key(method: str, tmp_path: Path) -> None:
    with pytest.raises(PalimpsestError, match=r"removal\.method needs '\w+', .*redundancy\.swaps: true"):
        choose(tmp_path, {}, method=method, count=1)


def test_spacing_that_leaves_too_few(tmp_path: Path) -> None:
    with pytest.raises(PalimpsestError, match=r"removal\.count = 3: only 2 of 4.*removal\.spacing = 1"):
        choose(tmp_path, {}, method="shortgpt", count=3, spacing=1)


def test_what_every_criterion_would_remove(tmp_path: Path) -> None:
    """By whatever method is chosen: those whose scores are there, at 1, 3 and 5 and at the count asked for."""
    select(tmp_path, *measured(interchange=[0.1, 0.5, 0.2, 0.4, 0.1]), method="none", count=2)
    table = pd.read_csv(tmp_path / "data" / "removal_choices.csv")
    assert set(table.criterion) == {"random", "streamline", "shortgpt", "interchange"}
    assert set(table["count"]) == {1, 2, 3}, "5 of the 4 that may go are too many"
    rows = table.loc[(table.criterion == "interchange") & (table["count"] == 2)]
    assert list(rows.block) == [1, 4] and list(rows.score) == [0.1, 0.1]
