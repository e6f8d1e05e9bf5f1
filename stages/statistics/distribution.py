"""The distribution of |x| over a stream of batches: exact percentiles, mean and outliers, in constant memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from pipeline.artifacts import ArtifactError
from stages.statistics.percentiles import (
    BUCKETS,
    FINE,
    bits_of,
    coarse_histogram,
    count_above,
    fine_histograms,
    locate,
    magnitude_bits,
    rank_of,
    value_of,
)


class Distribution:
    """Every batch is shown to `first_look`; then `aim` says which buckets must be resolved, and, for types wider than 16
    bits, every batch is shown again to `second_look`.
    """

    def __init__(self, what: str = ""):
        """`what` is named where values are not finite."""
        self.what = what
        self.count = 0
        self.total = 0.0
        self.largest = 0.0
        self.coarse = torch.zeros(BUCKETS, dtype=torch.int64)
        self.fine: dict[int, Tensor] = {}
        self.wide = False

    def first_look(self, x: Float[Tensor, "*any"]) -> None:
        """Add x. Raises ArtifactError if it holds NaN or infinity."""
        magnitude = x.float().abs()
        total = float(magnitude.sum(dtype=torch.float64))
        if not total < float("inf"):  # nor NaN
            raise ArtifactError(f"{self.what or 'tape'}: NaN or infinite values")
        self.total += total
        self.largest = max(self.largest, float(magnitude.max())) if magnitude.numel() else self.largest
        self.count += x.numel()
        self.wide |= x.dtype != torch.bfloat16
        self.coarse += coarse_histogram(magnitude_bits(x)).cpu()

    def pool(self, other: Distribution) -> None:
        """Add all that `other` has seen in its first look."""
        self.total += other.total
        self.largest = max(self.largest, other.largest)
        self.count += other.count
        self.wide |= other.wide
        self.coarse += other.coarse

    def aim(self, percentiles: Sequence[float], multiples: Sequence[float]) -> None:
        """After the first look at everything: choose the buckets that hold these percentiles and multiples of the mean."""
        if self.count == 0 or not self.wide:
            return
        buckets = {locate(self.coarse, rank_of(q, self.count))[0] for q in percentiles}
        buckets |= {bits_of(multiple * self.mean) >> 16 for multiple in multiples}
        self.fine = {bucket: torch.zeros(FINE, dtype=torch.int64) for bucket in sorted(buckets)}

    @property
    def needs_second_look(self) -> bool:
        """Whether a coarse bucket holds more than one value."""
        return bool(self.fine)

    def second_look(self, x: Float[Tensor, "*any"], times: int = 1) -> None:
        """Resolve the chosen buckets; show the same batches as before. `times`: how often x was counted in the first look."""
        for bucket, counts in fine_histograms(magnitude_bits(x), list(self.fine)).items():
            self.fine[bucket] += times * counts.cpu()

    @property
    def mean(self) -> float:
        """Of |x|."""
        return self.total / self.count

    def percentile(self, q: float) -> float:
        """The ⌈qN/100⌉-th smallest |x|."""
        bucket, rank = locate(self.coarse, rank_of(q, self.count))
        return value_of(bucket, locate(self.fine[bucket], rank)[0] if self.wide else 0)

    def share_above(self, multiple: float) -> float:
        """Share of |x| above `multiple` times the mean |x|."""
        threshold = multiple * self.mean
        return count_above(self.coarse, self.fine.get(bits_of(threshold) >> 16), threshold) / self.count
