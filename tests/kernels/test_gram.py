"""Least squares from Grams, against `lstsq` on the tokens themselves."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stages.decoder import gram
from stages.decoder.gram import Grams, SingularGram, add_tokens, empty_grams, relative_errors, solve_ridge
from stages.ghost import antisymmetry
from tests.kernels.shapes import checked

antisymmetric_share = checked(antisymmetry.antisymmetric_share)
condition_number = checked(gram.condition_number)


def tokens(count: int, channels: int, seed: int = 0) -> Tensor:
    return torch.randn(count, channels, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def grams_of(x: Tensor, *ys: Tensor, batch: int = 10**6, dtype: torch.dtype = torch.float64) -> Grams:
    """Sums over batches of tokens."""
    sums = empty_grams(x.shape[1], len(ys), "cpu")
    for start in range(0, len(x), batch):
        checked(add_tokens)(sums, x[start : start + batch], [y[start : start + batch] for y in ys], dtype)
    return sums


def test_sums_by_hand() -> None:
    """One token x = (1, 2), y = (3, 5): the step is (2, 3)."""
    sums = grams_of(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 5.0]]))
    assert sums.xx.tolist() == [[1, 2], [2, 4]] and sums.xd[0].tolist() == [[2, 3], [4, 6]]
    assert sums.dd.tolist() == [13] and sums.tokens == 1


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60))
def test_streaming_equals_one_batch(count: int, batch: int) -> None:
    x, y = tokens(count, 5, 1), tokens(count, 5, 2)
    one, many = grams_of(x, y), grams_of(x, y, batch=batch)
    for name in ("xx", "xd", "dd"):
        torch.testing.assert_close(getattr(many, name), getattr(one, name), rtol=1e-12, atol=1e-12)
    assert many.tokens == count


def test_without_ridge_it_is_lstsq_for_every_target() -> None:
    x, ys = tokens(200, 12, 1), [tokens(200, 12, 2), tokens(200, 12, 3)]
    fit = solve_ridge(grams_of(x, *ys, batch=30), 0.0, "here")
    assert fit.ridge == 0.0 and fit.m.shape == (2, 12, 12)
    for m, y in zip(fit.m, ys, strict=True):
        torch.testing.assert_close(m, torch.linalg.lstsq(x, y - x).solution, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("ridge", [1e-6, 1e-2, 3.0])
def test_with_ridge_it_is_lstsq_with_rows_for_the_penalty(ridge: float) -> None:
    """λ||M||² is the residual of C more tokens √λ·I whose step is 0."""
    x, y = tokens(40, 12, 1) * 30, tokens(40, 12, 2)
    weight = ridge * float(x.square().sum()) / 12
    longer = torch.cat([x, math.sqrt(weight) * torch.eye(12, dtype=torch.float64)])
    expected = torch.linalg.lstsq(longer, torch.cat([y - x, torch.zeros(12, 12, dtype=torch.float64)])).solution
    torch.testing.assert_close(solve_ridge(grams_of(x, y), ridge, "here").m[0], expected, rtol=1e-8, atol=1e-10)


def test_the_scale_of_the_stream_does_not_matter() -> None:
    x, y = tokens(40, 8, 1), tokens(40, 8, 2)
    one, other = solve_ridge(grams_of(x, y), 1e-2, ""), solve_ridge(grams_of(1000 * x, 1000 * y), 1e-2, "")
    torch.testing.assert_close(one.m, other.m, rtol=1e-9, atol=1e-12)


def test_a_planted_map_is_found() -> None:
    x, w = tokens(500, 16, 1), tokens(16, 16, 2)
    sums = grams_of(x, x @ w, batch=64)
    fit = solve_ridge(sums, 0.0, "here")
    assert float((torch.eye(16) + fit.m[0] - w).abs().max()) < 1e-8
    assert relative_errors(sums, fit.m)[0] < 1e-7


def test_a_block_that_does_nothing_needs_no_operator() -> None:
    x = tokens(100, 6)
    sums = grams_of(x, x)
    fit = solve_ridge(sums, 1e-4, "here")
    assert not fit.m.any() and relative_errors(sums, fit.m) == [0.0]


def test_no_target_is_allowed() -> None:
    sums = grams_of(tokens(30, 4))
    fit = solve_ridge(sums, 1e-4, "here")
    assert fit.m.shape == (0, 4, 4) and relative_errors(sums, fit.m) == []


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(0, 10**6))
def test_a_singular_gram_raises_the_ridge_and_says_so(rank: int, seed: int) -> None:
    """9 channels that live in fewer dimensions. Rounding may let a factorisation through; what it gives would be noise."""
    x = tokens(50, rank, seed) @ tokens(rank, 9, seed + 1)
    y = tokens(50, 9, seed + 2)
    fit = solve_ridge(grams_of(x, y), 0.0, "here")
    assert 0 < fit.ridge <= 1e-5
    exact = torch.linalg.lstsq(x, y - x, driver="gelsd", rcond=1e-9).solution  # the smallest of all solutions
    torch.testing.assert_close(fit.m[0], exact, rtol=1e-3, atol=1e-3)


def test_a_hopeless_gram_stops_with_its_name() -> None:
    with pytest.raises(SingularGram, match=r"ghost of blocks 3 to 5: XᵀX of 20 tokens x 4 channels.*condition inf.*ridge 0\.01"):
        solve_ridge(grams_of(torch.zeros(20, 4), torch.ones(20, 4)), 1e-8, "ghost of blocks 3 to 5")


def test_a_gram_that_is_no_gram_stops_at_the_limit() -> None:
    """A negative eigenvalue larger than all ridges allowed: seven tries, then the end."""
    sums = grams_of(tokens(50, 3), tokens(50, 3, 1))
    sums.xx -= 2 * sums.xx.trace() * torch.diag(torch.tensor([0.0, 0.0, 0.3], dtype=torch.float64))
    with pytest.raises(SingularGram, match="block 7.*ridge 0.001"):
        solve_ridge(sums, 1e-9, "block 7")


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 10**6), st.floats(0, 2))
def test_errors_are_those_of_the_tokens(channels: int, count: int, seed: int, size: float) -> None:
    x, ys = tokens(count, channels, seed), [tokens(count, channels, seed + 1), tokens(count, channels, seed + 2)]
    m = size * tokens(2 * channels, channels, seed + 3).view(2, channels, channels)
    for found, one, y in zip(relative_errors(grams_of(x, *ys), m), m, ys, strict=True):
        assert found == pytest.approx(float((x + x @ one - y).norm() / (y - x).norm()), rel=1e-6, abs=1e-7)


def test_errors_with_a_sink_token() -> None:
    """A token of magnitude 27,520 in one channel, as real models have it, summed in float32."""
    x = tokens(4000, 24, 1)
    x[::500, 3] = 27520.0
    y = x + 0.5 * torch.tanh(x @ tokens(24, 24, 2))
    train, rest = grams_of(x[:3000], y[:3000], batch=500, dtype=torch.float32), grams_of(x[3000:], y[3000:], dtype=torch.float32)
    fit = solve_ridge(train, 1e-6, "here")
    for sums, part in ((train, slice(0, 3000)), (rest, slice(3000, None))):
        direct = (x[part] + x[part] @ fit.m[0] - y[part]).norm() / (y[part] - x[part]).norm()
        assert relative_errors(sums, fit.m)[0] == pytest.approx(float(direct), rel=1e-2)


def test_the_fit_is_no_worse_than_nothing_on_its_own_tokens() -> None:
    for ridge in (0.0, 1e-3, 10.0):
        sums = grams_of(tokens(20, 9, 1), tokens(20, 9, 2))
        assert relative_errors(sums, solve_ridge(sums, ridge, "").m)[0] <= 1


def test_condition() -> None:
    assert condition_number(torch.diag(torch.tensor([4.0, 1.0, 2.0], dtype=torch.float64))) == pytest.approx(4)
    assert condition_number(torch.diag(torch.tensor([4.0, 0.0], dtype=torch.float64))) == float("inf")


def test_antisymmetric_share() -> None:
    m = tokens(30, 30)
    assert antisymmetric_share(m + m.T) == pytest.approx(0, abs=1e-12)
    assert antisymmetric_share(m - m.T) == pytest.approx(1)
    assert antisymmetric_share(tokens(400, 400)) == pytest.approx(0.5**0.5, abs=0.01)
    assert antisymmetric_share(torch.zeros(3, 3)) == 0
    assert antisymmetric_share(torch.tensor([[0.0, 1.0], [0.0, 0.0]])) == pytest.approx(0.5**0.5)
