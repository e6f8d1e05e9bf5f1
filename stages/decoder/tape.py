"""The tape: the residual stream at every block boundary, `[boundary, window, token, channel]`, for all calibration windows.

Boundary l is the input of block l; the last boundary is the stream before the final norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from pipeline.artifacts import ArtifactError, producer
from pipeline.errors import PalimpsestError
from pipeline.tensors import TensorFile, check_finite
from stages.decoder.gram import Grams, add_tokens, empty_grams


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
            self._file.rows(boundary_name(boundary), start, stop),
            f"{self._file.path}: boundary {boundary}, windows {start}-{stop - 1}",
        )

    def check_model(self, blocks: int, width: int) -> None:
        """Raise ArtifactError naming the file if it is the tape of a model with other blocks or another width."""
        if (self.boundaries - 1, self.width) != (blocks, width):
            raise ArtifactError(
                f"{self._file.path}: the tape of {self.boundaries - 1} blocks of width {self.width}, but the model has {blocks} "
                f"of width {width}; {producer(self._file.path)}"
            )

    def check_windows(self, windows: int, length: int) -> None:
        """Raise ArtifactError naming the file if it is not of that many windows and tokens in each."""
        if (self.windows, self.length) != (windows, length):
            raise ArtifactError(
                f"{self._file.path}: {self.windows} windows of {self.length} tokens, but there are {windows} calibration windows "
                f"of {length}; {producer(self._file.path)}"
            )

    def batches(self, batch_tokens: int, first: int = 0, last: int | None = None) -> Iterator[tuple[int, int]]:
        """Ranges of the windows `first:last` that hold at most `batch_tokens` tokens each (but at least one window)."""
        end = self.windows if last is None else last
        step = max(1, batch_tokens // self.length)
        for start in range(first, end, step):
            yield start, min(start + step, end)


def split_held_out(windows: int, share: float, key: str) -> int:
    """How many of the windows are for fitting; the rest, the last ones, are held out. At least one window each.

    Raises PalimpsestError naming `key` if there is only one window.
    """
    if windows < 2:
        raise PalimpsestError(f"params.yaml: {key} needs at least two windows; raise tokens.calibration_windows above {windows}")
    return windows - min(max(1, round(windows * share)), windows - 1)


def tape_grams(
    tape: Tape, source: int, targets: list[int], held_out: float, batch_tokens: int, device: str, dtype: torch.dtype, key: str
) -> tuple[Grams, Grams]:
    """Grams of the fits from boundary `source` to each of `targets`, over the fitting windows and over the held-out ones."""
    split = split_held_out(tape.windows, held_out, key)
    parts = empty_grams(tape.width, len(targets), device), empty_grams(tape.width, len(targets), device)
    for grams, first, last in zip(parts, (0, split), (split, tape.windows), strict=True):
        for start, stop in tape.batches(batch_tokens, first, last):
            x, *ys = [tape.read(one, start, stop).flatten(0, 1).to(device) for one in (source, *targets)]
            add_tokens(grams, x, ys, dtype)
    return parts
