"""Sparsity shared out over the blocks: the exact budget, and PALS."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.errors import PalimpsestError
from stages.allocation import Allocation, Pals
from stages.allocation.budget import shift_to_budget
from stages.allocation.pals import block_scores, normalise, pals
from stages.allocation.uniform import uniform

NORMALISATIONS = ["zscore", "minmax", "rank"]
numbers = st.lists(st.floats(-3, 3), min_size=1, max_size=40)


def table(scores: list[float], column: str = "p99") -> pd.DataFrame:
    """statistics.csv with one score per block at its output, other places with scores that would mislead."""
    rows: list[dict[str, Any]] = []
    for block, score in enumerate(scores):
        rows.append({"block": block, "place": "input", "width": 4, "parameters": 0, column: -score})
        rows.append({"block": block, "place": "output", "width": 4, "parameters": 0, column: score})
        rows.append({"block": block, "place": "a", "width": 4, "parameters": 8, column: 7.0})
    return pd.DataFrame(rows)


def allocate(scores: list[float], sparsity: float = 0.5, sizes: list[int] | None = None, **knobs: Any) -> np.ndarray:
    weights = np.array(sizes or [10] * len(scores), dtype=float)
    wanted = Allocation(method="pals", sparsity=sparsity, pals=Pals(**knobs))
    return pals(table(scores), weights, wanted)[1]


@settings(max_examples=200, deadline=None)
@given(numbers, st.floats(0, 1), st.floats(0, 0.5), st.randoms())
def test_the_budget_is_met_exactly_within_the_bounds(raw: list[float], target: float, bound: float, random: Any) -> None:
    sizes = np.array([random.choice([1, 7, 1000, 123_456_789]) for _ in raw], dtype=float)
    low, high = max(0.0, target - bound), min(1.0, target + bound)
    shares = shift_to_budget(np.array(raw), sizes, target, low, high)
    assert (shares @ sizes) / sizes.sum() == pytest.approx(target, abs=1e-12)
    assert (shares >= low).all() and (shares <= high).all()
    order = np.argsort(raw, kind="stable")
    assert (np.diff(shares[order]) >= 0).all(), "who wished for more gets no less"


def test_the_budget_by_hand() -> None:
    """Wishes 0.2 and 0.8, target 0.5, bounds 0.4 and 0.6: both at a bound. Three to one in size: the shift is -0.05."""
    np.testing.assert_allclose(shift_to_budget(np.array([0.2, 0.8]), np.ones(2), 0.5, 0.4, 0.6), [0.4, 0.6])
    found = shift_to_budget(np.array([0.5, 0.7]), np.array([3.0, 1.0]), 0.5, 0.0, 1.0)
    np.testing.assert_allclose(found, [0.45, 0.65], atol=1e-15)


def test_uniform() -> None:
    score, shares = uniform(table([1.0, 2.0, 3.0]), np.ones(3), Allocation(sparsity=0.37))
    assert score.tolist() == [0, 0, 0] and shares.tolist() == [0.37] * 3


@pytest.mark.parametrize("normalisation", NORMALISATIONS)
@pytest.mark.parametrize("projection", ["shift", "none"])
def test_equal_scores_give_the_target_to_all(normalisation: str, projection: str) -> None:
    shares = allocate([3.0] * 5, 0.3, [1, 2, 3, 4, 5], normalisation=normalisation, projection=projection)
    np.testing.assert_allclose(shares, 0.3, atol=1e-15)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=30), st.sampled_from(NORMALISATIONS), st.sampled_from(["shift", "none"]))
def test_higher_scores_are_pruned_no_more(scores: list[float], normalisation: str, projection: str) -> None:
    shares = allocate(scores, 0.6, normalisation=normalisation, projection=projection)
    assert (np.diff(shares[np.argsort(scores, kind="stable")]) <= 1e-12).all()
    assert (abs(shares - 0.6) <= 0.05 + 1e-12).all()
    if projection == "shift":
        assert shares.mean() == pytest.approx(0.6, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=2, max_size=20), st.floats(0.01, 100), st.floats(-50, 50))
@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_only_relative_scores_matter(normalisation: str, scores: list[int], scale: float, offset: float) -> None:
    changed = [scale * one + offset for one in scores]
    assume(len(set(changed)) == len(set(scores)))
    before = allocate([float(one) for one in scores], normalisation=normalisation)
    np.testing.assert_allclose(allocate(changed, normalisation=normalisation), before, atol=1e-9)


def test_a_block_that_stands_out_is_spared_as_far_as_the_bound_goes() -> None:
    """Without the shift the rest would be pruned by more than the target, and the mean would be missed."""
    scores = [1.0] * 31 + [1000.0]
    shares = allocate(scores, 0.5)
    assert shares[-1] == pytest.approx(0.45, abs=1e-15)
    assert shares.mean() == pytest.approx(0.5, abs=1e-12)
    np.testing.assert_allclose(shares[:-1], 0.5 + 0.05 / 31, atol=1e-12)


def test_clipping_alone_by_hand() -> None:
    """z of [0, 0, 0, 4] is [-1/√3, .., √3]; slope 0.05 gives 0.5 + 0.0289 and 0.5 - 0.0866, clipped to 0.45."""
    shares = allocate([0.0, 0.0, 0.0, 4.0], projection="none")
    np.testing.assert_allclose(shares, [0.5 + 0.05 / 3**0.5] * 3 + [0.45], atol=1e-15)


def test_normalisation_by_hand() -> None:
    score = np.array([1.0, 2.0, 2.0, 11.0])
    np.testing.assert_allclose(normalise(score, "zscore"), (score - 4) / np.sqrt((9 + 4 + 4 + 49) / 4))
    np.testing.assert_allclose(normalise(score, "minmax"), [-1, -0.8, -0.8, 1])
    np.testing.assert_allclose(normalise(score, "rank"), [-1, 0, 0, 1])


def test_scores_come_from_the_place_asked_for() -> None:
    statistics = pd.DataFrame(
        [
            (1, "output", 4, 0, 20.0), (0, "input", 4, 0, 1.0), (0, "output", 4, 0, 10.0), (1, "input", 4, 0, 2.0),
            (0, "q", 4, 8, 3.0), (0, "down", 12, 8, 7.0), (1, "q", 4, 8, 5.0), (1, "down", 12, 8, 9.0), (1, "cold", 0, 8, None),
        ],
        columns=["block", "place", "width", "parameters", "p99.9"],
    )  # fmt: skip
    assert block_scores(statistics, "block_input", 99.9).tolist() == [1.0, 2.0]
    assert block_scores(statistics, "block_output", 99.9).tolist() == [10.0, 20.0]
    linear = block_scores(statistics, "linear_inputs", 99.9)
    assert linear.tolist() == [(3 * 4 + 7 * 12) / 16, (5 * 4 + 9 * 12) / 16], "an expert that saw no token counts nothing"


def test_a_percentile_that_was_not_measured_is_refused() -> None:
    with pytest.raises(PalimpsestError, match=r"allocation\.pals\.percentile = 98.*statistics\.percentiles has 99"):
        block_scores(table([1.0]), "block_output", 98.0)


@pytest.mark.parametrize(("sparsity", "bound"), [(0.9, 0.1), (0.95, 0.05), (0.7, 0.3), (0.1, 0.1), (0.05, 0.05), (0.0, 0.05)])
def test_a_bound_that_just_fits_is_allowed(sparsity: float, bound: float) -> None:
    """1 - 0.9 is a little less than 0.1 in binary; the person who writes 0.1 is right all the same."""
    shares = allocate([1.0, 5.0, 2.0], sparsity, bound=bound)
    assert shares.mean() == pytest.approx(sparsity, abs=1e-12) and shares.min() >= 0 and shares.max() <= 1


@pytest.mark.parametrize(("sparsity", "bound"), [(0.9, 0.11), (0.03, 0.05)])
def test_a_bound_that_does_not_fit_is_refused(sparsity: float, bound: float) -> None:
    with pytest.raises(ValidationError, match=r"pals\.bound.*sparsity"):
        Allocation(method="pals", sparsity=sparsity, pals=Pals(bound=bound))
