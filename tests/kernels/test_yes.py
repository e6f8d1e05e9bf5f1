"""Target maps, verdicts and the closed-form bounds of ReLU networks, by hand and against oracles of their own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import PalimpsestError
from stages.yes.descent import descend, schedule
from stages.yes.maps import build_trie, chosen_maps, count_fits, families, named, spell, staircases
from stages.yes.relu import yes_bounds, yes_subset, yes_zero
from stages.yes.verdict import difference, layers, light, running_minima


def test_the_eight_staircases_of_four_blocks() -> None:
    spelled = {"".join(map(str, targets)) for targets in staircases(4).values()}
    assert spelled == {"4444", "1444", "2244", "3334", "1244", "1334", "2234", "1234"}


@given(st.integers(1, 6))
@settings(deadline=None)
def test_a_staircase_is_a_set_of_stops(blocks: int) -> None:
    """By the other definition: maps that never fall, never lag behind their block, and stop only where they say."""
    every = itertools.product(range(1, blocks + 1), repeat=blocks)
    oracle = {t for t in every if all(t[i] >= i + 1 and t[t[i] - 1] == t[i] for i in range(blocks)) and list(t) == sorted(t)}
    assert set(staircases(blocks).values()) == oracle and len(oracle) == 2 ** (blocks - 1)


@pytest.mark.parametrize(("blocks", "fits", "apart"), [(4, 26, 32), (8, 502, 1024)])
def test_what_maps_have_in_common_is_fitted_once(blocks: int, fits: int, apart: int) -> None:
    maps = staircases(blocks)
    assert count_fits(build_trie(maps)) == fits and sum(map(len, maps.values())) == apart


def test_named_maps_by_hand() -> None:
    assert {name: spell(named(name, 6)) for name in (
        "direct", "all_last", "first_last", "prefix_2", "stages_2", "stages_3", "stages_4", "skip_2", "without_0", "without_4",
        "2-2-6",
    )} == {
        "direct": "1-2-3-4-5-6", "all_last": "6-6-6-6-6-6", "first_last": "1-6-6-6-6-6", "prefix_2": "1-2-6-6-6-6",
        "stages_2": "3-3-3-6-6-6", "stages_3": "2-2-4-4-6-6", "stages_4": "2-2-3-4-6-6", "skip_2": "3-6",
        "without_0": "2-2-3-4-5-6", "without_4": "1-2-3-4-6-6", "2-2-6": "2-2-6",
    }  # fmt: skip


@given(st.integers(1, 60))
def test_families_are_maps_and_each_is_there_once(blocks: int) -> None:
    maps = families(blocks)
    assert len(set(maps.values())) == len(maps) and {named("direct", blocks), named("all_last", blocks)} <= set(maps.values())
    for targets in maps.values():
        assert list(targets) == sorted(targets) and targets[-1] == blocks and targets[0] >= 1 and len(targets) <= blocks


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("staircases", r"yes\.maps = 'staircases': 256 maps of 9 blocks; it goes up to 8 blocks"),
        (["prefix_10"], r"yes\.maps: no map 'prefix_10' in a model of 9 blocks; allowed: prefix_1 to prefix_9"),
        (["without_8"], r"no map 'without_8' .* allowed: without_0 to without_7"),
        (["1-2-1-9"], r"no map '1-2-1-9' .* targets that never fall"),
        (["1-8"], r"no map '1-8' .* the last one being 9"),
    ],
)
def test_maps_that_the_model_has_not_are_refused(wanted: str | list[str], message: str) -> None:
    with pytest.raises(PalimpsestError, match=message):
        chosen_maps(wanted, 9)


def test_a_map_under_two_names_is_fitted_once() -> None:
    assert list(chosen_maps(["first_last", "prefix_1", "1-4-4-4", "direct"], 4)) == ["first_last", "direct"]


def shifted(by: float, spread: float) -> np.ndarray:
    """Four windows whose mean is `by` and whose standard error is `spread`."""
    return by + spread * np.sqrt(3) * np.array([1, -1, 1, -1])


def test_difference_is_paired() -> None:
    base = np.array([1.0, 5.0, 2.0, 9.0])
    assert difference(base + shifted(0.3, 0.1), base) == pytest.approx((0.3, 0.1))
    assert difference(base[:1] + 1, base[:1]) == pytest.approx((1.0, np.nan), nan_ok=True)


@pytest.mark.parametrize(
    ("above_zero", "above_best", "expected"),
    [(0.31, 0.5, "red"), (0.29, 0.5, "amber"), (-1.0, 0.31, "amber"), (-1.0, 0.29, "green"), (-1.0, -0.5, "green")],
)
def test_lights_change_at_the_tolerance(above_zero: float, above_best: float, expected: str) -> None:
    """Three standard errors of 0.1 each."""
    loss = np.array([3.0, 4.0, 2.0, 3.0])
    assert light(loss, loss - shifted(above_zero, 0.1), loss - shifted(above_best, 0.1), 3.0) == expected


def test_without_tolerance_equal_is_not_above() -> None:
    loss = np.array([1.0, 2.0])
    assert light(loss, loss, loss, 0.0) == "green"
    assert light(loss, loss, loss - 1e-9, 0.0) == "amber"
    assert light(loss, loss - 1e-9, loss - 1e-9, 0.0) == "red"


def test_a_single_window_gives_no_light() -> None:
    one = np.array([3.0])
    assert light(one, one - 1, one - 1, 0.0) == "none"
    (layer, _) = layers({"direct": (1, 2, 3), "b": (3, 3, 3)}, {"direct": one, "b": one - 1}, 3, 0.0)
    assert (layer.gap, layer.stepping_stone) == (1.0, "") and np.isnan(layer.gap_error)


def test_layers_by_hand() -> None:
    """Of three blocks. Boundary 1 is skipped by 2-2-3 and 3-3-3, boundary 2 by 1-3-3 and 3-3-3."""
    maps = {"direct": (1, 2, 3), "a": (2, 2, 3), "b": (1, 3, 3), "c": (3, 3, 3)}
    base = np.array([1.0, 2.0, 3.0, 2.0])
    losses = {"direct": base, "a": base - shifted(0.4, 0.1), "b": base + 0.2, "c": base - shifted(0.2, 0.1)}
    first, second = layers(maps, losses, 3, 3.0)
    assert (first.alternative, first.stepping_stone, second.alternative, second.stepping_stone) == ("a", "poor", "c", "fine")
    assert (first.gap, first.gap_error, second.gap) == pytest.approx((0.4, 0.1, 0.2))
    assert (first.skipped, second.skipped) == (0.5, 0.5)
    assert (first.skipped_best, second.skipped_best) == (1.0, 0.0), "the best tenth of four maps is one: a"
    assert np.isnan(layers({"c": (3, 3, 3)}, losses, 3, 3.0)[0].gap), "no direct map, no gap"


def test_running_minima_never_rise() -> None:
    assert running_minima([3.0, 2.5, 2.7, 2.1]) == [3.0, 2.5, 2.5, 2.1]


Network = tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]


def columns(seed: int, width: int = 5, samples: int = 40, positive: bool = True) -> Network:
    """X, Y and the outputs of two hidden layers of a random network."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    x, y = draw(width, samples), draw(width, samples)
    hidden = [(draw(width, width) @ x).relu()]
    hidden.append((draw(width, width) @ hidden[0]).relu())
    return x, y.abs() if positive else y, hidden


