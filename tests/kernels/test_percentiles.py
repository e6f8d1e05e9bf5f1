"""Percentiles and outliers from histograms of bits, against a full sort."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipeline.artifacts import ArtifactError
from stages.statistics import percentiles
from stages.statistics.distribution import Distribution
from stages.statistics.place import Place
from tests.kernels.shapes import checked

WANTED = [0.1, 25.0, 50.0, 90.0, 99.0, 99.9, 100.0]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
SPECIAL = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -3e-42, 1.17549435e-38, 27520.0, 3.4e38, 1.0000001])


def measure(batches: list[Tensor], outlier: float = 5.0, wanted: list[float] = WANTED) -> Place:
    """A place shown all batches."""
    place = Place("here")
    for batch in batches:
        place.see(batch)
    place.aim(wanted, [outlier])
    if place.needs_second_look:
        for batch in batches:
            place.second_look(batch)
    return place


def magnitudes(batches: list[Tensor]) -> np.ndarray:
    return np.sort(np.concatenate([batch.float().abs().reshape(-1).numpy() for batch in batches]))


def check(batches: list[Tensor], outlier: float = 5.0) -> None:
    place, values = measure(batches, outlier), magnitudes(batches)
    for q in WANTED:
        exact = Fraction(str(q)) * len(values) / 100
        assert place.percentile(q) == values[max(1, math.ceil(exact)) - 1], q
        if exact.denominator > 1:  # else numpy's rank depends on how q / 100 is rounded
            assert place.percentile(q) == np.quantile(values, q / 100, method="inverted_cdf"), q
    mean = values.sum(dtype=np.float64) / len(values)
    assert place.mean == pytest.approx(mean, rel=1e-12)
    assert place.largest == values[-1]
    threshold = torch.tensor(outlier * place.mean, dtype=torch.float32).numpy()
    assert place.share_above(outlier) == (values > threshold).sum() / len(values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 3e4])
def test_percentiles_are_those_of_a_sort(dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(tokens, 37) ** 3 * scale).clamp(-6e4, 6e4).to(dtype) for tokens in (5, 1, 40)]
    check(batches)


@settings(max_examples=120, deadline=None)
@given(st.lists(st.lists(FLOAT32 | SPECIAL, min_size=1, max_size=30), min_size=1, max_size=4), st.floats(1.01, 50))
def test_any_float32(batches: list[list[float]], outlier: float) -> None:
    """Ties, zeros of both signs, denormals, the largest numbers; values spread over several batches."""
    check([torch.tensor(batch).unsqueeze(-1) for batch in batches], outlier)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(FLOAT32 | SPECIAL, min_size=1, max_size=30), min_size=1, max_size=3))
def test_any_bfloat16(batches: list[list[float]]) -> None:
    check([torch.tensor(batch).clamp(-3e38, 3e38).to(torch.bfloat16).unsqueeze(-1) for batch in batches])


def test_many_values_in_one_bucket() -> None:
    """All in [1, 1 + 2⁻⁷): one bucket of the upper bits, so only the second look tells them apart."""
    values = 1 + torch.randperm(5000).float().view(-1, 2) * 2**-23
    check([values[:1000], values[1000:].flip(0)])


def test_outliers_are_counted_on_either_side_of_the_threshold() -> None:
    """Mean 2, threshold 3 · 2 = 6: one value above, and none of those equal to it."""
    x = torch.tensor([[0.0, 0.0, 0.0, 6.0, 6.0, 0.0, 0.0, 7.0, 0.0, 1.0]])
    assert measure([x], outlier=3.0).share_above(3.0) == 0.1
    assert measure([x.bfloat16()], outlier=3.0).share_above(3.0) == 0.1


def test_all_zero() -> None:
    place = measure([torch.zeros(3, 4)])
    assert [place.percentile(q) for q in WANTED] == [0.0] * len(WANTED)
    assert place.share_above(5.0) == 0.0 and place.total == 0.0


@pytest.mark.parametrize(
    ("q", "count", "rank"),
    [
        (50.0, 4, 2),
        (50.0, 5, 3),
        (99.9, 1000, 999),
        (99.9, 10**10, 9_990_000_000),
        (100.0, 7, 7),
        (0.1, 10, 1),
        (33.3, 1000, 333),
    ],
)
def test_ranks_are_exact(q: float, count: int, rank: int) -> None:
    assert percentiles.rank_of(q, count) == rank


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_refused(bad: float, dtype: torch.dtype) -> None:
    x = torch.ones(4, 5, dtype=dtype)
    x[2, 3] = bad
    with pytest.raises(ArtifactError, match="here.*NaN or infinite"):
        Place("here").see(x)


def test_channel_sums_and_the_row() -> None:
    x = torch.tensor([[1.0, -2.0, 0.0], [3.0, 2.0, 0.0]])
    place = measure([x[:1], x[1:]], outlier=2.0, wanted=[50.0, 100.0])
    assert place.squares.tolist() == [10.0, 8.0, 0.0]
    row = place.row([50.0, 100.0], 2.0, 12)
    assert row == {
        "tokens": 2, "width": 3, "parameters": 12, "p50": 1.0, "p100": 3.0, "mean": 8 / 6,
        "norm": pytest.approx((18 / 6) ** 0.5), "max": 3.0, "outlier_ratio": 1 / 6,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pooled_places_are_those_of_all_values(dtype: torch.dtype) -> None:
    """One distribution, another three times over: as if all had passed one place."""
    torch.manual_seed(1)
    one, other = torch.randn(7, 30).to(dtype), (5 * torch.randn(4, 11)).to(dtype)
    pooled = Distribution("pool")
    for x, times in ((one, 1), (other, 3)):
        part = measure([x])
        for _ in range(times):
            pooled.pool(part)
    pooled.aim(WANTED, [2.0, 3.0])
    if pooled.needs_second_look:
        pooled.second_look(one)
        pooled.second_look(other, times=3)
    values = magnitudes([one, other, other, other])
    assert [pooled.percentile(q) for q in WANTED] == [
        values[max(1, math.ceil(Fraction(str(q)) * len(values) / 100)) - 1] for q in WANTED
    ]
    for multiple in (2.0, 3.0):
        assert pooled.share_above(multiple) == (values > np.float32(multiple * pooled.mean)).mean()
    assert pooled.largest == values[-1]


def test_percentiles_of_sequences_are_averaged() -> None:
    """Two windows of four values each: the medians are 2 and 30, the largest 4 and 40; in batches of any size."""
    x = torch.tensor([[[1.0, -2.0], [3.0, 4.0]], [[-10.0, 30.0], [20.0, 40.0]]])
    whole, by_one = Place(sequences=[50.0, 75.0, 100.0]), Place(sequences=[50.0, 75.0, 100.0])
    whole.see(x, 2)
    by_one.see(x[:1], 1)
    by_one.see(x[1].view(2, 2), 1)
    for place in (whole, by_one):
        place.aim(WANTED, [5.0])
        place.second_look(x)
        row = place.row([50.0], 5.0, 0)
        assert [row[f"p{q}_per_sequence"] for q in (50, 75, 100)] == [11.0, 16.5, 22.0]


def test_what_is_not_made_of_whole_windows_has_no_percentiles_of_sequences() -> None:
    place = Place(sequences=[50.0])
    place.see(torch.ones(3, 2), 1)
    place.see(torch.ones(1, 2))
    place.aim([50.0], [5.0])
    place.second_look(torch.ones(4, 2))
    row = place.row([50.0], 5.0, 0)
    assert row["p50_per_sequence"] is None and row["p50"] == 1.0


def test_a_place_nothing_passed_has_an_empty_row() -> None:
    row = measure([]).row(WANTED, 5.0, 9)
    assert row["tokens"] == 0 and row["parameters"] == 9 and row["p50"] is None and row["outlier_ratio"] is None


@settings(max_examples=30, deadline=None)
@given(st.lists(FLOAT32 | SPECIAL, min_size=1, max_size=50))
def test_bits_keep_the_order(values: list[float]) -> None:
    x = torch.tensor(values)
    bits = checked(percentiles.magnitude_bits)(x)
    assert torch.equal(x.abs()[bits.argsort(stable=True)], x.abs().sort().values)
    counts = checked(percentiles.coarse_histogram)(bits)
    assert int(counts.sum()) == len(x) and len(counts) == percentiles.BUCKETS
    for value, one in zip(x.abs().tolist(), bits.tolist(), strict=True):
        assert percentiles.value_of(one >> 16, one & 0xFFFF) == value
        assert checked(percentiles.fine_histograms)(bits, [one >> 16])[one >> 16][one & 0xFFFF] >= 1
