"""redundancy: how alike the stream is before and after blocks, and what deleting, replacing and interchanging blocks does."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from pipeline.params import Section
from stages.decoder.compute import Compute


class Redundancy(Section):
    """Which pairs of blocks are swapped, on which prompts, and how the result is read."""

    swaps: bool = True  # run the model with blocks deleted, replaced and interchanged; false: compare streams alone
    gap: int = Field(default=1, ge=1)  # pairs (i, j) with j - i up to this
    prompts: int = Field(default=8, ge=1)  # calibration windows, from the first on
    length: int = Field(default=32, ge=1)  # tokens of each
    positions: Literal["all", "last"] = "all"  # whose next-token distributions are compared
    memory: int = Field(default=1_000_000_000, ge=1)  # bytes for the streams of all variants; prompts are taken in chunks
    resamples: int = Field(default=1000, ge=100, le=1_000_000)  # bootstrap over prompts
    confidence: float = Field(default=0.95, gt=0, lt=1)
    seed: int = Field(default=0, ge=0)
    tied: float = Field(default=0.1, gt=0)  # median replacement below this, nats: regime tied
    divergent: float = Field(default=0.5, gt=0)  # else median of interchange / replacement below this: divergent
    sink_threshold: float = Field(default=10.0, gt=1)  # a sink token's norm, in medians of its window's


class Params(BaseModel):
    """Sections of params.yaml this stage reads."""

    compute: Compute
    redundancy: Redundancy
