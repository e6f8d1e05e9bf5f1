"""Every operator against brute force or a hand-made case, and the order that the families of operators must keep."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipeline.errors import PalimpsestError
from stages.decoder.gram import SingularGram, solve_ridge
from stages.decoder.operators import Operator, Sinks, fold_into
from stages.ghost import antisymmetry, hadamard, sinks, sums
from stages.ghost import ghost as ghost_file
from stages.ghost.fitting import Apart, fit_operator, sink_targets
from stages.ghost.run import METHODS
from stages.ghost.sums import Fitted, Sums
from tests.kernels.shapes import checked

relative_error = checked(sums.relative_error)
add_windows = checked(sums.add_windows)
sink_rule, find_sinks = checked(sinks.sink_rule), checked(sinks.find_sinks)
F64 = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def sums_of(x: Tensor, y: Tensor, batch: int = 10**6, rotation: Tensor | None = None, weight: Tensor | None = None) -> Sums:
    """Sums over windows x, y [window, token, channel], some windows at a time."""
    total = sums.empty_sums(x.shape[-1], "cpu", rotation)
    weight = torch.ones(x.shape[:2], dtype=F64) if weight is None else weight
    for start in range(0, len(x), batch):
        span = slice(start, start + batch)
        add_windows(total, x[span], y[span] - x[span], weight[span])
    return total


def fit(method: str, total: Sums, ridge: float = 0.0, **options: Any) -> Fitted:
    return checked(METHODS[method])(total, ridge, "here", **options)


def uneven(windows: int = 6, tokens: int = 40, width: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A stream with correlated channels of unequal size, and a target that is near a linear map of it."""
    x = draw(windows, tokens, width, seed=seed) @ (draw(width, width, seed=seed + 1) + 2 * torch.eye(width, dtype=F64))
    return x, x + x @ draw(width, width, seed=seed + 2) * 0.3 + draw(windows, tokens, width, seed=seed + 3) + 0.5


@pytest.mark.parametrize("method", ["ghost", "ghost_affine", "ghost_lowrank"])
def test_a_planted_map_is_found(method: str) -> None:
    x, w = draw(5, 100, 16, seed=1), draw(16, 16, seed=2)
    fitted = fit(method, sums_of(x, x @ w, batch=2), **({"rank": 16} if method == "ghost_lowrank" else {}))
    assert float((torch.eye(16) + fitted.operator.matrix(16) - w).abs().max()) < 1e-8


def test_planted_scales_shifts_ranks_and_symmetries_are_found() -> None:
    x, eye = draw(5, 100, 16, seed=1), torch.eye(16, dtype=F64)
    scale, shift, thin = draw(16, seed=2), draw(16, seed=3), draw(16, 3, seed=4) @ draw(3, 16, seed=5)
    even, h = draw(16, 16, seed=6) + draw(16, 16, seed=6).T, hadamard.hadamard(16)
    torch.testing.assert_close(fit("least_squares_diag", sums_of(x, x * scale)).operator.scale, scale - 1)
    rotated = h @ torch.diag(scale) @ h.T
    torch.testing.assert_close(fit("least_squares_rotate", sums_of(x, x @ rotated)).operator.dense, rotated - eye)
    torch.testing.assert_close(fit("symmetric", sums_of(x, x + x @ even)).operator.dense, even)
    torch.testing.assert_close(fit("ghost_lowrank", sums_of(x, x + x @ thin), rank=3).operator.matrix(16), thin)
    affine = fit("ghost_affine", sums_of(x, x + x @ thin + shift)).operator
    torch.testing.assert_close(affine.dense, thin)
    torch.testing.assert_close(affine.bias, shift)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_does_nothing_gets_no_operator(method: str) -> None:
    x = draw(4, 30, 8)
    rotation = hadamard.hadamard(8) if method == "linearpatch_rotate" else None
    fitted = fit(method, sums_of(x, x, rotation=rotation), 1e-4, **({"rank": 3} if method == "ghost_lowrank" else {}))
    assert float(fitted.operator.matrix(8).abs().max()) < 1e-12
    assert fitted.operator.bias is None or not fitted.operator.bias.any()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.integers(0, 50))
