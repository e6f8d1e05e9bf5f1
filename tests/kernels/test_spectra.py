"""Tail exponents against the published loop over eigenvalues, written out anew with numpy's singular values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.statistics import spectra
from tests.kernels.shapes import checked


def eigenvalues_of(weight: torch.Tensor) -> np.ndarray:
    return np.sort(np.linalg.svd(weight.double().numpy(), compute_uv=False) ** 2)


def exponent(values: np.ndarray, start: int) -> float:
    tail = values[start:]
    return 1 + len(tail) / np.log(tail / values[start]).sum()


def peak_by_scan(values: np.ndarray, corrected: bool = False) -> float:
    """One start at a time: keep the exponent whose power law lies closest to the tail's distribution."""
    counts, edges = np.histogram(np.log10(values), bins=100)
    peak = 10 ** edges[counts.argmax()]
    lower = 0.95 * peak if corrected else np.log10(0.95 * peak)
    best, closest = 0.0, 1.0
    for start in range(len(values) - 1):
        if not lower <= values[start] <= 1.5 * peak:
            continue
        alpha, tail = exponent(values, start), values[start:]
        law = 1 - (tail / values[start]) ** (1 - alpha)
        distance = np.abs(law - np.arange(len(tail)) / len(tail)).max()
        if distance < closest:
            best, closest = alpha, distance
    return best


@settings(max_examples=25, deadline=None)
@given(st.integers(3, 60), st.integers(3, 60), st.floats(0.01, 30), st.integers(0, 10**6))
def test_exponents_are_those_of_the_published_loop(rows: int, columns: int, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = scale * torch.randn(rows, columns, generator=generator) * torch.rand(columns, generator=generator)
    values, found = eigenvalues_of(weight), checked(spectra.tail_exponents)(weight)
    assert found["alpha_mid"] == pytest.approx(exponent(values, len(values) // 2), rel=1e-6)
    assert found["alpha_peak"] == pytest.approx(peak_by_scan(values), rel=1e-6)
    assert found["alpha_peak_corrected"] == pytest.approx(peak_by_scan(values, corrected=True), rel=1e-6)


def test_more_starts_than_are_scanned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(40, 90, generator=torch.Generator().manual_seed(0))
    before = spectra.tail_exponents(weight)
    monkeypatch.setattr(spectra, "CHUNK", 7)
    assert spectra.tail_exponents(weight) == before


def test_a_power_law_is_found() -> None:
    """Eigenvalues i^(-1/(α - 1)) have the tail exponent α; here 3."""
    values = torch.arange(4000, 0, -1, dtype=torch.float64) ** -0.5
    assert spectra.alpha_mid(values) == pytest.approx(3, rel=0.01)


def test_by_hand() -> None:
    """Eigenvalues 1, e, e², e³: from the third on, n = 2 and the logarithms exceed the first by 0 and 1, so α = 1 + 2 / 1."""
    weight = torch.diag(torch.tensor([0.0, 1.0, 2.0, 3.0]).div(2).exp())
    assert spectra.tail_exponents(weight)["alpha_mid"] == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize("weight", [torch.zeros(4, 6), torch.eye(5), torch.ones(3, 1)], ids=["zero", "alike", "one"])
def test_spectra_without_a_tail_have_no_exponent(weight: torch.Tensor) -> None:
    assert spectra.tail_exponents(weight)["alpha_peak"] is None


def test_zeros_but_for_rounding_are_left_out() -> None:
    """Rank 3 of 8: an eigenvalue of 1e-17 would rule the histogram."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(8, 3, generator=generator) @ torch.randn(3, 20, generator=generator)
    assert len(spectra.spectrum(weight.double())) == 3
    assert all(value is not None and math.isfinite(value) for value in spectra.tail_exponents(weight.double()).values())
