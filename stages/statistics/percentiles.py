"""Exact percentiles of |x| over a stream of batches, in constant memory.

The bits of a non-negative floating-point number, read as an integer, are in the order of the numbers. So a histogram over
the upper 16 bits finds the bucket an order statistic lies in; for 16-bit types that bucket is one value, and for float32 a
second histogram over the lower 16 bits of the values in that bucket finds the value itself.

The percentile q of N values is the ⌈q N / 100⌉-th smallest: always one of the values, never an interpolation.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

BUCKETS = 1 << 15  # the sign bit is gone
FINE = 1 << 16


def magnitude_bits(x: Float[Tensor, "*any"]) -> Int[Tensor, " values"]:
    """The bits of |x| as int32, in the order of |x|: 32 bits for float32, the upper half of float32 for bfloat16.

    float16 is widened to float32 first.
    """
    flat = x.reshape(-1).abs()
    if flat.dtype == torch.bfloat16:
        return flat.view(torch.int16).to(torch.int32) << 16
    return flat.float().view(torch.int32)


def coarse_histogram(bits: Int[Tensor, " values"]) -> Int[Tensor, " bucket"]:
    """Counts per upper half, [32768]."""
    return torch.bincount(bits >> 16, minlength=BUCKETS)


def fine_histograms(bits: Int[Tensor, " values"], buckets: list[int]) -> dict[int, Int[Tensor, " value"]]:
    """For each of some buckets of the coarse histogram, counts per lower half among the values in it, [65536]."""
    values = bits.cpu().numpy()  # numpy picks values out of an array ten times as fast
    upper = (values >> 16).astype(np.int16)  # half the bytes to look through once per bucket
    pick = lambda bucket: values[np.flatnonzero(upper == bucket)] & (FINE - 1)  # noqa: E731
    return {bucket: torch.from_numpy(np.bincount(pick(bucket), minlength=FINE)) for bucket in buckets}


def rank_of(percentile: float, count: int) -> int:
    """⌈percentile/100 · count⌉, at least 1."""
    return max(1, math.ceil(Fraction(str(percentile)) * count / 100))


def locate(counts: Int[Tensor, " bucket"], rank: int) -> tuple[int, int]:
    """(bucket, rank inside it) of the `rank`-th smallest value of a histogram."""
    cumulative = counts.cumsum(0)
    bucket = int(torch.searchsorted(cumulative, rank))
    return bucket, rank - (int(cumulative[bucket - 1]) if bucket else 0)


def value_of(bucket: int, fine: int = 0) -> float:
    """The number whose bits are `bucket` above and `fine` below."""
    return float(torch.tensor((bucket << 16) | fine, dtype=torch.int32).view(torch.float32))


def bits_of(value: float) -> int:
    """The bits of a non-negative number, rounded to float32."""
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


def count_above(counts: Int[Tensor, " bucket"], fine: Int[Tensor, " value"] | None, threshold: float) -> int:
    """How many values exceed `threshold`, given the coarse histogram and the fine one of the threshold's bucket.

    Without `fine` (16-bit types) a bucket is one value.
    """
    bits = bits_of(threshold)
    bucket, low = bits >> 16, bits & (FINE - 1)
    above = int(counts[bucket + 1 :].sum())
    return above if fine is None else above + int(fine[low + 1 :].sum())