def test_streaming_equals_one_batch(batch: int, seed: int) -> None:
    x, y = uneven(seed=seed)
    weight = torch.rand(x.shape[:2], generator=torch.Generator().manual_seed(seed), dtype=F64).round()
    rotation = hadamard.hadamard(12)
    one, many = (sums_of(x, y, size, rotation, weight) for size in (10**6, batch))
    for name in ("x", "d", "ratios"):
        torch.testing.assert_close(getattr(many, name), getattr(one, name), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(many.grams.xd, one.grams.xd, rtol=1e-11, atol=1e-11)
    assert (many.weight, many.windows, many.grams.tokens) == (one.weight, one.windows, one.grams.tokens)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 1e-6, 1e-3, 0.1]))
def test_a_wider_family_fits_better(seed: int, ridge: float) -> None:
    """Each minimises the same objective, error² + λ||M||², over a set that contains the one before it."""
    x, y = uneven(seed=seed)
    total = sums_of(x, y)
    lam = ridge * float(total.grams.xx.trace()) / 12

    def objective(fitted: Fitted) -> float:
        m = fitted.operator.matrix(12)
        return float((x + x @ m - y).square().sum() + lam * m.square().sum())

    full, even = (objective(fit(method, total, ridge)) for method in ("ghost", "symmetric"))
    narrow = [objective(fit(method, total, ridge)) for method in ("least_squares_diag", "least_squares_rotate")]
    ranks = [objective(fit("ghost_lowrank", total, ridge, rank=rank)) for rank in (1, 4, 8, 12)]
    nothing = float((x - y).square().sum())
    slack = 1 + 1e-9
    assert full <= even * slack and all(even <= one * slack for one in narrow) and all(one <= nothing * slack for one in narrow)
    assert nothing * slack >= ranks[0] and all(a * slack >= b for a, b in zip(ranks, ranks[1:], strict=False))
    assert ranks[-1] == pytest.approx(full, rel=1e-9)


def test_low_rank_is_better_than_the_truncated_ghost() -> None:
    x, y = uneven(seed=5)
    left, values, right = torch.linalg.svd(fit("ghost", sums_of(x, y)).operator.matrix(12))
    plain = left[:, :3] * values[:3] @ right[:3]
    found = fit("ghost_lowrank", sums_of(x, y), rank=3).operator
    assert found.down is not None and found.up is not None and found.down.shape == (12, 3) and found.up.shape == (3, 12)
    assert float((x + found.step(x) - y).norm()) < 0.999 * float((x + x @ plain - y).norm())


def test_symmetric_is_least_squares_over_the_symmetric_matrices() -> None:
    """Brute force: one regressor per free entry of M."""
    x, y = uneven(2, 30, 5, seed=7)
    rows, pairs = x.flatten(0, 1), [(i, j) for i in range(5) for j in range(i, 5)]
    columns = []
    for i, j in pairs:
        basis = torch.zeros(5, 5, dtype=F64)
        basis[i, j] = basis[j, i] = 1
        columns.append((rows @ basis).flatten())
    solution = torch.linalg.lstsq(torch.stack(columns, 1), (y - x).flatten()[:, None]).solution[:, 0]
    m = fit("symmetric", sums_of(x, y)).operator.dense
    assert m is not None and torch.equal(m, m.T)
    torch.testing.assert_close(torch.stack([m[i, j] for i, j in pairs]), solution, rtol=1e-9, atol=1e-11)


