"""The section `compute`: how stages run the model. Shared by every stage that runs blocks or reads the tape."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from pipeline.errors import PalimpsestError
from pipeline.params import Section

if TYPE_CHECKING:
    import torch


class Compute(Section):
    """Precision and place of forward passes."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = Field(default="auto", pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")
    batch_tokens: int = Field(default=4096, ge=1)

    def resolve_device(self) -> str:
        """The device's name. Raises PalimpsestError if the one asked for is not there."""
        import torch

        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        there = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}.get(self.device.split(":")[0])
        if there is not None and not there():
            raise PalimpsestError(
                f"params.yaml: compute.device = {self.device!r}: this machine has none; allowed here: auto, cpu"
            )
        return self.device

    def resolve_dtype(self) -> torch.dtype:
        """The dtype of forward passes; `auto` is bfloat16 where the processor multiplies it in hardware."""
        import torch

        if self.dtype != "auto":
            return getattr(torch, self.dtype)
        device = self.resolve_device()
        fast = torch.cuda.is_bf16_supported(including_emulation=False) if device.startswith("cuda") else _cpu_has_bfloat16()
        return torch.bfloat16 if fast else torch.float32


def _cpu_has_bfloat16() -> bool:
    """Whether the processor has units that multiply bfloat16; emulating it is hundreds of times slower than float32."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    line = next((line for line in text.splitlines() if line.lower().startswith(("flags", "features"))), "")
    return bool({"amx_bf16", "avx512_bf16", "bf16"} & set(line.split()))
