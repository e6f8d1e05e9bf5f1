"""ghost: closed-form operators that restore, where blocks were removed, what the next block expects."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from pipeline.params import Section
from stages.decoder.compute import Compute


class Ghost(Section):
    """Which operator, and how it is fitted."""

    READ_WHEN: ClassVar = {
        "ridge": ("ridge_rule", ("relative", "absolute")),
        "ridge_grid": ("ridge_rule", ("held_out",)),
        "rank": ("method", ("ghost_lowrank",)),
        "sink_weight": ("sinks", ("weight",)),
    }

    method: Literal[
        "none", "linearpatch_diag", "linearpatch_rotate", "least_squares_diag", "least_squares_rotate", "symmetric",
        "ghost", "ghost_affine", "ghost_lowrank", "replaceme",
    ] = "ghost"  # fmt: skip
    per: Literal["run", "block"] = "run"  # one operator for adjacent removed blocks together, or one for each
    fit: Literal["at_once", "sequential"] = "at_once"  # inputs: of the dense model, or of the masked and repaired one
    ridge: float = Field(default=1e-4, ge=0)  # in units of `ridge_rule`
    ridge_rule: Literal["relative", "absolute", "held_out"] = "relative"  # to trace(X'X) / channels; held_out: from the grid
    ridge_grid: list[float] = Field(default=[1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1], min_length=1)  # relative ridges
    held_out: float = Field(default=0.125, gt=0, lt=1)  # share of calibration windows kept out of the fit
    rank: int | None = Field(default=None, ge=1)  # ghost_lowrank; null: a third of the width
    sinks: Literal["keep", "weight", "bypass", "restore"] = "keep"  # tokens of enormous norm, see sink_threshold
    sink_threshold: float = Field(default=10.0, gt=1)  # a sink's norm, in medians of all tokens' norms at the boundary
    sink_weight: float = Field(default=0.01, ge=0, lt=1)  # sinks: weight
    accumulate: Literal["model", "float32"] = "model"  # precision in which the exported operator multiplies
    growth: bool = True  # follow the error through the blocks behind the operators

    @field_validator("ridge_grid")
    @classmethod
    def _positive(cls, value: list[float]) -> list[float]:
        if min(value) < 0:
            raise ValueError("ridges should be 0 or more")
        return value

    @model_validator(mode="after")
    def _foldable(self) -> Ghost:
        if self.method == "replaceme" and self.sinks in ("bypass", "restore"):
            raise ValueError(
                f"method: replaceme is folded into the weights and cannot treat tokens apart; sinks = '{self.sinks}' should be "
                "keep or weight"
            )
        if self.method == "replaceme" and self.per == "block":
            raise ValueError("method: replaceme has one matrix to change before each gap; per should be run")
        return self


class Params(BaseModel):
    """Sections of params.yaml this stage reads."""

    compute: Compute
    ghost: Ghost
