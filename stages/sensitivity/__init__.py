"""sensitivity: how much worse the model gets when one block alone is pruned, for every block."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, Field

from pipeline.params import Section
from stages.decoder.compute import Compute


class Sensitivity(Section):
    """What is measured of each block pruned alone, and on what."""

    OFF_WHEN: ClassVar = ("method", "none")

    method: Literal["none", "loss", "kl"] = "kl"  # on few tokens the divergence is many times less noisy than the loss
    sparsity: float = Field(default=0.5, gt=0, lt=1)
    scores: Literal["magnitude", "wanda"] = "wanda"
    windows: int = Field(default=4, ge=1)  # the first so many calibration windows, or all there are
    length: int = Field(default=128, ge=2)  # of each the first so many tokens, or all there are


class Params(BaseModel):
    """Sections of params.yaml this stage reads."""

    compute: Compute
    sensitivity: Sensitivity
