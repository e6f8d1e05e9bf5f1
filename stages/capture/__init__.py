"""capture: records the tape, the residual stream at every block boundary for every calibration window."""

from __future__ import annotations

from pydantic import BaseModel

from stages.decoder.compute import Compute


class Params(BaseModel):
    """Sections of params.yaml this stage reads."""

    compute: Compute
