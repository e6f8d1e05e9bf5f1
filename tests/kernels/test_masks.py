"""Scores, masks and their packed form, against brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages.decoder import masks, scores, selection
from stages.masking import budget, wanda_variant
from tests import published
from tests.kernels.shapes import checked

keep_per_row = checked(selection.keep_per_row)
pack_mask, unpack_mask = checked(masks.pack_mask), checked(masks.unpack_mask)
shapes = st.tuples(st.integers(1, 5), st.integers(1, 33))


def brute_force(score: Tensor, sparsity: float) -> Tensor:
    """Row by row: a stable sort, the first ⌊in · sparsity⌋ go."""
    keep = np.ones(score.shape, dtype=bool)
    for row, values in enumerate(score.numpy()):
        order = sorted(range(len(values)), key=lambda column: (values[column], column))
        for column in order[: int(len(values) * sparsity)]:
            keep[row, column] = False
    return torch.from_numpy(keep)


@settings(max_examples=150, deadline=None)
@given(shapes, st.floats(0, 1) | st.sampled_from([0.0, 0.5, 0.999999]), st.sampled_from([2, 5, 1000]), st.integers(0, 10**6))
def test_the_lowest_of_each_row_go(shape: tuple[int, int], sparsity: float, levels: int, seed: int) -> None:
    """Few levels make many ties."""
    score = torch.randint(0, levels, shape, generator=torch.Generator().manual_seed(seed)).float()
    assert torch.equal(keep_per_row(score, sparsity, exact=False), brute_force(score, sparsity))


def test_ties_go_by_index() -> None:
    score = torch.tensor([[1.0, 0.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0], [3.0, 1.0, 2.0, 0.0]])
    assert keep_per_row(score, 0.5).int().tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [1, 0, 1, 0]]


def test_ends_of_the_scale() -> None:
    score = torch.rand(3, 10)
    assert keep_per_row(score, 0.0).all() and keep_per_row(score, 0.0999, exact=False).all()
    assert (keep_per_row(score, 0.99, exact=False).sum(1) == 1).all(), "one stays of each row"
    assert not keep_per_row(score, 1.0).any()


def test_scores_are_not_changed() -> None:
    score = torch.tensor([[2.0, 1.0, 1.0]])
    keep_per_row(score, 0.4)
    assert score.tolist() == [[2.0, 1.0, 1.0]]


@settings(max_examples=150, deadline=None)
@given(shapes, st.floats(0, 1), st.sampled_from([2, 5, 1000]), st.integers(0, 10**6))
def test_exact_counts(shape: tuple[int, int], share: float, levels: int, seed: int) -> None:
    """The matrix meets its share to the weight, rows differ by one at most, and an even share is the published mask."""
    score = torch.randint(0, levels, shape, generator=torch.Generator().manual_seed(seed)).float()
    keep = keep_per_row(score, share)
    assert int((~keep).sum()) == round(share * score.numel())
    counts = (~keep).sum(1)
    assert int(counts.max() - counts.min()) <= 1
    assert torch.equal(keep, ~published.drop_rows(score, share, exact=True))
    even = int(shape[1] * share) / shape[1]
    assert torch.equal(keep_per_row(score, even), brute_force(score, even + 1e-9))


@settings(max_examples=80, deadline=None)
@given(shapes, st.floats(0, 0.99), st.sampled_from([2, 5, 1000]), st.booleans(), st.integers(0, 10**6))
def test_compared_over_the_layer(shape: tuple[int, int], share: float, levels: int, exact: bool, seed: int) -> None:
    score = torch.randint(0, levels, shape, generator=torch.Generator().manual_seed(seed)).float()
    keep = checked(budget.keep_pooled)(score, share, exact)
    assert torch.equal(keep, ~published.drop_layer(score, share, exact))
    assert not exact or int((~keep).sum()) == round(share * score.numel())


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(2, 9), st.data())
def test_of_every_m_the_n_lowest_go(rows: int, groups: int, m: int, data: st.DataObject) -> None:
    n = data.draw(st.integers(0, m))
    score = torch.randint(0, data.draw(st.sampled_from([2, 1000])), (rows, groups * m)).float()
    keep = checked(selection.keep_groups)(score, n, m)
    assert (keep.view(rows, groups, m).sum(2) == m - n).all()
    assert torch.equal(keep, ~published.drop_groups(score, n, m))


@settings(max_examples=80, deadline=None)
@given(shapes, st.floats(0, 0.99), st.sampled_from([2, 1000]), st.booleans(), st.integers(0, 10**6))
def test_the_variant_gives_rows_equal_mass(shape: tuple[int, int], share: float, levels: int, exact: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, squares = torch.randint(1, levels + 1, shape, generator=generator).float(), torch.rand(shape[1], generator=generator)
    one = checked(wanda_variant.wanda_variant)(weight, squares, budget.Budget(share, None, "mass", exact))
    score = scores.wanda_score(weight, squares)
    if exact:
        assert int((~one.keep).sum()) == round(share * score.numel())
    assert torch.equal(one.keep, ~published.drop_variant(score, share, exact))


def test_a_row_of_zeros_has_no_mass() -> None:
    one = wanda_variant.wanda_variant(
        torch.tensor([[0.0, 0.0], [1.0, 2.0]]), torch.ones(2), budget.Budget(0.5, None, "mass", True)
    )
    assert one.keep.tolist() == [[False, False], [True, True]] and one.score == 1


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 50)), min_size=1, max_size=12), st.sampled_from([2, 4, 8, 5]))
def test_whole_n_per_block_meet_the_total(units: list[tuple[float, int]], m: int) -> None:
    """As far as steps of single units can, within what the shares themselves round to, and never all of m."""
    shares, sizes = {i: share for i, (share, _) in enumerate(units)}, {i: size for i, (_, size) in enumerate(units)}
    counts = budget.round_to_groups(shares, sizes, m)
    some = [i for i in shares if shares[i] > 0]
    assert all(counts[i] == 0 for i in shares if i not in some)
    ends = sorted(round(shares[i] * m) for i in some)
    off = sum((shares[i] * m - counts[i]) * sizes[i] for i in some)
    for i in some:
        low, high = min(ends[0], m - 1), min(ends[-1], m - 1)
        assert low <= counts[i] <= high
        for step in (-1, 1):
            if low <= counts[i] + step <= high:
                assert abs(off - step * sizes[i]) >= abs(off) - 1e-9, "one more step would have helped"


def test_a_large_block_does_not_keep_small_ones_from_meeting_the_total() -> None:
    """The large one has the largest remainder (1.3 of 4), and is too large for what is missing: the small ones make it up."""
    shares, sizes = {"large": 0.325, "b": 0.3, "c": 0.3, "d": 0.5}, {"large": 100, "b": 10, "c": 10, "d": 10}
    assert budget.round_to_groups(shares, sizes, 4) == {"large": 1, "b": 2, "c": 2, "d": 2}
    assert budget.round_to_groups({0: 0.95, 1: 0.55}, {0: 1, 1: 1}, 4) == {0: 3, 1: 3}, "never all of m"


def test_a_bound_of_five_points_is_too_fine_for_two_of_four() -> None:
    shares = dict(enumerate([0.45, 0.55, 0.5, 0.475, 0.525]))
    assert set(budget.round_to_groups(shares, dict.fromkeys(shares, 7), 4).values()) == {2}
    assert budget.round_to_groups({0: 0.3, 1: 0.7}, {0: 1, 1: 1}, 4) == {0: 1, 1: 3}


@settings(max_examples=80, deadline=None)
@given(shapes, st.integers(0, 10**6))
def test_packing_is_that_of_numpy_and_comes_back(shape: tuple[int, int], seed: int) -> None:
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    packed = pack_mask(keep)
    assert tuple(packed.shape) == masks.packed_shape(shape)
    assert (packed.numpy() == np.packbits(keep.numpy(), axis=1, bitorder="little")).all()
    assert torch.equal(unpack_mask(packed, shape[1]), keep)


def test_packing_by_hand() -> None:
    keep = torch.tensor([[True, False, True, False, False, False, False, False, True]])
    assert pack_mask(keep).tolist() == [[5, 1]]


@settings(max_examples=40, deadline=None)
@given(shapes, st.integers(0, 10**6))
def test_wanda_is_weight_times_norm(shape: tuple[int, int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(shape, generator=generator), torch.randn(7, shape[1], generator=generator)
    score = checked(scores.wanda_score)(weight, x.double().square().sum(0).float())
    for i in range(shape[0]):
        for j in range(shape[1]):
            norm = sum(float(one) ** 2 for one in x[:, j]) ** 0.5
            assert float(score[i, j]) == pytest.approx(abs(float(weight[i, j])) * norm, rel=1e-6)


def test_scores_are_float32_whatever_the_weights() -> None:
    weight = torch.tensor([[-2.0, 3.0]], dtype=torch.bfloat16)
    assert checked(scores.magnitude_score)(weight).tolist() == [[2.0, 3.0]]
    score = checked(scores.wanda_score)(weight, torch.tensor([9.0, 4.0], dtype=torch.float32))
    assert score.dtype == torch.float32 and score.tolist() == [[6.0, 6.0]]
