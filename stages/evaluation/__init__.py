"""evaluation: perplexity of one variant of the model, with its uncertainty and its size."""

from __future__ import annotations

from pydantic import BaseModel, Field

from pipeline.params import Section
from stages.decoder.compute import Compute


class Evaluation(Section):
    """How the perplexity's interval is made."""

    resamples: int = Field(default=1000, ge=100, le=1_000_000)
    confidence: float = Field(default=0.95, gt=0, lt=1)
    seed: int = Field(default=0, ge=0)


class Params(BaseModel):
    """Sections of params.yaml this stage reads."""

    compute: Compute
    evaluation: Evaluation
