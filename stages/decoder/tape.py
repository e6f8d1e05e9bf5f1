"""The tape: the residual stream at every block boundary, `[boundary, window, token, channel]`, for all calibration windows.

Boundary l is the input of block l; the last boundary is the stream before the final norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from pipeline.artifacts import ArtifactError, producer
from pipeline.tensors import TensorFile, check_finite


def boundary_name(boundary: int) -> str:
    """Name of one boundary's tensor [window, token, channel] in tape.safetensors."""
    return f"boundary.{boundary:04d}"


class Tape:
    """tape.safetensors, read window by window."""

    def __init__(self, path: Path):
        """Raises ArtifactError naming the file if it is no tape."""
        self._file = TensorFile(path)
        self.boundaries = len(self._file.specs)
        shapes = set(self._file.specs.values())
        if self.boundaries < 2 or boundary_name(0) not in self._file or len(shapes) != 1 or len(next(iter(shapes))) != 3:
            raise ArtifactError(f"{path}: not a tape; {producer(path)}")
        self.windows, self.length, self.width = next(iter(shapes))

    def read(self, boundary: int, start: int, stop: int) -> Tensor:
        """Windows `start:stop` at `boundary`: [window, token, channel]. Raises ArtifactError on NaN or infinity."""
        return check_finite(
            self._file.rows(boundary_name(boundary), start, stop), f"{self._file.path}: boundary {boundary}, windows {start}-{stop - 1}"
        )

    def batches(self, batch_tokens: int, first: int = 0, last: int | None = None) -> Iterator[tuple[int, int]]:
        """Ranges of the windows `first:last` that hold at most `batch_tokens` tokens each (but at least one window)."""
        end = self.windows if last is None else last
        step = max(1, batch_tokens // self.length)
        for start in range(first, end, step):
            yield start, min(start + step, end)
