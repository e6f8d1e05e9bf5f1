"""model: makes any source a local safetensors checkpoint, once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, model_validator

from stages.decoder.grids import LowBit


class Model(LowBit):
    """Where the model comes from, and which of its weights are quantised (`grid`, `matrices`)."""

    READ_WHEN: ClassVar = {
        "path": ("source", ("folder", "gguf")),
        "repository": ("source", ("hub",)),
        "revision": ("source", ("hub",)),
        "checkpoint": ("source", ("scratch",)),
        "dtype": ("source", ("demo", "gguf")),
    }

    source: Literal["demo", "folder", "gguf", "hub", "scratch"] = "demo"
    path: str | None = None  # folder: a checkpoint folder; gguf: a .gguf file
    repository: str | None = None  # hub: owner/name
    revision: str = "main"  # hub: branch, tag or commit; the commit it meant is recorded
    checkpoint: int | Literal["last"] = "last"  # scratch: one of training.checkpoints
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


def check_with_others(sections: Mapping[str, Any]) -> None:
    """Raise ValueError if a checkpoint is asked for that no training keeps, or is to be quantised a second time, or is to read
    windows longer than it can."""
    model, training = sections["model"], sections["training"]
    if model.source != "scratch":
        return
    if training.method == "none":
        raise ValueError("model.source = 'scratch': nothing is trained; set training.method")
    if model.checkpoint != "last" and model.checkpoint not in training.checkpoints:
        kept = ", ".join(map(str, sorted(training.checkpoints)))
        raise ValueError(f"model.checkpoint = {model.checkpoint}: not kept; training.checkpoints has {kept}")
    if model.grid != "none" and training.grid != "none":
        raise ValueError(f"model.grid = '{model.grid}': this model is trained with training.grid = '{training.grid}' already")
    tokens = sections["tokens"]
    for key, length in (("length", tokens.length), ("contract", tokens.evaluation_contract().window)):
        if length > training.length:
            of = "" if key == "length" else f": windows of {length} tokens"
            raise ValueError(
                f"tokens.{key} = {getattr(tokens, key)}{of}: the model that is trained reads training.length = {training.length} "
                "tokens at most"
            )
