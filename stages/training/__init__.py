"""training: a small decoder trained on the corpus, its checkpoints kept, for `model.source: scratch`."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from stages.corpus.section import Text
from stages.decoder.grids import LowBit

SMALLEST_VOCABULARY = 257  # every byte, and the end of text
MATRICES = {
    "llama": [
        *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")), *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    ],
    "gpt2": ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"],
}  # fmt: skip


class Training(Text, LowBit):
    """What is trained, on what, for how long; `grid` and `matrices` say which weights are of few bits."""

    KEY: ClassVar[str] = "training"
    OFF_WHEN: ClassVar = ("method", "none")

    method: Literal["none", "llama", "gpt2"] = "none"
    vocabulary: int = Field(default=2048, ge=SMALLEST_VOCABULARY)  # of a byte-level BPE trained on the training text
    tokens: int = Field(default=102_400, ge=2)  # the first so many of calibration_split, in windows
    test_tokens: int = Field(default=10_240, ge=2)  # of evaluation_split
    length: int = Field(default=128, ge=2)  # tokens per window, and the most the model will read
    blocks: int = Field(default=4, ge=1)
    width: int = Field(default=128, ge=1)
    heads: int = Field(default=4, ge=1)
    epochs: int = Field(default=8, ge=1)
    checkpoints: list[int] = Field(default=[1, 2, 4, 8], min_length=1)  # kept after so many epochs; 0 = before the first step
    batch_windows: int = Field(default=8, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    warmup: int = Field(default=100, ge=0)  # steps
    decay: Literal["cosine", "none"] = "cosine"  # of the learning rate, to zero at the end
    weight_decay: float = Field(default=0.0, ge=0)
    seed: int = Field(default=0, ge=0)
    device: str = Field(default="auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")

    @property
    def steps(self) -> int:
        """Optimiser steps of one epoch; the last batch may be smaller."""
        return -(-(self.tokens // self.length) // self.batch_windows)

    @model_validator(mode="after")
    def _fits(self) -> Training:
        if self.width % self.heads:
            raise ValueError(f"width = {self.width}: {self.heads} heads do not divide it")
        if self.method == "llama" and self.width // self.heads % 2:
            raise ValueError(f"width / heads = {self.width // self.heads}: rotary positions need an even width per head")
        strange = [one for one in self.checkpoints if not 0 <= one <= self.epochs]
        if strange or len(set(self.checkpoints)) < len(self.checkpoints):
            raise ValueError(f"checkpoints = {self.checkpoints}: should be different epochs from 0 to epochs = {self.epochs}")
        for name in ("tokens", "test_tokens"):
            if getattr(self, name) < self.length:
                raise ValueError(f"{name} = {getattr(self, name)}: not one window of length = {self.length}")
        if self.warmup >= self.epochs * self.steps:
            raise ValueError(f"warmup = {self.warmup} steps: the whole training has {self.epochs * self.steps}")
        return self


class Params(BaseModel):
    """Sections of params.yaml this stage reads."""

    training: Training


def check_with_others(sections: Mapping[str, Any]) -> None:
    """Refuse a name that fits no matrix of the model to be trained: here, since the stage finds it out after its tokenizer."""
    training = sections["training"]
    names = MATRICES.get(training.method, [])
    for pattern in training.matrices if names and training.grid != "none" else ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"training.matrices: '{pattern}' fits no matrix of a block; there are {', '.join(names)}")
