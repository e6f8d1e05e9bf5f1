"""The report's part on tasks, from made-up answers; and the same numbers in the terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from pipeline.artifacts import ArtifactError
from pipeline.table import comparison
from stages.report.answers import mcnemar, wilson
from tests.stages.test_report import edit_json, edit_table, fake_answers, fake_results, report


@pytest.fixture
def root(tmp_path: Path) -> Path:
    fake_results(tmp_path / "data")
    fake_answers(tmp_path / "data")
    return tmp_path


def answers(root: Path, variant: str, task: str) -> np.ndarray:
    table = pd.read_csv(root / f"data/zeroshot/{variant}.csv")
    return table[table.task == task].correct.to_numpy(bool)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_a_binomial_test(lost: int, gained: int) -> None:
    expected = binomtest(lost, lost + gained, 0.5).pvalue if lost + gained else 1.0
    assert mcnemar(lost, gained) == pytest.approx(expected, rel=1e-9)


def test_mcnemar_by_hand() -> None:
    assert mcnemar(5, 0) == 2 / 32 and mcnemar(3, 3) == 1.0 and mcnemar(0, 0) == 1.0
    assert mcnemar(1, 7) == pytest.approx(2 * 9 / 256) and mcnemar(3000, 0) < 1e-300


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 500), st.data(), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_wilson_against_scipy(count: int, data: st.DataObject, confidence: float) -> None:
    right = data.draw(st.integers(0, count))
    expected = binomtest(right, count).proportion_ci(confidence, method="wilson")
    assert wilson(right, count, confidence) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_page_has_every_number_with_its_test(root: Path) -> None:
    text = report(root)
    section = re.sub(r"<[^>]+>", " ", text.split('id="zeroshot"')[1].split("</section>")[0])
    for task in ("arc_easy", "boolq"):
        dense, last = answers(root, "dense", task), answers(root, "compressed", task)
        lost, gained = int((dense & ~last).sum()), int((~dense & last).sum())
        p = binomtest(lost, lost + gained, 0.5).pvalue
        error = 100 * np.std(last, ddof=1) / len(last) ** 0.5
        assert f"{100 * last.mean():.1f} ± {error:.1f}, p " in section
        assert f"{task}: of 200 examples compressed loses {lost} that dense has right and gains {gained}" in section
        plot = pd.read_csv(root / "data/plots/zeroshot.csv").query(f"task == '{task}' and measure == 'accuracy'")
        row = plot[plot.variant == "compressed"].iloc[0]
        assert (row.lost, row.gained, row.p) == (lost, gained, pytest.approx(p))
        assert row.low < row.accuracy < row.high
    assert "200 examples, a package, validation, 0-shot, special tokens: none, float32, lm-eval" in section
    assert len(pd.read_csv(root / "data/plots/zeroshot.csv")) == 4 * 3, "normalised accuracy for one of the two tasks"
    assert (root / "data/pictures/zeroshot.svg").read_text().count("compressed") >= 3


def test_metrics_are_short(root: Path) -> None:
    report(root)
    metrics = json.loads((root / "data/metrics.json").read_text())
    assert metrics["masked"]["accuracy"] == {
        task: pytest.approx(answers(root, "masked", task).mean()) for task in ("arc_easy", "boolq")
    }
    assert len({one["accuracy_contract"] for one in metrics.values()}) == 1


def test_unlike_contracts_are_not_set_side_by_side(root: Path) -> None:
    edit_json(root / "data/zeroshot/removed.json", lambda one: one["tasks"]["boolq"]["contract"].update(shots=5))
    text = report(root)
    table = pd.read_csv(root / "data/plots/zeroshot.csv").query("task == 'boolq'")
    assert table.groupby("contract").variant.apply(list).tolist() in (
        [["dense", "masked", "compressed"], ["removed"]], [["removed"], ["dense", "masked", "compressed"]],
    )  # fmt: skip
    assert np.isnan(table[table.variant == "removed"].p).all()
    assert "in rows of their own: boolq of removed" in text
    assert "boolq, removed" not in (root / "data/pictures/zeroshot.svg").read_text()
    words = {name: one["accuracy_contract"] for name, one in json.loads((root / "data/metrics.json").read_text()).items()}
    assert words["dense"] == words["masked"] != words["removed"]
    rows = [line.split() for line in comparison(root).splitlines() if line.startswith("boolq")]
    assert len(rows) == 2 and len(rows[0]) > len(rows[1]) and "mean of" not in comparison(root)


def test_terminal(root: Path) -> None:
    report(root)
    lines = comparison(root).splitlines()
    boolq = next(line for line in lines if line.startswith("boolq"))
    assert re.search(r"boolq +accuracy +200 +\d+\.\d% ± 3\.\d +\d+\.\d% ± 3\.\d \(p [\d.e-]+\)", boolq)
    means = [np.mean([answers(root, name, task).mean() for task in ("arc_easy", "boolq")]) for name in ("dense", "compressed")]
    mean = next(line for line in lines if line.startswith("mean of 2")).split()
    assert (mean[4], mean[-1]) == tuple(f"{one:.1%}" for one in means)
    assert "contract   data a package, validation, dtype float32, harness lm-eval, shots 0, special tokens none" in lines
    edit_json(root / "data/zeroshot/dense.json", lambda one: one["tasks"]["boolq"]["contract"].update(data="a file"))
    assert "           boolq: data a file" in comparison(root).splitlines()


def test_without_tasks_nothing_is_said(root: Path) -> None:
    report(root)
    fake_answers(root / "data", tasks=())
    text = report(root)
    assert 'id="zeroshot"' not in text and "does not stand for accuracy on tasks" in text
    assert not (root / "data/pictures/zeroshot.svg").exists()
    assert "accuracy" not in json.loads((root / "data/metrics.json").read_text())["dense"]
    assert "McNemar" not in comparison(root)


def test_files_that_do_not_fit(root: Path) -> None:
    edit_table(root / "data/zeroshot/masked.csv", lambda table: table.iloc[:-1])
    with pytest.raises(ArtifactError, match=r"masked\.csv: 199 examples of boolq, but masked\.json has 200"):
        report(root)
    fake_answers(root / "data")
    edit_table(root / "data/zeroshot/masked.csv", lambda table: table.assign(correct=0.5))
    with pytest.raises(ArtifactError, match=r"masked\.csv: 'correct' of arc_easy has other values than 0 and 1"):
        report(root)
