"""ghost: one closed-form operator per run of removed blocks, which restores what the next block expects."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from pipeline.params import Section
from stages.decoder.compute import Compute


class Ghost(Section):
    """Which operator, and how it is fitted."""

    method: Literal["none", "ghost"] = "ghost"
    ridge: float = Field(default=1e-4, ge=0)  # relative to trace(X'X) / channels
    held_out: float = Field(default=0.125, gt=0, lt=1)  # share of calibration windows kept out of the fit


class Params(BaseModel):
    """Sections of params.yaml this stage reads."""

    compute: Compute
    ghost: Ghost
