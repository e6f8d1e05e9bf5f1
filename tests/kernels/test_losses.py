"""Losses per token, and the interval of their mean."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stages.evaluation import losses
from stages.evaluation.bootstrap import mean_interval
from tests.kernels.shapes import checked

token_losses = checked(losses.token_losses)


def test_losses_are_a_log_softmax_by_hand() -> None:
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0)) * 4
    targets = torch.tensor([0, 10, 3, 3, 7, 1])
    for found, row, target in zip(token_losses(logits, targets), logits.tolist(), targets.tolist(), strict=True):
        normaliser = math.log(math.fsum(math.exp(one) for one in row))
        assert float(found) == pytest.approx(normaliser - row[target], rel=1e-5)


def test_losses_are_float32_and_survive_large_logits() -> None:
    logits = torch.tensor([[30000.0, 0.0], [0.0, 30000.0]], dtype=torch.bfloat16)
    found = token_losses(logits, torch.tensor([0, 0]))
    assert found.dtype == torch.float32 and found.tolist() == [0.0, float(logits[0, 0])]


def test_equal_logits_give_the_logarithm_of_the_vocabulary() -> None:
    assert float(token_losses(torch.zeros(1, 49152), torch.tensor([40000]))) == pytest.approx(math.log(49152))


def test_equal_windows_have_no_spread() -> None:
    assert mean_interval(np.full(7, 2.5), 0.95, 200, 0) == (2.5, 2.5)
    assert mean_interval(np.array([1.5]), 0.95, 200, 0) == (1.5, 1.5), "a single window"


def test_the_interval_comes_from_the_seed() -> None:
    values = np.random.default_rng(0).normal(size=20)
    assert mean_interval(values, 0.95, 500, 1) == mean_interval(values, 0.95, 500, 1)
    assert mean_interval(values, 0.95, 500, 1) != mean_interval(values, 0.95, 500, 2)


def test_more_confidence_is_wider() -> None:
    values = np.random.default_rng(0).normal(size=20)
    narrow, wide = mean_interval(values, 0.5, 2000, 0), mean_interval(values, 0.99, 2000, 0)
    assert wide[0] < narrow[0] < values.mean() < narrow[1] < wide[1]


def test_the_interval_covers_as_often_as_it_says() -> None:
    """Normal values of known mean: about 90 of 100 intervals hold it, and they are as wide as theory says."""
    generator = np.random.default_rng(3)
    samples = [generator.normal(5.0, 2.0, size=60) for _ in range(300)]
    intervals = [mean_interval(sample, 0.9, 400, seed) for seed, sample in enumerate(samples)]
    covered = np.mean([low <= 5.0 <= high for low, high in intervals])
    assert 0.84 <= covered <= 0.94
    assert np.mean([high - low for low, high in intervals]) == pytest.approx(2 * 1.645 * 2.0 / 60**0.5, rel=0.05)


def test_windows_weigh_by_their_tokens() -> None:
    """A window of three tokens among windows of one counts three times in each resample."""
    values, weights = np.array([0.0, 4.0, 0.0]), np.array([1.0, 3.0, 1.0]) / (5 / 3)
    drawn = np.random.default_rng(0).integers(0, 3, (4000, 3))
    means = [float(np.average(values[row], weights=weights[row])) for row in drawn]
    assert mean_interval(values, 0.5, 4000, 0, weights) == pytest.approx(np.quantile(means, [0.25, 0.75]))
