"""removal: chooses the blocks that go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from pipeline.params import Section


class Removal(Section):
    """Which blocks, and by what criterion."""

    READ_WHEN: ClassVar = {"blocks": ("method", ("list",))}

    method: Literal[
        "none", "list", "random", "streamline", "shortgpt", "replacement", "interchange", "deletion", "iterative", "recoverable"
    ] = "streamline"
    count: int = Field(default=3, ge=1)
    blocks: list[int] = []  # method list: indices of the dense model, from 0; negative ones count from the end
    protect: list[int] = [0, -1]  # blocks a criterion never removes
    spacing: int = Field(default=0, ge=0)  # block by block criteria: chosen blocks are more than this apart; 0: anywhere
    credit: Literal["min", "left"] = "min"  # a pair's score goes to both blocks (the least one counts), or to the first alone
    axis: Literal["token", "channel"] = "token"  # streamline, shortgpt: cosine of a token's channels, or of a channel's tokens
    seed: int = Field(default=0, ge=0)  # random

    @model_validator(mode="after")
    def _list_has_blocks(self) -> Removal:
        if self.method == "list" and not self.blocks:
            raise ValueError("method 'list' needs blocks to be set, e.g. [12, 13]")
        return self


class Params(BaseModel):
    """Sections of params.yaml this stage reads."""

    removal: Removal


def check_with_others(sections: Mapping[str, Any]) -> None:
    """Refuse a criterion whose scores no other stage is asked to measure, and a count that a model to be trained cannot give."""
    wanted, search = sections["removal"], sections["search"]
    if sections["model"].source == "scratch" and wanted.method not in ("none", "list"):
        blocks = sections["training"].blocks
        left = blocks - len({block % blocks for block in wanted.protect})
        if wanted.count > left:
            raise ValueError(
                f"removal.count = {wanted.count}: of training.blocks = {blocks} can {left} go "
                f"(removal.protect = {wanted.protect})"
            )
    asks = f"removal.method = {wanted.method!r} with removal.count = {wanted.count} needs"
    if wanted.method in ("replacement", "interchange", "deletion") and not sections["redundancy"].swaps:
        raise ValueError(f"removal.method = {wanted.method!r} needs redundancy.swaps: true")
    if wanted.method == "iterative" and search.steps < wanted.count:
        raise ValueError(f"{asks} search.steps of {wanted.count} or more (it is {search.steps})")
    if wanted.method == "recoverable" and wanted.count not in search.windows:
        raise ValueError(f"{asks} {wanted.count} in search.windows (it is {search.windows})")
