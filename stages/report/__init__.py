"""report: one self-contained page of what was done, gained and lost, and what `dvc metrics` and `dvc plots` show."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from pipeline.params import Section


class Report(Section):
    """How the page is titled."""

    title: str = "Palimpsest"


class Params(BaseModel):
    """Sections of params.yaml this stage reads: its own, and all others as plain values, to print them."""

    report: Report
    training: dict[str, Any]
    compute: dict[str, Any]
    model: dict[str, Any]
    tokens: dict[str, Any]
    statistics: dict[str, Any]
    redundancy: dict[str, Any]
    sensitivity: dict[str, Any]
    allocation: dict[str, Any]
    masking: dict[str, Any]
    search: dict[str, Any]
    removal: dict[str, Any]
    ghost: dict[str, Any]
    peeling: dict[str, Any]
    yes: dict[str, Any]
    evaluation: dict[str, Any]
    zeroshot: dict[str, Any]
