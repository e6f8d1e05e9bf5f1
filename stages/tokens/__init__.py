"""tokens: packs documents into fixed windows; every later stage reads the same windows."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, model_validator

from pipeline.params import Section


class Tokens(Section):
    """Which text, and how it becomes windows."""

    source: Literal["demo", "files", "hub"] = "demo"
    calibration_files: list[str] = []  # files: .txt, .jsonl or .parquet; put them in data/corpus/
    evaluation_files: list[str] = []
    field: str = "text"  # jsonl, parquet and hub: the column that holds the text
    dataset: str | None = None  # hub: owner/name
    subset: str | None = None
    revision: str = "main"
    calibration_split: str = "train"
    evaluation_split: str = "test"  # the demo has train, valid and test
    pool: int = Field(default=2_000_000, ge=2)  # tokens read of each split at most
    length: int = Field(default=512, ge=2)
    calibration_windows: int = Field(default=16, ge=2)  # one at least is held out of each fit
    evaluation_windows: int = Field(default=16, ge=1)
    sampling: Literal["random", "first"] = "random"
    seed: int = Field(default=0, ge=0)
    special_tokens: Literal["none", "window", "document"] = "none"  # where the tokenizer's BOS goes
    separator: str = "\n\n"  # joins documents

    @model_validator(mode="after")
    def _source_has_its_keys(self) -> Tokens:
        if self.source == "hub" and not self.dataset:
            raise ValueError("source 'hub' needs dataset to be set")
        if self.source == "files" and not (self.calibration_files and self.evaluation_files):
            raise ValueError("source 'files' needs calibration_files and evaluation_files to be set")
        if self.source != "files" and self.calibration_split == self.evaluation_split:
            raise ValueError(
                f"calibration_split and evaluation_split are both '{self.evaluation_split}': they must not share text"
            )
        for name in ("calibration_windows", "evaluation_windows"):
            if getattr(self, name) * self.length > self.pool:
                raise ValueError(f"{name} x length = {getattr(self, name) * self.length} tokens are more than pool = {self.pool}")
        return self


class Params(BaseModel):
    """Sections of params.yaml this stage reads."""

    tokens: Tokens
