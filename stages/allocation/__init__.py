"""allocation: shares the global sparsity out over the blocks, to the exact budget."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, model_validator

from pipeline.params import Section


class Pals(Section):
    """Percentile-aware layerwise sparsity (arXiv 2607.07557). Its sources leave these choices open."""

    source: Literal["block_input", "block_output", "linear_inputs"] = "block_output"
    percentile: float = Field(default=99.0, gt=0, le=100)
    bound: float = Field(default=0.05, ge=0, lt=1)
    slope: float = Field(default=0.05, ge=0)
    normalisation: Literal["zscore", "minmax", "rank"] = "zscore"
    projection: Literal["shift", "none"] = "shift"


class Allocation(Section):
    """How much each block gives up."""

    method: Literal["uniform", "pals"] = "uniform"
    sparsity: float = Field(default=0.5, ge=0, lt=1)
    pals: Pals = Pals()

    @model_validator(mode="after")
    def _bound_within_target(self) -> Allocation:
        room = round(min(self.sparsity, 1 - self.sparsity), 12)  # 1 - 0.9 is a little less than 0.1
        if self.method == "pals" and self.sparsity > 0 and self.pals.bound > room:
            raise ValueError(
                f"pals.bound = {self.pals.bound} is more than sparsity = {self.sparsity} has room for; allowed: 0 to {room:g}"
            )
        return self


class Params(BaseModel):
    """Sections of params.yaml this stage reads."""

    allocation: Allocation
