"""The section `compute`: how stages run the model. Shared by every stage that runs blocks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.params import Section


class Compute(Section):
    """Precision and place of forward passes."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = Field(default="auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")
    batch_tokens: int = Field(default=4096, ge=1)
