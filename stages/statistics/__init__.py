"""statistics: what each block and each matrix sees and weighs: all that any allocation rule goes by, measured once."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, field_validator

from pipeline.params import Section
from stages.decoder.compute import Compute

Percentile = Annotated[float, Field(gt=0, le=100)]
Multiple = Annotated[float, Field(gt=1)]


class Statistics(Section):
    """What is measured."""

    percentiles: list[Percentile] = Field(default=[50.0, 90.0, 99.0, 99.9], min_length=1)
    per_sequence: bool = False  # also the mean over windows of each window's own percentiles
    outlier: float = Field(default=5.0, gt=1.0)  # |x| above this many mean |x| counts as an outlier
    score_outliers: list[Multiple] = [3.0, 5.0, 7.0, 10.0]  # the same for the scores |W|·||x||: OWL's M
    spectra: bool = True  # tail exponents of each matrix's spectrum, for AlphaPruning
    gradient_windows: int = Field(default=4, ge=0)  # the first so many windows; 0: no gradients

    @field_validator("percentiles", "score_outliers")
    @classmethod
    def _in_order(cls, value: list[float]) -> list[float]:
        if sorted(set(value)) != value:
            raise ValueError("should rise")
        return value


class Params(BaseModel):
    """Sections of params.yaml this stage reads."""

    compute: Compute
    statistics: Statistics
