"""What is measured at one place: percentiles, mean, norm and outliers of the activations that pass it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeline.artifacts import ArtifactError
from stages.statistics.percentiles import (
    BUCKETS,
    FINE,
    coarse_histogram,
    count_above,
    fine_histograms,
    locate,
    magnitude_bits,
    rank_of,
    value_of,
)


def column_name(percentile: float) -> str:
    """`p99`, `p99.9`: the column of a percentile in statistics.csv, with all of its digits."""
    return f"p{percentile!r}".removesuffix(".0")


class Place:
    """Sums and histograms over the tokens seen so far; constant memory.

    Every batch is shown to `first_look`; then `aim` says which buckets must be resolved, and, for types wider than 16
    bits, every batch is shown again to `second_look`.
    """

    def __init__(self, what: str = ""):
        self.what = what
        self.tokens = 0
        self.count = 0
        self.total = 0.0
        self.largest = 0.0
        self.squares = torch.zeros(0, dtype=torch.float64)
        self.coarse = torch.zeros(BUCKETS, dtype=torch.int64)
        self.fine: dict[int, Tensor] = {}
        self.wide = False
        self.threshold = 0.0

    def first_look(self, x: Tensor) -> None:
        """Add x [..., channel]. Raises ArtifactError if it holds NaN or infinity."""
        flat = x.reshape(-1, x.shape[-1])
        magnitude = flat.float().abs()
        total = float(magnitude.sum(dtype=torch.float64))
        if total != total or total == float("inf"):
            raise ArtifactError(f"{self.what or 'tape'}: NaN or infinite activations")
        if len(self.squares) == 0:
            self.squares = torch.zeros(x.shape[-1], dtype=torch.float64, device=x.device)
        self.squares += magnitude.square().sum(0, dtype=torch.float64)
        self.total += total
        self.largest = max(self.largest, float(magnitude.max())) if magnitude.numel() else self.largest
        self.tokens += len(flat)
        self.count += flat.numel()
        self.wide |= x.dtype != torch.bfloat16
        self.coarse += coarse_histogram(magnitude_bits(flat)).cpu()

    def aim(self, percentiles: list[float], outlier: float) -> None:
        """After the first look at everything: choose the buckets to resolve."""
        if self.count == 0:
            return
        self.threshold = outlier * self.total / self.count
        buckets = {locate(self.coarse, rank_of(q, self.count))[0] for q in percentiles}
        buckets.add(int(torch.tensor(self.threshold, dtype=torch.float32).view(torch.int32)) >> 16)
        if self.wide:
            self.fine = {bucket: torch.zeros(FINE, dtype=torch.int64) for bucket in sorted(buckets)}

    @property
    def needs_second_look(self) -> bool:
        """Whether a coarse bucket holds more than one value."""
        return bool(self.fine)

    def second_look(self, x: Tensor) -> None:
        """Resolve the chosen buckets; show the same batches as before."""
        for bucket, counts in fine_histograms(magnitude_bits(x), list(self.fine)).items():
            self.fine[bucket] += counts.cpu()

    def percentile(self, q: float) -> float:
        """The ⌈qN/100⌉-th smallest |x|."""
        bucket, rank = locate(self.coarse, rank_of(q, self.count))
        return value_of(bucket, locate(self.fine[bucket], rank)[0] if self.wide else 0)

    def outlier_ratio(self) -> float:
        """Share of |x| above the outlier threshold, a multiple of the mean |x|."""
        bucket = int(torch.tensor(self.threshold, dtype=torch.float32).view(torch.int32)) >> 16
        return count_above(self.coarse, self.fine.get(bucket), self.threshold) / self.count

    def row(self, percentiles: list[float], parameters: int) -> dict[str, Any]:
        """One row of statistics.csv; all but `parameters` empty at a place no token passed."""
        head: dict[str, Any] = {"tokens": self.tokens, "width": len(self.squares), "parameters": parameters}
        names = [column_name(q) for q in percentiles] + ["mean", "norm", "max", "outlier_ratio"]
        if self.count == 0:
            return head | dict.fromkeys(names)
        values = [self.percentile(q) for q in percentiles]
        norm = float(self.squares.sum() / self.count) ** 0.5
        return head | dict(zip(names, [*values, self.total / self.count, norm, self.largest, self.outlier_ratio()], strict=True))
