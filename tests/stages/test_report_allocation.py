"""What the report says of an allocation that masks round, and of rules whose knobs are turned."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from pipeline.artifacts import write_table
from pipeline.params import read_params
from stages.report.columns import Columns
from stages.report.shares import per_block_score, read_shares
from tests.stages.test_report import MATRICES, ROOT, edit_table, fake_results, report

BLOCKS = 10
ASKED = np.linspace(0.42, 0.58, BLOCKS)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    fake_results(tmp_path / "data", blocks=BLOCKS, removed=(7,))
    edit_table(tmp_path / "data/allocation.csv", lambda table: table.assign(sparsity=ASKED, score=-ASKED))
    return tmp_path


def _picture(root: Path) -> str:
    return (root / "data/pictures/sparsity.svg").read_text()


def _plain(page: str) -> str:
    return re.sub(r"\s+", " ", page)


def _turned(**knobs: Any) -> dict[str, dict[str, Any]]:
    """Overrides for `allocation`: a method, or keys of a rule's section."""
    kept = read_params(ROOT / "params.yaml")["allocation"]
    return {"allocation": {name: {**kept[name], **one} if isinstance(one, dict) else one for name, one in knobs.items()}}


def test_a_pattern_that_makes_the_allocation_uniform_is_said_and_drawn(root: Path) -> None:
    edit_table(root / "data/masks.csv", lambda table: table.assign(sparsity=0.5))
    masking = {"masking": {"method": "sparsegpt", "pattern": "2:4"}}
    said = _plain(report(root, {"allocation": {"method": "owl"}, **masking}))
    assert "(SparseGPT in the pattern 2:4, OWL allocation made uniform by it)" in said
    assert "Every block gives up 50.00%" in said and "From 42.00%" not in said
    assert "42.00% to 58.00% became 50.00% everywhere, so that the allocation is uniform." in said
    assert "Sparsity and score have a rank correlation" not in said, "every block gave up the same"
    assert "20 of 20 matrices gave up another share" in said
    assert f"{MATRICES[0]} of block 0 most of all: 50.00% instead of 42.00%" in said
    picture = _picture(root)
    assert "<title>block 0: 50.00%</title>" in picture and "<title>block 0, asked: 42.00%</title>" in picture


def test_a_pattern_that_keeps_some_of_the_allocation_is_ranked_by_what_is_left(root: Path) -> None:
    """Of 8, block 0, with the highest score, gives up 3 and all others 4."""
    edit_table(root / "data/masks.csv", lambda table: table.assign(sparsity=np.where(table.block == 0, 0.375, 0.5)))
    said = _plain(report(root, {"allocation": {"method": "owl"}, "masking": {"pattern": "4:8"}}))
    assert "OWL allocation rounded by it)" in said and "From 37.50% (block 0) to 50.00% (block 1)" in said
    assert "to whole n of 8: 42.00% to 58.00% became 37.50% to 50.00%." in said
    assert "block 0, with the highest score, gives up 37.50%" in said
    expected = np.corrcoef([0, *[5] * 9], np.arange(10)[::-1])[0, 1]
    assert f"rank correlation of {expected:.3f}".replace("-", "−") in said
    plot = pd.read_csv(root / "data/plots/sparsity.csv")
    assert plot[plot.series == "asked by the allocation"].sparsity.tolist() == pytest.approx(ASKED.tolist())
    assert plot[plot.series == "taken by the masks"].sparsity.tolist() == [0.375, *[0.5] * 9]


def test_masks_that_do_as_asked_have_no_second_mark(root: Path) -> None:
    """Within half of the last digit shown, and no false order among blocks that were asked for the same."""
    steps = np.where(np.arange(BLOCKS) < 5, 0.45, 0.55)
    edit_table(root / "data/allocation.csv", lambda table: table.assign(sparsity=steps, score=-table.block))
    edit_table(root / "data/masks.csv", lambda table: table.assign(sparsity=steps[table.block] + 1e-6 * table.block))
    said = _plain(report(root, {"allocation": {"method": "owl"}}))
    assert "OWL allocation)" in said and "gave up another share" not in said and "asked: " not in _picture(root)
    expected = np.corrcoef(steps, -np.arange(BLOCKS))[0, 1]
    assert f"rank correlation of {expected:.3f}".replace("-", "−") in said


def test_unstructured_masks_that_miss_the_allocation_are_drawn_as_they_are(root: Path) -> None:
    edit_table(root / "data/masks.csv", lambda table: table.assign(sparsity=ASKED[table.block] - 0.002 * (table.block == 4)))
    said = _plain(report(root, {"allocation": {"method": "owl"}, "masking": {"rounding": "published"}}))
    assert f"block 4: {100 * ASKED[4] - 0.2:.2f}%" in _picture(root) and "made uniform" not in said
    assert "The masks do not give the allocation to the letter" in said and "2 of 20 matrices gave up another share" in said


def test_matrices_with_shares_of_their_own_are_compared_one_by_one(root: Path) -> None:
    """Each block is asked for half, its matrices are not: 2:4 makes them all equal, and blocks hide it."""
    rows = [
        [block, name, 10_000, float(block), share]
        for block in range(BLOCKS)
        for name, share in zip(MATRICES, (0.4, 0.6), strict=True)
    ]
    write_table(root / "data/allocation.csv", pd.DataFrame(rows, columns=["block", "matrix", "parameters", "score", "sparsity"]))
    edit_table(root / "data/masks.csv", lambda table: table.assign(sparsity=0.5))
    said = _plain(report(root, {"allocation": {"method": "owl", "granularity": "linear"}, "masking": {"pattern": "2:4"}}))
    assert "OWL allocation made uniform by it" in said and "40.00% to 60.00% became 50.00% everywhere" in said
    assert f"block 3, {MATRICES[0]}: 50.00%" in _picture(root)


