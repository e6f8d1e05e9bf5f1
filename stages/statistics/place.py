"""What is measured at one place: percentiles, mean, norm and outliers of the activations that pass it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from stages.statistics.distribution import Distribution
from stages.statistics.percentiles import rank_of


def column_name(value: float, prefix: str = "p") -> str:
    """`p99`, `p99.9`: the column of a percentile in statistics.csv, with all of its digits."""
    return f"{prefix}{value!r}".removesuffix(".0")


class Place(Distribution):
    """A distribution of activations, with sums per channel and, if asked, percentiles per sequence."""

    def __init__(self, what: str = "", sequences: Sequence[float] = ()):
        """
        Args:
            sequences: percentiles that are also taken of each window by itself.
        """
        super().__init__(what)
        self.tokens = 0
        self.energy = 0.0  # Σ x²
        self.squares = torch.zeros(0, dtype=torch.float64)
        self._asked = list(sequences)
        self._sequences: list[list[float]] | None = []  # None: what passes here is not made of whole windows

    def see(self, x: Float[Tensor, "*any channel"], windows: int | None = None) -> None:
        """First look at x, which holds all tokens of `windows` windows (None: tokens picked from them, as for an expert).

        Raises ArtifactError if it holds NaN or infinity.
        """
        self.first_look(x)
        flat = x.reshape(-1, x.shape[-1])
        if len(self.squares) == 0:
            self.squares = torch.zeros(x.shape[-1], dtype=torch.float64, device=x.device)
        squares = flat.float().square().sum(0, dtype=torch.float64)
        self.squares += squares
        self.energy += float(squares.sum())
        self.tokens += len(flat)
        if windows is None:
            self._sequences = None
        elif self._asked and self._sequences is not None:
            self._sequences += sequence_percentiles(flat.view(windows, -1), self._asked)

    def pool_place(self, other: Place) -> None:
        """Add all that another place of the same tokens has seen in its first look, whatever its channels."""
        self.pool(other)
        self.energy += other.energy
        self.tokens = max(self.tokens, other.tokens)

    def row(self, percentiles: Sequence[float], outlier: float, parameters: int) -> dict[str, Any]:
        """One row of statistics.csv; all but `parameters` empty at a place no token passed."""
        head: dict[str, Any] = {"tokens": self.tokens, "width": len(self.squares), "parameters": parameters}
        names = [column_name(q) for q in percentiles] + ["mean", "norm", "max", "outlier_ratio"]
        each = [f"{column_name(q)}_per_sequence" for q in self._asked]
        if self.count == 0:
            return head | dict.fromkeys([*names, *each])
        values = [self.percentile(q) for q in percentiles]
        norm = (self.energy / self.count) ** 0.5
        row = head | dict(zip(names, [*values, self.mean, norm, self.largest, self.share_above(outlier)], strict=True))
        means = np.mean(self._sequences, axis=0).tolist() if self._sequences else [None] * len(each)
        return row | dict(zip(each, means, strict=True))


def sequence_percentiles(x: Float[Tensor, "window value"], percentiles: Sequence[float]) -> list[list[float]]:
    """The percentiles of |x| of each window, [window][percentile]: always one of its values, as of the whole."""
    ranks = [rank_of(q, x.shape[1]) - 1 for q in percentiles]
    return [np.sort(one.numpy())[ranks].tolist() for one in x.float().abs().cpu()]
