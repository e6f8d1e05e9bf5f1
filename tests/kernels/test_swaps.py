"""What is made of swap scores: pairs, intervals, ranks, the regime; alignments and sinks. By hand and against other code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.decoder import divergence as kernels
from stages.redundancy import cka, cosine, swaps
from stages.redundancy.swaps import half_against_all, pairs_within, spearman, swap_variants
from stages.redundancy.verdict import verdict
from tests.kernels.shapes import checked

divergence, linear_cka = checked(kernels.divergence), checked(cka.linear_cka)
channel_cosines, sink_tokens = checked(cosine.channel_cosines), checked(cosine.sink_tokens)
sink_blocks = checked(cosine.sink_blocks)
intervals = checked(swaps.intervals)


def test_divergence_by_hand() -> None:
    p = torch.tensor([[0.5, 0.5], [0.9, 0.1]])
    kl = divergence(p, p.log(), torch.tensor([[3.0, 3.0], [0.0, 0.0]]))
    torch.testing.assert_close(kl, torch.tensor([0.0, 0.9 * np.log(1.8) + 0.1 * np.log(0.2)], dtype=torch.float32))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(2, 50), st.integers(0, 10**6))
def test_divergence_is_base_first_and_in_nats(positions: int, vocabulary: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    one, other = (torch.randn(positions, vocabulary, generator=draw) * 3 for _ in range(2))
    log_p = one.log_softmax(-1)
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=one.double()), torch.distributions.Categorical(logits=other.double())
    )
    torch.testing.assert_close(divergence(log_p.exp(), log_p, other).double(), expected, rtol=1e-4, atol=1e-5)
    assert float(divergence(log_p.exp(), log_p, one + 7).max()) < 1e-5, "logits have no zero point"


def test_pairs_of_unlike_blocks_are_set_apart() -> None:
    assert pairs_within(["a", "b", "a", "a"], 1) == ([(2, 3)], [(0, 1), (1, 2)])
    assert pairs_within(["a", "b", "a", "a"], 9)[0] == [(0, 2), (0, 3), (2, 3)]
    assert pairs_within(["a"], 1) == ([], [])


def test_variants_of_a_pair() -> None:
    deletions, rest = swap_variants(3, [(0, 2)])[:3], swap_variants(3, [(0, 2)])[3:]
    assert [one.steps(3) for one in deletions] == [(1, 2), (2,), ()]
    assert [one.steps(3) for one in rest] == [(2, 1, 2), (0,), (2, 1, 0)], "slot 0 runs 2; slot 2 runs 0; interchanged"


def test_ranks_by_hand() -> None:
    assert spearman(np.array([1.0, 2.0, 9.0]), np.array([10.0, 20.0, 21.0])) == pytest.approx(1)
    assert spearman(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])) == pytest.approx(-1)
    assert spearman(np.array([1.0, 1.0, 2.0, np.nan]), np.array([1.0, 3.0, 2.0, 0.0])) == pytest.approx(0), (
        "ties, and one missing"
    )
    assert np.isnan(spearman(np.array([1.0, 1.0]), np.array([1.0, 2.0])))
    assert half_against_all(np.array([[1.0, 1.0, 9.0, 9.0], [2.0, 2.0, 0.0, 0.0], [3.0, 3.0, 3.0, 3.0]])) == pytest.approx(-0.5)


def test_intervals_resample_prompts_together() -> None:
    values = np.random.default_rng(0).random((3, 40))
    low, high = intervals(values, 0.9, 500, 1)
    assert (low < values.mean(1)).all() and (values.mean(1) < high).all()
    again = intervals(values + 5, 0.9, 500, 1)
    np.testing.assert_allclose(again, np.stack([low, high]) + 5)
    normal = 1.645 * values.std(1) / 40**0.5
    np.testing.assert_allclose((high - low) / 2, normal, rtol=0.15)
    single = intervals(np.array([[2.0]]), 0.9, 100, 0)
    assert single[0] == single[1] == 2.0


@pytest.mark.parametrize(
    ("replacement", "interchange", "regime"),
    [
        ([0.01, 0.02, 5.0], [0.01, 0.01, 5.0], "tied"),
        ([0.4, 0.4, 0.01], [0.1, 0.1, 0.1], "divergent"),
        ([0.4, 0.4, 0.4], [0.3, 0.2, 0.5], "uninformative"),
        ([np.nan], [np.nan], "unknown"),
    ],
)
def test_regimes(replacement: list[float], interchange: list[float], regime: str) -> None:
    found = verdict(np.array(replacement), np.array(interchange), 0.1, 0.5)
    assert found["regime"] == regime
    if regime == "uninformative":
        assert (found["ratio"], found["pairs"]) == (pytest.approx(0.75), 3)
        assert found["interchange_above_replacement"] == 1 and found["gap"] == pytest.approx(0.2 / 3)
    if regime == "tied":
        assert (found["replacement"], found["replacement_mean"]) == (0.02, pytest.approx(5.03 / 3)), "median, mean"
        assert found["gap"] == pytest.approx(found["replacement_mean"] - found["interchange_mean"])


def test_no_regime_says_why() -> None:
    assert "finite" in verdict(np.array([np.nan]), np.array([1.0]), 0.1, 0.5)["note"]
    assert "no two adjacent inner blocks" in verdict(np.zeros(0), np.zeros(0), 0.1, 0.5)["note"]


def test_alignment_is_one_for_a_rotated_copy_and_known_otherwise() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(50, 4, generator=draw, dtype=torch.float64)
    y = torch.randn(50, 4, generator=draw, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(4, 4, generator=draw, dtype=torch.float64)).Q
    x, y = x - x.mean(0), y - y.mean(0)
    assert linear_cka(x.T @ x, x.T @ x @ rotation * 3, rotation.T @ x.T @ x @ rotation * 9) == pytest.approx(1)
    kernels_xy = [one @ one.T for one in (x, y)]  # in the space of tokens
    expected = (kernels_xy[0] * kernels_xy[1]).sum() / (kernels_xy[0].norm() * kernels_xy[1].norm())
    assert linear_cka(x.T @ x, x.T @ y, y.T @ y) == pytest.approx(float(expected))


def test_channel_cosines_run_along_tokens() -> None:
    stream = torch.randn(3, 5, 4)
    found = channel_cosines(stream)
    torch.testing.assert_close(found[:, 0, 2], torch.cosine_similarity(stream[0], stream[2], dim=0), atol=1e-6, rtol=0)


def test_sinks() -> None:
    stream = torch.ones(2, 5, 4)
    stream[1, 3] = 30.0
    assert sink_tokens(stream, 10.0).tolist() == [[False] * 5, [False, False, False, True, False]]
    assert not sink_tokens(stream, 31.0).any()


@pytest.mark.parametrize(
    ("peaks", "sinks", "found"),
    [
        ([1.0, 1.5, 900.0, 905.0, 20.0], [0, 0, 1, 1, 0], (1, 3)),
        ([1.0, 50.0, 1.0, 900.0, 905.0, 800.0], [0, 1, 0, 1, 1, 1], (2, None)),  # what fell before is another
        ([1.0, 1.5, 2.0, 2.5], [1, 1, 1, 1], (None, None)),
        ([1.0, 1.5, 900.0, 905.0, 20.0], [0, 0, 0, 0, 0], (None, None)),  # all tokens alike: no sink, though it grows
        ([1.0, 900.0, 950.0, 9500.0, 20.0], [0, 0, 0, 1, 0], (2, 3)),
    ],
)
def test_blocks_of_a_sink(peaks: list[float], sinks: list[int], found: tuple[int | None, int | None]) -> None:
    assert sink_blocks(torch.tensor(peaks), torch.tensor(sinks, dtype=torch.bool), 10.0) == found