def test_shares_of_blocks_are_weighted_by_parameters() -> None:
    allocation = Columns({"block": [0, 1], "matrix": ["", ""], "parameters": [400, 8], "sparsity": [0.5, 0.1]}, 2)
    masks = {"block": [1, 0, 0], "matrix": ["a", "a", "b"], "parameters": [8, 300, 100], "sparsity": [0.1, 0.5, 0.25]}
    shares = read_shares(allocation, Columns(masks, 3))
    assert shares.taken.tolist() == pytest.approx([0.4375, 0.1]) and shares.missed.tolist() == [True, False]
    assert shares.asked_each.tolist() == [0.1, 0.5, 0.5] and shares.missed_each.tolist() == [False, False, True]
    score = Columns({"block": [0, 0, 0, 1], "parameters": [300, 100, 5, 7], "score": [1.0, 5.0, np.nan, np.nan]}, 4)
    assert per_block_score(score)[0] == pytest.approx(2.0) and np.isnan(per_block_score(score)[1])


# How the other rules would rank the blocks, while uniform is in use.


def test_pals_that_spares_low_percentiles_ranks_the_other_way_round(root: Path) -> None:
    """The stream grows with depth: block 9 has the highest percentile."""
    report(root, _turned(pals={"sign": "spare_high"}))
    assert "PALS, block 9: 1.00" in _picture(root)
    report(root, _turned(pals={"sign": "spare_low"}))
    assert "PALS, block 9: 0.00" in _picture(root) and "PALS, block 0: 1.00" in _picture(root)


def test_pals_by_the_inputs_of_matrices_has_a_row(root: Path) -> None:
    """Pooled over the block they stand at the place `linears`; there block 4 is the highest."""
    pooled = pd.DataFrame({"block": range(BLOCKS), "place": "linears", "width": 576, "parameters": 0, "p99": 1.0})
    pooled.loc[4, "p99"] = 8.0
    edit_table(root / "data/statistics.csv", lambda table: pd.concat([table, pooled]))
    report(root, _turned(pals={"source": "linear_inputs"}))
    assert "PALS, block 4: 1.00" in _picture(root) and "PALS, block 9: 0.44" in _picture(root)


@pytest.mark.parametrize(("source", "highest"), [("block_output", 2), ("linear_inputs", 6)])
def test_pals_by_windows_reads_their_own_percentiles(root: Path, source: str, highest: int) -> None:
    """Outputs: block 2. Inputs of matrices: block 6 by the mean weighted by width, where plain means would say block 1."""

    def change(table: pd.DataFrame) -> pd.DataFrame:
        table["p99_per_sequence"] = np.where((table.place == "output") & (table.block == 2), 50.0, 1.0)
        wide, narrow = table.place == MATRICES[0], table.place == MATRICES[1]
        table.loc[wide, "width"], table.loc[narrow, "width"] = 900, 100
        table.loc[wide & (table.block == 6), "p99_per_sequence"] = 3.0
        table.loc[narrow & (table.block == 1), "p99_per_sequence"] = 9.0
        pooled = pd.DataFrame({"block": range(BLOCKS), "place": "linears", "width": 1000, "parameters": 0, "p99": 1.0})
        return pd.concat([table, pooled])

    edit_table(root / "data/statistics.csv", change)
    report(root, _turned(pals={"source": source, "pooling": "mean_of_sequences"}))
    assert f"PALS, block {highest}: 1.00" in _picture(root)


def test_a_corrected_window_ranks_by_its_own_exponents(root: Path) -> None:
    """Where the exponent is least, AlphaPruning spares; a fit at the middle knows no window."""
    up, down = np.arange(BLOCKS) + 2.0, 20.0 - np.arange(BLOCKS)
    columns = {"alpha_peak": up, "alpha_peak_corrected": down, "alpha_mid": up}
    edit_table(root / "data/importance.csv", lambda table: table.assign(**columns))
    for knobs, spared in [({}, 0), ({"window": "corrected"}, 9), ({"window": "corrected", "fit": "mid"}, 0)]:
        report(root, _turned(alphapruning=knobs))
        assert f"AlphaPruning, block {spared}: 1.00" in _picture(root)


@pytest.mark.parametrize(
    ("method", "knobs", "name", "spares_high"),
    [
        ("owl", {}, "OWL", True),
        ("dlp", {}, "DLP", False),
        ("alphapruning", {}, "AlphaPruning", False),
        ("pals", {}, "PALS", True),
        ("pals", {"sign": "spare_low"}, "PALS", False),
        ("random", {}, "random", True),
    ],
)
def test_the_rule_in_use_is_ranked_by_the_score_it_went_by(
    root: Path, method: str, knobs: dict[str, Any], name: str, spares_high: bool
) -> None:
    """Whatever the other tables say: block 3 has the highest score of allocation.csv, block 5 the lowest."""
    score = np.array([4.0, 5, 6, 9, 3, 1, 2, 7, 8, 4.5])
    edit_table(root / "data/allocation.csv", lambda table: table.assign(score=score))
    report(root, _turned(method=method, **{method: knobs}))
    high, low = ("1.00", "0.00") if spares_high else ("0.00", "1.00")
    assert f"▸ {name}<" in _picture(root)
    assert f"{name}, block 3: {high}" in _picture(root) and f"{name}, block 5: {low}" in _picture(root)
