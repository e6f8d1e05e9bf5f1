"""Where the rows of a fit come from: the dense tape, the student's own stream, or the MLP output before the gap.

Rows are asked for by windows and come in batches: the first window, inputs x and the steps d that they have to make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stages.decoder.matrices import Matrix
from stages.decoder.skeleton import Decoder
from stages.decoder.tape import Tape

Batch = tuple[int, Tensor, Tensor]
Rows = Callable[[int, int], Iterator[Batch]]
Read = Callable[[int, int], Tensor]  # windows [first, last) of a stream


def stream_rows(read: Read, tape: Tape, stop: int, batch_tokens: int, device: str) -> Rows:
    """x is what `read` gives, and x + d the dense stream at boundary `stop`."""

    def rows(first: int, last: int) -> Iterator[Batch]:
        for start, end in tape.batches(batch_tokens, first, last):
            x, y = read(start, end).to(device).float(), tape.read(stop, start, end).to(device).float()
            yield start, x, y - x

    return rows


def mlp_rows(decoder: Decoder, block: int, matrix: Matrix, read: Read, tape: Tape, stop: int, batch_tokens: int) -> Rows:
    """x is what `matrix` adds to the stream in block `block` (loaded, and given what `read` gives), d what then is missing."""

    def rows(first: int, last: int) -> Iterator[Batch]:
        for start, end in tape.batches(batch_tokens, first, last):
            out, added = call_seeing(decoder, block, matrix, read(start, end).to(decoder.device, decoder.dtype))
            yield start, added.float(), tape.read(stop, start, end).to(decoder.device).float() - out.float()

    return rows


def call_seeing(decoder: Decoder, block: int, matrix: Matrix, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The block's output and what `matrix` put out on the way, both [window, token, channel]."""
    decoder.calls(*hidden.shape[:2])  # the first time it runs the block by itself, which is not to be seen
    seen: list[Tensor] = []
    handle = _module(decoder, block, matrix).register_forward_hook(lambda _, args, output: seen.append(output))
    try:
        out = decoder.call(block, hidden)
    finally:
        handle.remove()
    return out, seen[0].view(out.shape)


def is_added(decoder: Decoder, block: int, matrix: Matrix, hidden: Tensor) -> bool:
    """Whether the block's output is something else plus the output of `matrix`, tried by leaving that out.

    Norms behind the matrix (Gemma 2, OLMo 2) and matrices further inside fail.
    """
    if matrix.expert is not None or matrix.view(decoder.blocks[block]).shape[0] != decoder.width:
        return False
    out, added = call_seeing(decoder, block, matrix, hidden)
    handle = _module(decoder, block, matrix).register_forward_hook(lambda _, args, output: torch.zeros_like(output))
    try:
        without = decoder.call(block, hidden)
    finally:
        handle.remove()
    gap, out, added = (out.double() - without.double() - added.double()).norm(dim=-1), out.double(), added.double()
    share = 1 / added.norm(dim=-1).clamp(min=torch.finfo(torch.float64).tiny)
    rounding = 2 * torch.finfo(decoder.dtype).eps * float((out.norm(dim=-1) * share).median())
    return float((gap * share).median()) <= max(0.01, rounding)


def _module(decoder: Decoder, block: int, matrix: Matrix) -> Any:
    module: nn.Module = decoder.blocks[block].get_submodule(matrix.module)
    return module
