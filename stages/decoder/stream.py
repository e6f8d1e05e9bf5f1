"""The residual stream of all windows at one boundary, kept in a scratch file so that memory holds one batch."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from pipeline.artifacts import ArtifactError, producer
from pipeline.tensors import TensorFile, read_at, write_at
from stages.decoder.skeleton import Decoder


def read_windows(tokens: TensorFile, split: str, decoder: Decoder) -> Tensor:
    """Token ids [window, token] of split "calibration" or "evaluation".

    Raises ArtifactError naming the file if there are none, or if they are not of the decoder's vocabulary.
    """
    vocabulary = decoder.checkpoint.config.get_text_config().vocab_size
    shape = tokens.shape(split)
    ids = tokens.read(split) if len(shape) == 2 and 0 not in shape else torch.full((1, 1), -1)
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= vocabulary:
        what = f"token ids from {least} to {most}, the model has {vocabulary}" if ids.numel() > 1 else f"shape {shape}"
        raise ArtifactError(f"{tokens.path}: '{split}' is no table of windows for this model ({what}); {producer(tokens.path)}")
    return ids


def batches(windows: int, length: int, batch_tokens: int) -> list[tuple[int, int]]:
    """Ranges of windows that hold at most `batch_tokens` tokens each (but at least one window)."""
    step = max(1, batch_tokens // length)
    return [(start, min(start + step, windows)) for start in range(0, windows, step)]


class Stream:
    """Hidden states [window, token, channel], read and overwritten batch by batch. Gone when the context ends."""

    def __init__(self, folder: Path, shape: Sequence[int], dtype: torch.dtype):
        """
        Args:
            folder: where the scratch file lies, without a name.
            shape: windows, tokens, channels.
            dtype: of the hidden states.
        """
        self.windows, self.length, width = shape
        self.dtype = dtype
        self._shape = (self.length, width)
        self._row = math.prod(self._shape) * dtype.itemsize
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder, prefix=".stream-", buffering=0)  # noqa: SIM115 (closed by __exit__)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def read(self, start: int, stop: int) -> Tensor:
        """Windows `start:stop`, on the CPU."""
        return read_at(self._file.fileno(), start * self._row, (stop - start, *self._shape), self.dtype)

    def write(self, start: int, hidden: Tensor) -> None:
        """Overwrite the windows from `start` on."""
        write_at(self._file.fileno(), start * self._row, hidden.detach().to(device="cpu", dtype=self.dtype).contiguous())


def embed(decoder: Decoder, ids: Tensor, stream: Stream, batch_tokens: int) -> None:
    """Fill `stream` with the embedding of the token ids [window, token]."""
    with decoder.trunk():
        for start, stop in batches(len(ids), ids.shape[1], batch_tokens):
            hidden = decoder.embed(ids[start:stop].long())
            finite_or_stop(hidden, "embedding", start)
            stream.write(start, hidden)


def advance(decoder: Decoder, index: int, stream: Stream, batch_tokens: int, ids: Tensor | None = None) -> None:
    """Push the whole stream through block `index`, which must be loaded; `ids` are its token ids, which an export may want."""
    for start, stop, hidden in read_batches(stream, batch_tokens, decoder.device):
        out = decoder.call(index, hidden, None if ids is None else ids[start:stop].long())
        finite_or_stop(out, f"block {index}", start)
        stream.write(start, out)


def read_batches(stream: Stream, batch_tokens: int, device: str) -> Iterator[tuple[int, int, Tensor]]:
    """(start, stop, hidden on `device`) for each batch of the stream."""
    for start, stop in batches(stream.windows, stream.length, batch_tokens):
        yield start, stop, stream.read(start, stop).to(device)


def finite_or_stop(hidden: Tensor, what: str, first_window: int) -> None:
    """Raise ArtifactError naming `what`, window and channel if `hidden` [window, token, channel] is not finite."""
    bad = ~torch.isfinite(hidden)
    if bad.any():
        window, token, channel = bad.nonzero()[0].tolist()
        raise ArtifactError(
            f"{what}: NaN or infinite activation in window {first_window + window}, token {token}, channel {channel}; "
            "try compute.dtype: float32 in params.yaml, or check the checkpoint"
        )
