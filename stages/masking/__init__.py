"""masking: decides which weights of each prunable matrix stay."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from pipeline.params import Section
from stages.decoder.compute import Compute

# What may be compared with what; the first is what the method's published code does.
COMPARISONS = {
    "magnitude": ("layer", "row"),
    "wanda": ("row", "layer"),
    "wanda_variant": ("mass",),
    "sparsegpt": ("columns",),
}


class SparseGpt(Section):
    """SparseGPT (arXiv 2301.00774)."""

    damping: float = Field(default=0.01, gt=0, le=1)
    block: int = Field(default=128, ge=1)


class Masking(Section):
    """How weights are scored, compared and counted."""

    READ_WHEN: ClassVar = {
        "activations": ("method", ("wanda", "wanda_variant", "sparsegpt")),
        "expert_tokens": ("method", ("wanda", "wanda_variant", "sparsegpt")),
        "rounding": ("pattern", ("unstructured",)),
    }

    method: Literal["magnitude", "wanda", "wanda_variant", "sparsegpt"] = "wanda"
    pattern: str = Field(default="unstructured", pattern=r"^(unstructured|[1-9]\d*:[1-9]\d*)$")
    comparison: Literal["published", "row", "layer"] = "published"
    rounding: Literal["exact", "published"] = "exact"
    activations: Literal["pruned", "tape"] = "pruned"  # inputs seen behind the pruned blocks, or in the dense model
    expert_tokens: int = Field(default=1, ge=1)
    sparsegpt: SparseGpt = SparseGpt()
    head: float = Field(default=0.0, ge=0, lt=1)  # share of the output head's weights; the allocation is of the blocks alone

    @property
    def group(self) -> tuple[int, int] | None:
        """(n, m) where n of every m consecutive inputs are removed; None if unstructured."""
        if self.pattern == "unstructured":
            return None
        n, m = self.pattern.split(":")
        return int(n), int(m)

    @property
    def compared(self) -> str:
        """`row`, `layer`, or what the method alone does."""
        return COMPARISONS[self.method][0] if self.comparison == "published" else self.comparison

    @model_validator(mode="after")
    def _fits(self) -> Masking:
        allowed = COMPARISONS[self.method]
        if self.comparison not in ("published", *allowed):
            raise ValueError(
                f"comparison: {self.method} has no comparison by {self.comparison}; "
                f"allowed: {', '.join(('published', *(one for one in allowed if one in ('row', 'layer'))))}"
            )
        if self.group is None:
            return self
        n, m = self.group
        if n >= m:
            raise ValueError(f"pattern = '{self.pattern}' removes {n} of every {m} inputs; allowed: n:m with n below m")
        if self.head and abs(self.head - n / m) > 1e-6:
            raise ValueError(f"head = {self.head:g}: pattern '{self.pattern}' removes {n / m:g}; allowed: 0 or {n / m:g}")
        if self.comparison != "published":
            raise ValueError(f"comparison: pattern '{self.pattern}' compares within {m} inputs of a row; allowed: published")
        if self.method == "wanda_variant":
            raise ValueError(f"pattern: wanda_variant is unstructured, not '{self.pattern}'; allowed: unstructured")
        if self.method == "sparsegpt" and self.sparsegpt.block % m:
            raise ValueError(
                f"sparsegpt.block = {self.sparsegpt.block}: should be a multiple of {m} for pattern '{self.pattern}'"
            )
        return self


class Params(BaseModel):
    """Sections of params.yaml this stage reads."""

    compute: Compute
    masking: Masking