def test_affine_is_least_squares_with_a_column_of_ones() -> None:
    x, y = uneven(seed=8)
    rows = x.flatten(0, 1)
    longer = torch.cat([rows, torch.ones(len(rows), 1, dtype=F64)], 1)
    solution = torch.linalg.lstsq(longer, (y - x).flatten(0, 1)).solution
    operator = fit("ghost_affine", sums_of(x, y)).operator
    torch.testing.assert_close(operator.dense, solution[:-1], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(operator.bias, solution[-1], rtol=1e-9, atol=1e-11)


def test_the_ridge_of_the_affine_ghost_is_relative_to_the_whole_gram() -> None:
    x, y = uneven(seed=9)
    lam = 1e-2 * float(x.square().sum()) / 12
    rows, steps = x.flatten(0, 1), (y - x).flatten(0, 1)
    rows, steps = rows - rows.mean(0), steps - steps.mean(0)
    expected = torch.linalg.solve(rows.T @ rows + lam * torch.eye(12, dtype=F64), rows.T @ steps)
    fitted = fit("ghost_affine", sums_of(x, y), 1e-2)
    torch.testing.assert_close(fitted.operator.dense, expected, rtol=1e-9, atol=1e-12)
    assert fitted.ridge == pytest.approx(1e-2)


def test_linearpatch_by_hand() -> None:
    """Two windows of two tokens: the mean of the windows' ratios, not the ratio of the means."""
    x = torch.tensor([[[1.0, 2.0], [-3.0, 0.0]], [[1.0, 1.0], [1.0, -1.0]]], dtype=F64)
    y = torch.tensor([[[2.0, -2.0], [6.0, 0.0]], [[4.0, 1.0], [-4.0, 2.0]]], dtype=F64)
    scale = fit("linearpatch_diag", sums_of(x, y, batch=1)).operator.scale
    assert scale is not None and scale.tolist() == [(2 + 4) / 2 - 1, (1 + 1.5) / 2 - 1]


def test_linearpatch_rotates_before_it_measures() -> None:
    x, y = uneven(3, 20, 12, seed=4)
    h = hadamard.hadamard(12)
    ratios = ((y @ h).abs().mean(1) / (x @ h).abs().mean(1)).mean(0)
    m = fit("linearpatch_rotate", sums_of(x, y, rotation=h)).operator.matrix(12)
    torch.testing.assert_close(torch.eye(12, dtype=F64) + m, h @ torch.diag(ratios) @ h.T)


def test_a_channel_that_is_always_zero_stays_zero() -> None:
    x, y = uneven(seed=6)
    x[..., 3] = 0
    for method in ("linearpatch_diag", "least_squares_diag"):
        scale = fit(method, sums_of(x, y)).operator.scale
        assert scale is not None and scale[3] == 0 and torch.isfinite(scale).all()


@pytest.mark.parametrize("method", ["ghost", "ghost_affine", "symmetric", "replaceme", "ghost_lowrank"])
def test_nothing_can_be_fitted_to_nothing(method: str) -> None:
    total = sums_of(torch.zeros(2, 10, 4, dtype=F64), torch.ones(2, 10, 4, dtype=F64))
    with pytest.raises(SingularGram, match="here: XᵀX of 20 tokens x 4 channels is singular"):
        fit(method, total, 1e-8, **({"rank": 2} if method == "ghost_lowrank" else {}))


def test_weights_count_tokens_and_zero_leaves_no_trace() -> None:
    """A token of weight 2 is a token seen twice; one of weight 0 was never there."""
    x, y = uneven(2, 8, 6, seed=3)
    weight = torch.ones(2, 8, dtype=F64)
    weight[0, 0], weight[0, 1], x[0, 1] = 2, 0, 1e9
    found = sums_of(x, y, weight=weight)
    kept = [0, 0, *range(2, 16)]
    expected = sums_of(x.flatten(0, 1)[kept][None], y.flatten(0, 1)[kept][None])
    torch.testing.assert_close(found.grams.xd, expected.grams.xd)
    torch.testing.assert_close(found.grams.xx, expected.grams.xx)
    torch.testing.assert_close((found.x, found.d), (expected.x, expected.d))
    assert found.weight == 16


@pytest.mark.parametrize("bias", [False, True])
def test_errors_are_those_of_the_tokens(bias: bool) -> None:
    x, y = uneven(seed=2)
    operator = Operator(down=draw(12, 3, seed=4), up=draw(3, 12, seed=5), bias=draw(12, seed=6) if bias else None)
    direct = float((x + operator.step(x) - y).norm() / (y - x).norm())
    assert relative_error(sums_of(x, y, batch=2), operator) == pytest.approx(direct, rel=1e-9)


ORDERS = [1, 2, 4, 8, 12, 20, 24, 28, 36, 40, 48, 52, 60, 64, 72, 76, 80, 100, 108, 144, 192, 240, 256, 288, 512, 576, 768, 960]


@pytest.mark.parametrize("order", ORDERS)
def test_hadamard_matrices_are_orthonormal_and_flat(order: int) -> None:
    """28, 52 and 244 come from fields of 27, 25 and 243 elements."""
    h = checked(hadamard.hadamard)(order)
    assert h.shape == (order, order) and h.dtype == F64
    assert torch.equal((h * math.sqrt(order)).round().abs(), torch.ones(order, order, dtype=F64))
    assert float((h.T @ h - torch.eye(order, dtype=F64)).abs().max()) < 1e-12


@pytest.mark.parametrize("order", [0, 3, 6, 10, 30, 90, 578])
def test_widths_without_a_hadamard_matrix_are_named(order: int) -> None:
    with pytest.raises(PalimpsestError, match=rf"no Hadamard matrix for a stream of {order} channels.*or ghost"):
        hadamard.hadamard(order)


def test_a_width_that_no_construction_reaches_is_named() -> None:
    """A matrix of order 92 exists (Baumert, Golomb, Hall, 1962), by another construction."""
    with pytest.raises(PalimpsestError, match=r"92 channels here \(Paley's constructions and their products"):
        hadamard.hadamard(92)


def test_sinks_are_found_by_size_and_told_by_rules() -> None:
    norms = torch.ones(10, 6)
    norms[:9, 0] = 1000.0  # the first position, in nine windows of ten
    norms[0, 2] = norms[1, 4] = 500.0  # token 7, wherever it stands
    norms[2:4, 5] = 300.0  # token 9 in two places of four, which is too seldom for a rule
    norms[9, 1] = 300.0  # a token that stands nowhere else
    ids = torch.arange(60).view(10, 6) + 10
    ids[0, 2] = ids[1, 4] = 7
    ids[2:6, 5] = 9
    found = find_sinks(norms, 10.0)
    assert torch.equal(found, norms > 1)
    rule = sink_rule(found, ids, "restore")
    assert rule == Sinks("restore", True, (7,)) and len(rule) == 2
    kinds = rule.kinds(ids)
    assert kinds[:, 0].tolist() == [0] * 10 and kinds[0, 2] == kinds[1, 4] == 1 and int((kinds >= 0).sum()) == 12
    assert sink_rule(torch.zeros(10, 6, dtype=torch.bool), ids, "restore") == Sinks("restore")
    said = Apart(found, rule, kinds).told(ids)
    assert said == (
        ", 3 that no rule tells: tokens 9 (2 of 4 places), 65 (1 of 1 places); rule: first position [7], which also tells 1 "
        "tokens that are no sinks"
    )
    found[8, 0] = False
    assert not sink_rule(found, ids, "restore").first, "eight windows of ten are not nearly all"


def test_targets_are_means_over_sinks_alone() -> None:
    """One place in ten that the rule tells is no sink; it does not water down what the others are put back to."""
    y, x = draw(10, 4, 3), torch.zeros(10, 4, 3, dtype=F64)
    y[:9, 0] += 1000.0
    found = find_sinks(y.norm(dim=-1), 10.0)
    rule = sink_rule(found, torch.arange(40).view(10, 4), "restore")
    assert rule == Sinks("restore", True)
    apart = Apart(found, rule, rule.kinds(torch.arange(40).view(10, 4)))
    torch.testing.assert_close(sink_targets(rows_from(x, y), apart, 10, 3), y[:9, 0].mean(0)[None])


def test_operators_treat_sinks_apart() -> None:
    x, ids = draw(2, 4, 3), torch.tensor([[5, 7, 5, 5], [5, 5, 5, 7]])
    targets = draw(2, 3, seed=1)
    m = draw(3, 3, seed=2)
    restored = Operator(dense=m, targets=targets, sinks=Sinks("restore", True, (7,))).apply(x, ids)
    left_alone = Operator(dense=m, sinks=Sinks("bypass", True, (7,))).apply(x, ids)
    for window in range(2):
        for token in range(4):
            kind = 0 if token == 0 else 1 if ids[window, token] == 7 else -1
            moved = x[window, token] + x[window, token] @ m
            torch.testing.assert_close(restored[window, token], targets[kind] if kind >= 0 else moved)
            torch.testing.assert_close(left_alone[window, token], x[window, token] if kind >= 0 else moved)


def test_a_fold_changes_what_a_matrix_puts_out() -> None:
    weight, bias, z, f = draw(4, 6).float(), draw(4, seed=1).float(), draw(9, 6, seed=2).float(), draw(4, 4, seed=3).float()
    before = z @ weight.T + bias
    fold_into(weight, bias, Operator(fold=f))
    torch.testing.assert_close(z @ weight.T + bias, before + before @ f, rtol=1e-5, atol=1e-5)


def test_a_fold_is_rounded_once() -> None:
    weight, bias, f = draw(64, 32).bfloat16(), draw(64, seed=1).bfloat16(), 0.05 * draw(64, 64, seed=2).float()
    whole, shift = weight.float() + f.T @ weight.float(), bias.float() + bias.float() @ f
    fold_into(weight, bias, Operator(fold=f))
    assert torch.equal(weight, whole.bfloat16()) and torch.equal(bias, shift.bfloat16())


def rows_from(x: Tensor, y: Tensor) -> Callable[[int, int], Any]:
    return lambda first, last: iter([(i, x[i : i + 1], y[i : i + 1] - x[i : i + 1]) for i in range(first, last)])


def settled(**values: Any) -> Any:
    from stages.ghost import Ghost

    return Ghost(**values)


def nobody(windows: int, tokens: int) -> Apart:
    return Apart(torch.zeros(windows, tokens, dtype=torch.bool), None, torch.full((windows, tokens), -1))


def test_an_absolute_ridge_is_the_published_closed_form() -> None:
    x, y = uneven(seed=11)
    wanted = settled(ridge=1e-6, ridge_rule="absolute")
    fitted, figures = fit_operator(ghost_file.ghost, rows_from(x, y), nobody(6, 40), 5, wanted, None, 12, "cpu", "here")
    rows, steps = x[:5].flatten(0, 1), (y - x)[:5].flatten(0, 1)
    published = torch.linalg.solve(rows.T @ rows + 1e-6 * torch.eye(12, dtype=F64), rows.T @ steps)
    assert float((fitted.operator.matrix(12) - published).abs().max()) < 1e-11
    assert figures["ridge_absolute"] == pytest.approx(1e-6)


def test_a_ridge_chosen_on_held_out_rows_is_the_best_of_the_grid() -> None:
    """Few noisy tokens: the least ridge is not the best one."""
    x = draw(3, 8, 12, seed=1)
    y = x + 0.01 * x @ draw(12, 12, seed=2) + draw(3, 8, 12, seed=3)
    grid = [1e-6, 1e-2, 1.0, 10.0]
    errors = {}
    for ridge in grid:
        _, figures = fit_operator(ghost_file.ghost, rows_from(x, y), nobody(3, 8), 2, settled(ridge=ridge), None, 12, "cpu", "")
        errors[ridge] = figures["heldout_error"]
    wanted = settled(ridge_rule="held_out", ridge_grid=grid)
    _, chosen = fit_operator(ghost_file.ghost, rows_from(x, y), nobody(3, 8), 2, wanted, None, 12, "cpu", "")
    best = min(errors, key=lambda ridge: errors[ridge])
    assert best > 1e-6 and chosen["ridge"] == best and chosen["heldout_error"] == errors[best]


def test_one_sink_spoils_a_fit_unless_it_is_kept_out() -> None:
    """A token of 10,000 times the others' size, whose step is not theirs."""
    x, w = draw(4, 50, 8, seed=1), draw(8, 8, seed=2) * 0.3
    y = x + x @ w
    x[:, 0], y[:, 0] = 1e4 * draw(8, seed=3), 1e4 * draw(8, seed=4)
    found = torch.zeros(4, 50, dtype=torch.bool)
    found[:, 0] = True
    rule = Sinks("restore", True)
    apart = Apart(found, rule, rule.kinds(torch.zeros(4, 50, dtype=torch.long)))
    wanted = settled(sinks="restore", ridge=1e-12)
    fitted, figures = fit_operator(ghost_file.ghost, rows_from(x, y), apart, 3, wanted, None, 8, "cpu", "")
    torch.testing.assert_close(fitted.operator.matrix(8), w, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(fitted.operator.targets, y[0, :1])
    assert figures["heldout_error"] < 1e-6
    kept, _ = fit_operator(ghost_file.ghost, rows_from(x, y), nobody(4, 50), 3, settled(ridge=1e-4), None, 8, "cpu", "")
    assert float((kept.operator.matrix(8) - w).abs().max()) > 0.1


def test_antisymmetric_share_of_the_symmetric_is_none() -> None:
    x, y = uneven(seed=1)
    m = fit("symmetric", sums_of(x, y)).operator.dense
    assert m is not None and antisymmetry.antisymmetric_share(m) == 0
    assert antisymmetry.antisymmetric_share(solve_ridge(sums_of(x, y).grams, 0, "").m[0]) > 0.1
