"""Sparsity shared out over the layers: the exact budget, and the rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.errors import PalimpsestError
from stages.allocation import Allocation, Pals
from stages.allocation.budget import normalise, recentred, shift_to_budget
from stages.allocation.layers import Layers, make_layers
from stages.allocation.pals import percentile_scores
from stages.allocation.run import METHODS, allocate

NORMALISATIONS = ["zscore", "minmax", "rank"]
PROJECTIONS = ["projected", "faithful"]
SCORED = [name for name in METHODS if name not in ("uniform", "random")]
BOUNDED = ["pals", "gradient", "measured"]
SPARED_LOW = {"dlp", "alphapruning"}  # where a low score is pruned less
numbers = st.lists(st.floats(-3, 3), min_size=1, max_size=40)
scores_of_layers = st.lists(st.floats(0, 1e5), min_size=1, max_size=30)
IMPORTANCE = ["score_outliers_5", "score_mean", "score_median", "alpha_peak", "alpha_peak_corrected", "alpha_mid", "gradient",
              "weighted_gradient"]  # fmt: skip


def layers_of(scores: list[float], sizes: list[int] | None = None, granularity: str = "block", each: int = 1) -> Layers:
    """Blocks of `each` matrices of equal size, with one score in every column that some rule goes by.

    With granularity "linear" the scores are of the matrices; places a rule was not asked for hold numbers that mislead.
    """
    columns = dict.fromkeys(IMPORTANCE, 0.0)
    sizes = sizes or [10] * len(scores)
    blocks = range(len(scores) // (each if granularity == "linear" else 1))
    rows, places = [], []
    for block in blocks:
        own = range(block * each, (block + 1) * each) if granularity == "linear" else [block]
        rows.append({"block": block, "matrix": "", "parameters": sum(sizes[i] for i in own), **columns})
        if granularity == "block":
            rows[-1] |= dict.fromkeys(IMPORTANCE, scores[block])
            own_scores = {"m0": (-7.0, sizes[block])}
        else:
            own_scores = {f"m{i}": (scores[i], sizes[i]) for i in own}
        for name, (score, size) in own_scores.items():
            rows.append({"block": block, "matrix": name, "parameters": size, **dict.fromkeys(IMPORTANCE, score)})
            places.append({"block": block, "place": name, "width": 4, "parameters": size, "p99": score})
        end = scores[block] if granularity == "block" else 1.0
        places.append({"block": block, "place": "input", "width": 4, "parameters": 0, "p99": -end})
        places.append({"block": block, "place": "output", "width": 4, "parameters": 0, "p99": end})
    sensitivity = pd.DataFrame({"block": blocks, "rise": [scores[block] for block in blocks]})
    return make_layers(granularity, pd.DataFrame(places), pd.DataFrame(rows), sensitivity)


def allocate_by(method: str, layers: Layers, sparsity: float = 0.5, projection: str = "projected", **knobs: Any) -> np.ndarray:
    given_knobs: dict[str, Any] = {method: knobs} if knobs else {}
    wanted = Allocation.model_validate(
        {"method": method, "sparsity": sparsity, "projection": projection, **given_knobs}, strict=False
    )
    return allocate(METHODS[method](layers, wanted), layers.parameters, sparsity, projection == "faithful")


def pals_of(scores: list[float], sparsity: float = 0.5, projection: str = "projected", **knobs: Any) -> np.ndarray:
    return allocate_by("pals", layers_of(scores), sparsity, projection, **knobs)


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


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=30, deadline=None)
@given(scores_of_layers, st.floats(0.05, 0.95), st.sampled_from(["block", "linear"]), st.randoms())
def test_every_rule_meets_the_target_within_its_bounds(
    method: str, scores: list[float], target: float, granularity: str, random: Any
) -> None:
    sizes = [random.choice([1, 7, 1000, 123_456_789]) for _ in scores]
    layers = layers_of(scores, sizes, granularity)
    knobs = {"source": "linear_inputs"} if method == "pals" and granularity == "linear" else {}
    shares = allocate_by(method, layers, target, **knobs)
    assert shares @ layers.parameters / layers.parameters.sum() == pytest.approx(target, abs=1e-12)
    low, high = (target - 0.05, target + 0.05) if method in [*BOUNDED, "random"] else (0.01, 0.99)
    assert (shares >= low - 1e-12).all() and (shares <= high + 1e-12).all()
    if method in SCORED:
        order = np.argsort(scores, kind="stable")
        rises = np.diff(shares[order]) * (1 if method in SPARED_LOW else -1)
        assert (rises >= -1e-12).all(), "who is worth more gives up no more"


@pytest.mark.parametrize("method", [name for name in METHODS if name != "random"])
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_equal_scores_give_the_target_to_all(method: str, projection: str) -> None:
    shares = allocate_by(method, layers_of([3.0] * 5, [1, 2, 3, 4, 5]), 0.3, projection)
    np.testing.assert_allclose(shares, 0.3, atol=1e-15)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_nothing_to_prune(method: str, projection: str) -> None:
    assert not allocate_by(method, layers_of([1.0, 5.0, 2.0]), 0.0, projection).any()


@settings(max_examples=80, deadline=None)
@given(
    scores_of_layers, st.sampled_from(NORMALISATIONS), st.sampled_from(PROJECTIONS), st.sampled_from(["spare_high", "spare_low"])
)
def test_pals_prunes_by_score_and_sign(scores: list[float], normalisation: str, projection: str, sign: str) -> None:
    shares = pals_of(scores, 0.6, projection, normalisation=normalisation, sign=sign)
    rises = np.diff(shares[np.argsort(scores, kind="stable")])
    assert ((rises if sign == "spare_low" else -rises) >= -1e-12).all()
    assert (abs(shares - 0.6) <= 0.05 + 1e-12).all()
    if projection == "projected":
        assert shares.mean() == pytest.approx(0.6, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=2, max_size=20), st.floats(0.01, 100), st.floats(-50, 50))
@pytest.mark.parametrize("normalisation", NORMALISATIONS)
def test_only_relative_scores_matter(normalisation: str, scores: list[int], scale: float, offset: float) -> None:
    changed = [scale * one + offset for one in scores]
    assume(len(set(changed)) == len(set(scores)))
    before = pals_of([float(one) for one in scores], normalisation=normalisation)
    np.testing.assert_allclose(pals_of(changed, normalisation=normalisation), before, atol=1e-9)


def test_a_block_that_stands_out_is_spared_as_far_as_the_bound_goes() -> None:
    """Without the shift the rest would be pruned by more than the target, and the mean would be missed."""
    shares = pals_of([1.0] * 31 + [1000.0], 0.5)
    assert shares[-1] == pytest.approx(0.45, abs=1e-15)
    assert shares.mean() == pytest.approx(0.5, abs=1e-12)
    np.testing.assert_allclose(shares[:-1], 0.5 + 0.05 / 31, atol=1e-12)


def test_clipping_alone_by_hand() -> None:
    """z of [0, 0, 0, 4] is [-1/√3, .., √3]; slope 0.05 gives 0.5 + 0.0289 and 0.5 - 0.0866, clipped to 0.45."""
    shares = pals_of([0.0, 0.0, 0.0, 4.0], projection="faithful")
    np.testing.assert_allclose(shares, [0.5 + 0.05 / 3**0.5] * 3 + [0.45], atol=1e-15)


def test_normalisation_by_hand() -> None:
    score = np.array([1.0, 2.0, 2.0, np.nan, 11.0])
    zscores = (np.nan_to_num(score, nan=4.0) - 4) / np.sqrt((9 + 4 + 4 + 49) / 4)
    np.testing.assert_allclose(normalise(score, "zscore"), zscores, atol=1e-12)
    np.testing.assert_allclose(normalise(score, "minmax"), [-1, -0.8, -0.8, -0.4, 1], atol=1e-12)
    np.testing.assert_allclose(normalise(score, "rank"), [-1, 0, 0, 0, 1])
    assert normalise(np.array([np.nan, np.nan]), "zscore").tolist() == [0, 0]
    np.testing.assert_allclose(normalise(np.array([0.0, 5e-324]), "zscore"), [-1, 1])


def test_owl_and_dlp_by_hand() -> None:
    """Scores 0, 1, 4 with λ = 0.08: keep ratios 0, 0.04, 0.16, less their mean 0.2/3, plus 1 - S."""
    keep = np.array([0.0, 0.04, 0.16])
    shares = allocate_by("owl", layers_of([0.0, 1.0, 4.0]), 0.7)
    np.testing.assert_allclose(shares, 1 - (keep - keep.mean() + 0.3), atol=1e-12)
    keep = 0.3 * np.array([1.0, 0.75, 0.0])  # 1 - u / Σu of 0, 1, 4 is 1, 0.8, 0.2
    shares = allocate_by("dlp", layers_of([0.0, 1.0, 4.0]), 0.7)
    np.testing.assert_allclose(shares, 1 - (keep - keep.mean() + 0.3), atol=1e-12)


def test_alphapruning_by_hand() -> None:
    """α of 2, 3, 6 with ε = 0.3: factors 0.7, 0.85, 1.3; sizes 1, 1, 2 make their sum 4.15, and the target 4 / 4.15 of each."""
    shares = allocate_by("alphapruning", layers_of([2.0, 3.0, 6.0], [1, 1, 2]), 0.5)
    np.testing.assert_allclose(shares, 0.5 * np.array([0.7, 0.85, 1.3]) * 4 / 4.15, atol=1e-12)


def test_as_published_blocks_count_alike_and_nothing_ends_below_a_hundredth() -> None:
    """OWL with λ = 0.4 at a target of 0.3: keep ratios 0 and 0.8, so sparsities 0.7 and -0.1, which becomes 0.01."""
    layers = layers_of([0.0, 1.0], [1, 3])
    np.testing.assert_allclose(allocate_by("owl", layers, 0.3, "faithful", spread=0.4), [0.7, 0.01], atol=1e-12)
    exact = allocate_by("owl", layers, 0.3, spread=0.4)
    np.testing.assert_allclose(exact, [0.9, 0.1], atol=1e-12)  # 0.8 apart, and (0.9 + 3 · 0.1) / 4 = 0.3


def test_as_published_more_than_everything_is_everything() -> None:
    """AlphaPruning at 0.9: factors 0.7 and 1.3 ask the second block for 1.17 of its weights."""
    layers = layers_of([1.0, 2.0])
    np.testing.assert_allclose(allocate_by("alphapruning", layers, 0.9, "faithful"), [0.63, 1.0], atol=1e-12)
    np.testing.assert_allclose(allocate_by("alphapruning", layers, 0.9), [0.81, 0.99], atol=1e-12)


def test_random_numbers_come_from_their_own_seed() -> None:
    layers = layers_of([1.0] * 12)
    np.random.seed(5)
    first = allocate_by("random", layers, seed=3)
    np.random.seed(6)
    np.testing.assert_array_equal(allocate_by("random", layers, seed=3), first)
    assert (allocate_by("random", layers, seed=4) != first).any() and first.std() > 0.01


@pytest.mark.parametrize("method", ["owl", "dlp", "alphapruning", "gradient", "pals"])
def test_a_matrix_without_a_score_counts_as_average(method: str) -> None:
    knobs = {"source": "linear_inputs"} if method == "pals" else {}
    layers = layers_of([1.0, 3.0, np.nan, 5.0], granularity="linear", each=2)
    shares = allocate_by(method, layers, 0.5, **knobs)
    assert min(shares[0], shares[3]) < shares[2] < max(shares[0], shares[3]) and shares.mean() == pytest.approx(0.5, abs=1e-12)


@pytest.mark.parametrize("kind", NORMALISATIONS)
def test_a_missing_score_wishes_for_what_the_others_wish_on_average(kind: str) -> None:
    """Scores far from the middle of their range: the mean of minmax is not its midpoint."""
    scaled = normalise(np.array([0.0, 0.0, np.nan, 9.0]), kind)
    assert scaled[2] == pytest.approx(scaled[[0, 1, 3]].mean(), abs=1e-15)
    assert normalise(np.array([0.0, 0.0, np.nan, 9.0]), "minmax")[2] == pytest.approx(-1 / 3)


def test_the_matrices_of_a_block_share_what_was_measured_of_the_block() -> None:
    layers = layers_of([1.0, 2.0, 3.0, 4.0], granularity="linear", each=2)
    assert METHODS["measured"](layers, Allocation(method="measured")).score.tolist() == [1.0, 1.0, 2.0, 2.0]
    assert layers.block.tolist() == [0, 0, 1, 1] and layers.matrix == ["m0", "m1", "m2", "m3"]


def statistics_of_two_blocks() -> Callable[..., Layers]:
    statistics = pd.DataFrame(
        [
            (1, "output", 4, 0, 20.0, 21.0), (0, "input", 4, 0, 1.0, 2.0), (0, "output", 4, 0, 10.0, 11.0),
            (1, "input", 4, 0, 2.0, 3.0),
            (0, "q", 4, 8, 3.0, 4.0), (0, "down", 12, 8, 7.0, 8.0), (1, "q", 4, 8, 5.0, 6.0), (1, "down", 12, 8, 9.0, 10.0),
            (1, "cold", 0, 8, None, None), (0, "linears", 0, 0, 6.5, None), (1, "linears", 0, 0, 8.5, None),
        ],
        columns=["block", "place", "width", "parameters", "p99.9", "p99.9_per_sequence"],
    )  # fmt: skip
    names = [(0, "", 16), (0, "q", 8), (0, "down", 8), (1, "", 24), (1, "q", 8), (1, "down", 8), (1, "cold", 8)]
    importance = pd.DataFrame(names, columns=["block", "matrix", "parameters"])
    return lambda granularity: make_layers(granularity, statistics, importance, pd.DataFrame())


def test_percentiles_come_from_the_place_asked_for() -> None:
    of = statistics_of_two_blocks()

    def at(source: Any, by: str = "block", pooling: Any = "pooled") -> list[float]:
        return percentile_scores(of(by), Pals(source=source, percentile=99.9, pooling=pooling)).tolist()

    assert at("block_input") == [1.0, 2.0] and at("block_output") == [10.0, 20.0]
    assert at("block_output", pooling="mean_of_sequences") == [11.0, 21.0]
    assert at("linear_inputs") == [6.5, 8.5]
    weighted = [(4 * 4 + 8 * 12) / 16, (6 * 4 + 10 * 12) / 16]
    assert at("linear_inputs", pooling="mean_of_sequences") == weighted, "an expert that saw no token counts nothing"
    assert at("block_input", "linear") == [1.0, 1.0, 2.0, 2.0, 2.0]
    np.testing.assert_array_equal(at("linear_inputs", "linear"), [3.0, 7.0, 5.0, 9.0, np.nan])


def without(column: str) -> Layers:
    layers = layers_of([1.0, 2.0])
    layers.importance[column] = np.nan
    layers.sensitivity["rise"] = np.nan
    return layers


@pytest.mark.parametrize(
    ("method", "knobs", "layers", "message"),
    [
        (
            "pals",
            {"percentile": 98.0},
            layers_of([1.0]),
            r"pals\.percentile = 98 is not measured; statistics\.percentiles has 99",
        ),
        ("pals", {"pooling": "mean_of_sequences"}, layers_of([1.0]), r"pals\.pooling.*statistics\.per_sequence: true"),
        ("owl", {"multiple": 4.5}, layers_of([1.0]), r"owl\.multiple = 4\.5 is not measured; statistics\.score_outliers has 5"),
        ("alphapruning", {}, without("alpha_peak"), r"statistics\.spectra: true"),
        ("gradient", {}, without("weighted_gradient"), r"statistics\.gradient_windows above 0"),
        ("measured", {}, without("gradient"), r"method = measured needs sensitivity\.method: loss or kl"),
    ],
)
def test_what_was_not_measured_names_the_key(method: str, knobs: dict[str, Any], layers: Layers, message: str) -> None:
    with pytest.raises(PalimpsestError, match=message):
        allocate_by(method, layers, **knobs)


@pytest.mark.parametrize(("sparsity", "bound"), [(0.9, 0.1), (0.95, 0.05), (0.7, 0.3), (0.1, 0.1), (0.05, 0.05), (0.0, 0.05)])
def test_a_bound_that_just_fits_is_allowed(sparsity: float, bound: float) -> None:
    """1 - 0.9 is a little less than 0.1 in binary; the person who writes 0.1 is right all the same."""
    shares = pals_of([1.0, 5.0, 2.0], sparsity, bound=bound)
    assert shares.mean() == pytest.approx(sparsity, abs=1e-12) and shares.min() >= 0 and shares.max() <= 1


@pytest.mark.parametrize("method", ["pals", "gradient", "random", "measured"])
@pytest.mark.parametrize(("sparsity", "bound"), [(0.9, 0.11), (0.03, 0.05)])
def test_a_bound_that_does_not_fit_is_refused(method: str, sparsity: float, bound: float) -> None:
    with pytest.raises(ValidationError, match=rf"{method}\.bound.*sparsity.*allowed: 0 to"):
        Allocation.model_validate({"method": method, "sparsity": sparsity, method: {"bound": bound}})


@pytest.mark.parametrize("method", ["owl", "dlp", "alphapruning"])
@pytest.mark.parametrize("sparsity", [0.005, 0.995])
def test_a_target_that_the_clamps_cannot_meet_is_refused(method: str, sparsity: float) -> None:
    with pytest.raises(ValidationError, match=rf"sparsity = {sparsity} cannot be met by {method}.*0\.01 and 0\.99"):
        Allocation.model_validate({"method": method, "sparsity": sparsity})
    Allocation.model_validate({"method": method, "sparsity": sparsity, "projection": "faithful"})


def test_scores_over_any_scale_are_recentred() -> None:
    wish = recentred(np.array([1e-9, 3e-9, 2e-9]), 0.1, 0.5, spare_high=False)
    np.testing.assert_allclose(wish.raw, [0.4, 0.6, 0.5], atol=1e-12)