def plain_chain(x: np.ndarray, targets: list[np.ndarray], y: np.ndarray) -> float:
    """The same by numpy's least squares, layer after layer."""
    z = x
    for layer, target in enumerate(targets):
        w = np.linalg.lstsq(z.T, target.T, rcond=None)[0].T
        z = w @ z if layer == len(targets) - 1 else np.maximum(w @ z, 0)
    return float(((z - y) ** 2).sum() / y.shape[1])


@given(st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_relu_bounds_against_numpy_and_nested(seed: int) -> None:
    x, y, hidden = columns(seed, positive=False)
    a, b, h = x.numpy(), y.numpy(), [one.numpy() for one in hidden]
    assert yes_zero(x, y, 3) == pytest.approx(plain_chain(a, [b, b, b], b))
    each = {(1,): [h[0], b, b], (2,): [h[1], h[1], b], (1, 2): [h[0], h[1], b]}
    for stops, targets in each.items():
        assert yes_subset(x, y, hidden, stops) == pytest.approx(plain_chain(a, targets, b))
        assert yes_subset(x, y, hidden, stops, ridge=1e-13) == pytest.approx(plain_chain(a, targets, b), rel=1e-4), "from Grams"
    bounds = yes_bounds(x, y, hidden)
    assert bounds == sorted(bounds, reverse=True) and bounds[0] == pytest.approx(yes_zero(x, y, 3))
    assert bounds[2] == pytest.approx(min(bounds[0], *(plain_chain(a, t, b) for t in each.values())))
    later = yes_bounds(x, y, [one * 0.5 for one in hidden], previous=[0.9 * bounds[0], bounds[1], 0.0])
    assert later[0] == pytest.approx(0.9 * bounds[0]) and later[1] <= bounds[1] and later[2] == 0.0


@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=20, deadline=None)
def test_yes_zero_cannot_rise_with_depth_where_targets_are_positive(seed: int, bias: bool) -> None:
    x, y, _ = columns(seed)
    found = [yes_zero(x, y, layers, bias) for layers in range(1, 5)]
    assert all(later <= before * (1 + 1e-9) for before, later in itertools.pairwise(found))


