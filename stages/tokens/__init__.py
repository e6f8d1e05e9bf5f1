"""tokens: packs documents into fixed windows; every later stage reads the same windows."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from stages.corpus.section import Text
from stages.tokens.contract import READY, Contract, Name


class Tokens(Text):
    """Which text, and how it becomes windows."""

    KEY: ClassVar[str] = "tokens"

    READ_WHEN: ClassVar = {**Text.READ_WHEN, "custom": ("contract", ("custom",)), "seed": ("sampling", ("random",))}

    pool: int = Field(default=2_000_000, ge=2)  # tokens read of each split at most
    length: int = Field(default=512, ge=2)
    calibration_windows: int = Field(default=16, ge=2)  # one at least is held out of each fit
    evaluation_windows: int = Field(default=16, ge=1)
    sampling: Literal["random", "first"] = "random"
    seed: int = Field(default=0, ge=0)
    special_tokens: Literal["none", "window", "document"] = "none"  # where the tokenizer's BOS goes
    contract: Name = "ours"  # what is scored of the evaluation text; ours: as the keys above say, windows end to end
    custom: Contract = Contract()

    @model_validator(mode="after")
    def _pool_holds_the_windows(self) -> Tokens:
        for name in ("calibration_windows", "evaluation_windows"):
            if getattr(self, name) * self.length > self.pool:
                raise ValueError(f"{name} x length = {getattr(self, name) * self.length} tokens are more than pool = {self.pool}")
        return self

    def evaluation_contract(self) -> Contract:
        """The contract that `contract` names."""
        if self.contract == "custom":
            return self.custom
        if self.contract != "ours":
            return READY[self.contract]
        return Contract(
            window=self.length,
            stride=self.length - (self.special_tokens == "window"),
            special_tokens=self.special_tokens,
            separator=self.separator,
            windows=self.evaluation_windows,
        )


class Params(BaseModel):
    """Sections of params.yaml this stage reads."""

    tokens: Tokens
