"""compress: writes what is left as an ordinary Hugging Face checkpoint."""

from __future__ import annotations

from pydantic import BaseModel


class Params(BaseModel):
    """Sections of params.yaml this stage reads: none, everything it needs stands in its inputs."""
