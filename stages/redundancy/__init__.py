"""redundancy: how alike the residual stream is before and after blocks."""

from __future__ import annotations

from pydantic import BaseModel

from stages.decoder.compute import Compute


class Params(BaseModel):
    """Sections of params.yaml this stage reads."""

    compute: Compute
