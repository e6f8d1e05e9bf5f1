"""removal: chooses the blocks that go."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, model_validator

from pipeline.params import Section


class Removal(Section):
    """Which blocks, and by what criterion."""

    method: Literal["none", "list", "streamline", "shortgpt"] = "streamline"
    count: int = Field(default=3, ge=1)
    blocks: list[int] = []  # method list: indices of the dense model, from 0; negative ones count from the end
    protect: list[int] = [0, -1]  # blocks a criterion never removes

    @model_validator(mode="after")
    def _list_has_blocks(self) -> Removal:
        if self.method == "list" and not self.blocks:
            raise ValueError("method 'list' needs blocks to be set, e.g. [12, 13]")
        return self


class Params(BaseModel):
    """Sections of params.yaml this stage reads."""

    removal: Removal
