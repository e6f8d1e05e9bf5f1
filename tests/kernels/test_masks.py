"""Scores, masks and their packed form, against brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages.decoder import masks, scores, selection
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
