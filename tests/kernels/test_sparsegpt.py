"""SparseGPT against the published algorithm run column by column, and against what it is for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages.masking import inputs
from stages.masking import sparsegpt as module
from stages.masking.budget import Budget
from stages.masking.sparsegpt import HopelessHessian, inverse_factor
from stages.masking.wanda import wanda
from tests.kernels.shapes import checked
from tests.published import prune_sparsegpt

sparsegpt = checked(module.sparsegpt)


def correlated(tokens: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5 + torch.eye(columns)
    return torch.randn(tokens, columns, generator=generator) @ mixing * torch.rand(columns, generator=generator).add(0.1)


def budget(share: float, group: tuple[int, int] | None = None, exact: bool = True) -> Budget:
    return Budget(share, group, "columns", exact)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("group", [None, (2, 4), (4, 8), (1, 4)])
@pytest.mark.parametrize(("rows", "columns", "block"), [(24, 64, 128), (24, 200, 128), (7, 48, 16)])
def test_masks_and_weights_are_the_published_ones(
    rows: int, columns: int, block: int, group: tuple[int, int] | None, exact: bool
) -> None:
    x = correlated(300, columns)
    x[:, 3] = 0  # a dead input
    weights = [torch.randn(rows + more, columns, generator=torch.Generator().manual_seed(more)) for more in (0, 5)]
    share = group[0] / group[1] if group else 0.55
    gram = x.double().T @ x.double()
    found = sparsegpt(weights, gram, 6, [budget(share, group, exact)] * 2, 0.01, block, "x")
    for weight, one in zip(weights, found, strict=True):
        gone, mended = prune_sparsegpt(weight, gram / 3, share, group, block=block, exact=exact)
        assert torch.equal(one.keep, ~gone)
        assert one.weight is not None and one.dead == 1
        assert float((one.weight - mended).abs().max() / mended.abs().max()) < 1e-5
        assert not one.weight[~one.keep].any() and not one.weight[:, 3].any()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.floats(0.05, 0.95), st.integers(1, 17), st.integers(0, 1000))
def test_the_budget_is_met_to_the_weight(rows: int, columns: int, share: float, block: int, seed: int) -> None:
    x = correlated(2 * columns, columns, seed)
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    one = sparsegpt([weight], x.double().T @ x.double(), 2, [budget(share)], 0.01, block, "x")[0]
    assert int((~one.keep).sum()) == round(share * rows * columns)
    assert 0 <= one.score <= 1


def test_it_reconstructs_better_than_wanda_on_correlated_inputs() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(400, 24, generator=generator) @ torch.randn(24, 96, generator=generator)
    x += 0.5 * torch.randn(400, 96, generator=generator)
    weight = torch.randn(32, 96, generator=generator)
    for group in (None, (2, 4)):
        one = sparsegpt([weight], x.double().T @ x.double(), 4, [budget(0.5, group)], 0.01, 128, "x")[0]
        other = wanda(weight, x.double().square().sum(0), Budget(0.5, group, "row", True))
        assert one.weight is not None
        error, simple = (float((x @ (new - weight).T).norm()) for new in (one.weight, weight * other.keep))
        assert error < 0.8 * simple


def test_without_correlation_the_rest_stays_as_it_is() -> None:
    weight = torch.tensor([[3.0, -1.0, 2.0, 0.5]])
    one = sparsegpt([weight], 5 * torch.eye(4, dtype=torch.float64), 1, [budget(0.5)], 0.01, 128, "x")[0]
    assert one.keep.tolist() == [[True, False, True, False]]
    assert one.weight is not None and one.weight.tolist() == [[3.0, 0.0, 2.0, 0.0]]


def test_fewer_tokens_than_inputs_are_carried_by_the_damping() -> None:
    x = correlated(5, 40)
    one = sparsegpt([torch.randn(8, 40)], x.double().T @ x.double(), 1, [budget(0.5)], 0.01, 128, "x")[0]
    assert one.weight is not None and one.weight.isfinite().all() and one.damping == 0.01


def test_damping_rises_tenfold_and_is_told() -> None:
    """One eigenvalue of -0.05 of the mean: 0.01 does not mend it, 0.1 does."""
    vectors = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    values = torch.tensor([-0.05, 1.21, 1.21, 1.21, 1.21, 1.21], dtype=torch.float64)
    hessian = vectors @ torch.diag(values) @ vectors.T
    factor, used = checked(inverse_factor)(hessian, 0.01, "x")
    assert used == pytest.approx(0.1)
    damped = hessian + used * hessian.diagonal().mean() * torch.eye(6, dtype=torch.float64)
    assert torch.allclose(factor.T @ factor @ damped, torch.eye(6, dtype=torch.float64), atol=1e-10)
    assert torch.equal(factor, factor.triu())


@pytest.mark.parametrize(("lowest", "what"), [(-5.0, "not positive definite"), (float("nan"), "NaN"), (float("inf"), "infinite")])
def test_what_no_damping_mends_is_named(lowest: float, what: str) -> None:
    hessian = torch.diag(torch.tensor([lowest, 1.0, 1.0, 7.0], dtype=torch.float64))
    with pytest.raises(HopelessHessian, match=f"block 7, o_proj: .*{what}"):
        inverse_factor(hessian, 0.01, "block 7, o_proj")


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 1100), st.integers(1, 20), st.integers(0, 1000))
def test_grams_by_lower_tiles(columns: int, tokens: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randn(tokens, columns, generator=generator) for _ in range(2)]
    gram = torch.zeros(columns, columns, dtype=torch.float64)
    for x in xs:
        checked(inputs.add_gram)(gram, x)
    whole = xs[0].double().T @ xs[0].double() + xs[1].double().T @ xs[1].double()
    assert torch.allclose(inputs.mirrored(gram), whole, rtol=1e-5, atol=1e-4)
