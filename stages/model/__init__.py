"""model: makes any source a local safetensors checkpoint, once."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, model_validator

from pipeline.params import Section


class Model(Section):
    """Where the model comes from."""

    source: Literal["demo", "folder", "gguf", "hub"] = "demo"
    path: str | None = None  # folder: a checkpoint folder; gguf: a .gguf file
    repository: str | None = None  # hub: owner/name
    revision: str = "main"  # hub: branch, tag or commit; the commit it meant is recorded
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"  # gguf and demo: what dequantised weights are saved as
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _source_has_its_key(self) -> Model:
        key = {"folder": "path", "gguf": "path", "hub": "repository"}.get(self.source)
        if key and not getattr(self, key):
            raise ValueError(f"source '{self.source}' needs {key} to be set")
        return self


class Params(BaseModel):
    """Sections of params.yaml this stage reads."""

    model: Model
