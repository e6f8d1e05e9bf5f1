"""allocation: shares the global sparsity out over the blocks, or over all matrices, to the exact budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from pipeline.params import Section

FLOOR = 0.01  # where the published rule has no bounds: every layer keeps this share, and gives up this share


class Standardised(Section):
    """Sparsity falls by `slope` per unit of normalised score, within target ± `bound`."""

    normalisation: Literal["zscore", "minmax", "rank"] = "zscore"
    slope: float = Field(default=0.05, ge=0)
    bound: float = Field(default=0.05, ge=0, lt=1)


class Pals(Standardised):
    """Percentile-aware layerwise sparsity (arXiv 2607.07557). Its sources leave most of these choices open."""

    source: Literal["block_input", "block_output", "linear_inputs"] = "block_output"
    pooling: Literal["pooled", "mean_of_sequences"] = "pooled"
    percentile: float = Field(default=99.0, gt=0, le=100)
    sign: Literal["spare_high", "spare_low"] = "spare_high"


class Owl(Section):
    """Outlier-weighed layerwise sparsity (arXiv 2310.05175): `spread` is its λ, `multiple` its M."""

    multiple: float = Field(default=5.0, gt=1)
    spread: float = Field(default=0.08, ge=0, lt=1)


class Dlp(Section):
    """Dynamic layerwise pruning (arXiv 2505.23807): `spread` is its α; its code takes the mean, its paper the median."""

    reducer: Literal["mean", "median"] = "mean"
    spread: float = Field(default=0.15, ge=0, lt=1)


class AlphaPruning(Section):
    """AlphaPruning (arXiv 2410.10912): `spread` is its ε."""

    fit: Literal["peak", "mid"] = "peak"
    window: Literal["faithful", "corrected"] = "faithful"
    spread: float = Field(default=0.3, ge=0, lt=1)


class Gradient(Standardised):
    """By the mean of |∂L/∂W|, or of |W · ∂L/∂W|."""

    kind: Literal["gradient", "weighted"] = "weighted"


class Random(Standardised):
    """By normal random numbers: what any rule has to beat."""

    seed: int = Field(default=0, ge=0)


class Measured(Standardised):
    """By the rise in loss when one block alone is pruned (stage sensitivity)."""


class Allocation(Section):
    """How much each block or matrix gives up."""

    method: Literal["uniform", "pals", "owl", "dlp", "alphapruning", "gradient", "random", "measured"] = "uniform"
    sparsity: float = Field(default=0.5, ge=0, lt=1)
    granularity: Literal["block", "linear"] = "block"
    projection: Literal["projected", "faithful"] = "projected"
    pals: Pals = Pals()
    owl: Owl = Owl()
    dlp: Dlp = Dlp()
    alphapruning: AlphaPruning = AlphaPruning()
    gradient: Gradient = Gradient()
    random: Random = Random()
    measured: Measured = Measured()

    @model_validator(mode="after")
    def _bounds_can_meet_the_target(self) -> Allocation:
        knobs = getattr(self, self.method, None)
        if self.sparsity == 0 or knobs is None or self.projection == "faithful":
            return self
        if isinstance(knobs, Standardised):
            room = round(min(self.sparsity, 1 - self.sparsity), 12)  # 1 - 0.9 is a little less than 0.1
            if knobs.bound > room:
                raise ValueError(
                    f"{self.method}.bound = {knobs.bound} is more than sparsity = {self.sparsity} has room for; "
                    f"allowed: 0 to {room:g}"
                )
        elif not FLOOR <= self.sparsity <= 1 - FLOOR:
            raise ValueError(
                f"sparsity = {self.sparsity} cannot be met by {self.method}, which keeps every layer within {FLOOR} and "
                f"{1 - FLOOR}; allowed: that range, or projection: faithful"
            )
        return self


class Params(BaseModel):
    """Sections of params.yaml this stage reads."""

    allocation: Allocation


def check_with_others(sections: Mapping[str, Any]) -> None:
    """Refuse a method whose scores no other stage is asked to measure."""
    method = sections["allocation"].method
    if method == "measured" and sections["sensitivity"].method == "none":
        raise ValueError("allocation.method = 'measured' needs sensitivity.method: loss or kl (it is none)")
    if method == "gradient" and not sections["statistics"].gradient_windows:
        raise ValueError("allocation.method = 'gradient' needs statistics.gradient_windows of 1 or more (it is 0)")
