"""Magnitude pruning: small weights go first."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def magnitude(weight: Float[Tensor, "out in"], squares: Float[Tensor, " in_or_none"]) -> Float[Tensor, "out in"]:
    """|W|, in float32. `squares` is not used."""
    return weight.float().abs()
