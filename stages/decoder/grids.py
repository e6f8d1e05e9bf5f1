"""Which values weights of few bits may take, and which matrices of a block are meant: what params.yaml says of it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from pipeline.params import Section

Grid = Literal["none", "binary", "ternary", "2bit", "3bit", "4bit", "5bit", "6bit", "7bit", "8bit"]
GRIDS: tuple[Grid, ...] = ("binary", "ternary", "2bit", "3bit", "4bit", "5bit", "6bit", "7bit", "8bit")


class LowBit(Section):
    """Matrices of the decoder's blocks whose weights lie on a grid."""

    grid: Grid = "none"
    matrices: list[str] = Field(default=["*"], min_length=1)  # names as in masks.csv, with *, ? and [...]: "mlp.*", "*.o_proj"

    @field_validator("matrices")
    @classmethod
    def _said(cls, value: list[str]) -> list[str]:
        if not all(value):
            raise ValueError("an empty name fits no matrix; '*' is all of them")
        return value
