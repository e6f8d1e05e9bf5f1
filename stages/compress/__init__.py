"""compress: writes what is left as an ordinary Hugging Face checkpoint."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class Params(BaseModel):
    """Sections of params.yaml this stage reads: for the model card alone, all else it needs stands in its inputs."""

    allocation: dict[str, Any]
    masking: dict[str, Any]
