"""yes: concrete layer-wise solutions beside the model, each fitted to the model's own streams; how good could each layer be?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from pipeline.errors import PalimpsestError
from stages.decoder.compute import Compute
from stages.decoder.grids import LowBit
from stages.yes.maps import chosen_maps

NAMES = re.compile(r"direct|all_last|first_last|(prefix|stages|skip)_[1-9]\d*|without_\d+|[1-9]\d*(-[1-9]\d*)*")
WORDS = ("none", "staircases", "families")
FORMS = "direct, all_last, first_last, prefix_M, stages_G, skip_K, without_B (a block), or target boundaries as in 1-4-4-4"


class Yes(LowBit):
    """Which references are fitted, on what, how, and what stands beside them; on the grid that the model's weights lie on."""

    OFF_WHEN: ClassVar = ("maps", "none")
    READ_WHEN: ClassVar = {"pretrained": ("initial", ("pretrained",))}

    maps: Literal["none", "staircases", "families"] | list[str] = "none"
    initial: Literal["fresh", "checkpoint", "pretrained"] = "fresh"  # where a block's fit starts
    pretrained: str | None = None  # pretrained: a checkpoint folder with as many blocks
    windows: int | None = Field(default=None, ge=2)  # calibration windows used, the first ones; None: all
    held_out: float = Field(default=0.125, gt=0, lt=1)  # share of them that fits stop by
    scored: int | None = Field(default=None, ge=2)  # of the windows of the fit: those that losses are taken on; None: all
    test: Literal["evaluation", "held_out", "both"] = "evaluation"
    test_windows: int | None = Field(default=None, ge=2)  # evaluation windows used, the first ones; None: all
    error: Literal["token", "pooled"] = "token"
    optimiser: Literal["adamw", "sgd"] = "adamw"
    steps: int = Field(default=150, ge=1)  # per block
    learning_rate: float = Field(default=1e-3, gt=0)
    batch_tokens: int = Field(default=2048, ge=1)  # per step; unlike compute.batch_tokens it decides results
    check: int = Field(default=25, ge=1)  # steps between looks at the held-out windows
    patience: int = Field(default=3, ge=0)  # looks without a gain before a fit stops; 0: never
    head: Literal["full", "norm"] = "full"  # norm: the final norm alone, which leaves tied embeddings tied
    head_steps: int = Field(default=100, ge=1)
    head_learning_rate: float = Field(default=3e-4, gt=0)
    head_positions: int = Field(default=256, ge=1)  # sampled per step
    shuffled: bool = False
    continued: bool = False
    continued_learning_rate: float | None = Field(default=None, gt=0)  # None: learning_rate
    tolerance: float = Field(default=3.0, ge=0)  # standard errors over windows
    keep: Literal["none", "best"] = "best"
    seed: int = Field(default=0, ge=0)

    @field_validator("maps", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        """A bare name of a map is a list of it."""
        if isinstance(value, str) and value not in WORDS:
            if not NAMES.fullmatch(value):
                raise ValueError(f"no map {value!r}; allowed: {', '.join(WORDS)}, {FORMS}")
            return [value]
        if not isinstance(value, str) and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
            raise ValueError(f"should be one of {', '.join(WORDS)}, or a list of names: {FORMS}")
        return value

    @field_validator("maps")
    @classmethod
    def _known(cls, value: str | list[str]) -> str | list[str]:
        strange = [name for name in value if not NAMES.fullmatch(name)] if isinstance(value, list) else []
        if strange or value == []:
            what = f"no map {strange[0]!r}" if strange else "an empty list (none: nothing is fitted)"
            raise ValueError(f"{what}; allowed: {FORMS}")
        return value

    @model_validator(mode="after")
    def _start_has_its_key(self) -> Yes:
        if self.initial == "pretrained" and not self.pretrained:
            raise ValueError("initial 'pretrained' needs pretrained to be set")
        if self.grid == "none" and self.matrices != ["*"]:
            raise ValueError(f"matrices = {self.matrices} needs grid to be set; with grid 'none' both are the model's")
        return self


class Params(BaseModel):
    """Sections of params.yaml this stage reads."""

    compute: Compute
    yes: Yes


def check_with_others(sections: Mapping[str, Any]) -> None:
    """Refuse windows that stage `tokens` will not make, maps that a model of this depth has not, and a folder not there."""
    wanted, tokens, model, training = (sections[name] for name in ("yes", "tokens", "model", "training"))
    if wanted.maps == "none":
        return
    used = wanted.windows or tokens.calibration_windows
    fit = used - min(max(1, round(used * wanted.held_out)), used - 1)  # as `split_held_out` has it
    limits = {
        "windows": (tokens.calibration_windows, "tokens.calibration_windows"),
        "scored": (fit, "those of the fit, yes.windows less yes.held_out"),
    }
    if wanted.test != "held_out" and tokens.contract == "ours":
        limits["test_windows"] = tokens.evaluation_windows, "tokens.evaluation_windows"
    for key, (most, what) in limits.items():
        if (getattr(wanted, key) or 0) > most:
            raise ValueError(f"yes.{key} = {getattr(wanted, key)}: there are {most} ({what})")
    path = Path(wanted.pretrained or "").expanduser()  # relative: from the project's root, where runs start
    made = path.parts[:1] == ("data",)  # by a stage that may not have run yet
    if wanted.initial == "pretrained" and not made and not path.is_dir():
        raise ValueError(f"yes.pretrained = '{wanted.pretrained}': no such folder")
    if model.source == "scratch":
        try:
            chosen_maps(wanted.maps, training.blocks)
        except PalimpsestError as error:
            raise ValueError(str(error).removeprefix("params.yaml: ")) from None
