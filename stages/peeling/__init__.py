"""peeling: closed-form linear references that say how much of each block's work a straight line explains."""

from __future__ import annotations

from pydantic import BaseModel, Field, field_validator

from pipeline.params import Section
from stages.decoder.compute import Compute


class Peeling(Section):
    """Which references are fitted."""

    reach: list[int] = Field(default=[1, 2, 4], min_length=1)  # target boundaries, counted from each block's input
    ridge: float = Field(default=1e-4, ge=0)  # relative to trace(X'X) / channels
    held_out: float = Field(default=0.125, gt=0, lt=1)
    keep: bool = False  # store the fitted maps, channels x channels each

    @field_validator("reach")
    @classmethod
    def _forward(cls, value: list[int]) -> list[int]:
        if min(value) < 1 or len(set(value)) != len(value):
            raise ValueError("steps should be 1 or more, each given once")
        return value


class Params(BaseModel):
    """Sections of params.yaml this stage reads."""

    compute: Compute
    peeling: Peeling
