"""masking: decides which weights of each prunable matrix stay."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from pipeline.params import Section
from stages.decoder.compute import Compute


class Masking(Section):
    """How weights are scored."""

    method: Literal["magnitude", "wanda"] = "wanda"
    activations: Literal["pruned", "tape"] = "pruned"  # wanda: inputs seen behind the pruned blocks, or in the dense model


class Params(BaseModel):
    """Sections of params.yaml this stage reads."""

    compute: Compute
    masking: Masking