def test_one_layer_is_least_squares_and_a_linear_network_gives_nothing() -> None:
    x, y, _ = columns(3, positive=False)
    assert yes_zero(x, y, 1) == pytest.approx(plain_chain(x.numpy(), [y.numpy()], y.numpy()))
    ones = np.vstack([x.numpy(), np.ones((1, x.shape[1]))])
    assert yes_zero(x, y, 1, bias=True) == pytest.approx(plain_chain(ones, [y.numpy()], y.numpy()))
    x = x.abs()
    w = torch.rand(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    realisable = [w @ x, w @ w @ x]
    assert yes_bounds(x, w @ w @ w @ x, realisable) == pytest.approx([0, 0, 0], abs=1e-12)


def test_descent_keeps_the_best_and_stops_early() -> None:
    """The held-out loss falls twice and then rises: two looks later it stops, and gives back what it had then."""
    point = torch.zeros(1, requires_grad=True)
    seen: list[float] = []

    def heldout() -> float:
        seen.append(float(point.detach()))
        return [3.0, 2.0, 1.0, 1.5, 1.2, 0.0][len(seen) - 1]

    arguments = {"steps": 40, "learning_rate": 0.1, "optimiser": "adamw", "check": 4, "what": "a point"}
    found = descend([point], lambda step: (point - 10).square().sum(), heldout, patience=2, **arguments)  # type: ignore[arg-type]
    assert (found.steps, found.heldout) == (16, 1.0) and float(found.best[0]) == seen[2] != seen[-1]
    with pytest.raises(PalimpsestError, match=r"a point: no finite held-out loss; lower yes\.learning_rate"):
        descend([point], lambda step: point.sum(), lambda: float("nan"), patience=0, **arguments)  # type: ignore[arg-type]


def test_the_schedule_rises_and_ends_at_nothing() -> None:
    values = [schedule(step, 100) for step in range(100)]
    assert values[0] == pytest.approx(0.2) and max(values) == values[4] and values[-1] < 1e-3
    assert all(later < before for before, later in itertools.pairwise(values[4:]))
