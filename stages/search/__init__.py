"""search: removals found by measuring them: block after block, or the window that a ghost restores best."""

from __future__ import annotations

from pydantic import BaseModel, Field, field_validator

from pipeline.params import Section
from stages.decoder.compute import Compute


class Search(Section):
    """What is measured. Nothing by default: the methods iterative and recoverable of `removal` read it."""

    steps: int = Field(default=0, ge=0)  # iterative: removals one after another, one sweep over the weights each
    windows: list[int] = []  # recoverable: lengths of windows
    protect: list[int] = [0, -1]  # blocks never tried
    spacing: int = Field(default=0, ge=0)  # iterative: blocks taken are more than this apart
    prompts: int = Field(default=4, ge=1)  # calibration windows, from the first on; ghosts are fitted on the others
    length: int = Field(default=64, ge=1)  # tokens of each
    memory: int = Field(default=1_000_000_000, ge=1)  # bytes for the streams of all variants
    ridge: float = Field(default=1e-4, ge=0)  # of the ghosts, relative to trace(X'X) / channels
    sink_threshold: float = Field(default=10.0, gt=1)  # a sink token's norm, in medians of its window's

    @field_validator("windows")
    @classmethod
    def _positive(cls, value: list[int]) -> list[int]:
        if any(one < 1 for one in value):
            raise ValueError("lengths of windows should be 1 or more")
        return sorted(set(value))


class Params(BaseModel):
    """Sections of params.yaml this stage reads."""

    compute: Compute
    search: Search
