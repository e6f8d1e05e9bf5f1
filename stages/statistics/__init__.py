"""statistics: what each block and each linear sees: percentiles of absolute activation, norms, outliers."""

from __future__ import annotations

from pydantic import BaseModel, Field, field_validator

from pipeline.params import Section
from stages.decoder.compute import Compute


class Statistics(Section):
    """What is measured."""

    percentiles: list[float] = Field(default=[50.0, 90.0, 99.0, 99.9], min_length=1)
    outlier: float = Field(default=5.0, gt=1.0)  # |x| above this many mean |x| counts as an outlier

    @field_validator("percentiles")
    @classmethod
    def _in_order(cls, value: list[float]) -> list[float]:
        if not all(0 < one <= 100 for one in value) or sorted(set(value)) != value:
            raise ValueError("percentiles should rise, each above 0 and at most 100")
        return value


class Params(BaseModel):
    """Sections of params.yaml this stage reads."""

    compute: Compute
    statistics: Statistics
