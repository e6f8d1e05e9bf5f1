"""The compressed model as far as it is fitted: kept blocks with their masks, operators where blocks are gone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor, nn

from pipeline.errors import PalimpsestError
from pipeline.tensors import TensorFile
from stages.decoder.masks import apply_masks, kept_name, mask_name, weight_name
from stages.decoder.matrices import Matrix, prunable_matrices
from stages.decoder.operators import Operator, fold_into
from stages.decoder.skeleton import Decoder
from stages.decoder.stream import Stream, advance, finite_or_stop, read_batches
from stages.decoder.tape import Tape
from stages.ghost.rows import Read, Rows, is_added, mlp_rows, stream_rows


class Student:
    """Where the fits read their inputs: the dense tape, or one after the other the stream of the masked and repaired model.

    Used as a context, since that stream lies in a scratch file. Runs have to be asked for in the order of the model.
    """

    def __init__(
        self, decoder: Decoder, tape: Tape, ids: Tensor, masks: TensorFile | None, batch_tokens: int, sequential: bool = False
    ):
        """
        Args:
            decoder: the dense model.
            tape: its stream on the calibration windows.
            ids: their token ids [window, token].
            masks: those of the student; None for dense weights.
            batch_tokens: tokens in memory at a time.
            sequential: read the student's stream.
        """
        self.decoder, self.tape, self.ids, self.masks, self.batch_tokens = decoder, tape, ids, masks, batch_tokens
        self.sequential = sequential
        self._stream: Stream | None = None
        self._at = 0  # boundary of the stream
        self._stack = ExitStack()

    def __enter__(self) -> Student:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def begin(self, first: int, folder: Path) -> None:
        """Open the student's stream at the last boundary up to `first` at which it is still the dense one.

        The scratch file lies in `folder`. Nothing is done where the fits read the tape.
        """
        if not self.sequential:
            return
        shape = (self.tape.windows, self.tape.length, self.tape.width)
        self._stream = self._stack.enter_context(Stream(folder, shape, self.decoder.dtype))
        self._at = first if self.masks is None else first_masked(self.masks, self.decoder, first)
        for start, stop in self.tape.batches(self.batch_tokens):
            self._stream.write(start, self.tape.read(self._at, start, stop))

    def rows(self, start: int, stop: int) -> Rows:
        """Rows for the run [start, stop): the stream before it, and the step from there to the dense stream behind it."""
        return stream_rows(self._reader(start), self.tape, stop, self.batch_tokens, self.decoder.device)

    @contextmanager
    def mlp_rows(self, start: int, stop: int) -> Iterator[tuple[Rows, str]]:
        """Rows for a fold: what the last matrix before the gap adds to the stream. Also yields that matrix's name.

        Raises PalimpsestError if no matrix of the block before the gap puts its output into the stream as it is.
        """
        block, read = start - 1, self._reader(start - 1)
        with masked_block(self.decoder, block, self.masks):
            matrix = last_added(self.decoder, block, read(0, 1).to(self.decoder.device, self.decoder.dtype))
            yield mlp_rows(self.decoder, block, matrix, read, self.tape, stop, self.batch_tokens), matrix.name

    def repair(self, start: int, stop: int, operator: Operator) -> None:
        """Push the student's stream over the gap [start, stop)."""
        if self._stream is None:
            return
        if operator.fold is not None:
            with masked_block(self.decoder, start - 1, self.masks) as block:
                fold_block(block, operator)
                advance(self.decoder, start - 1, self._stream, self.batch_tokens)
        else:
            repair(self._stream, operator, self.ids, self.batch_tokens, self.decoder.device)
        self._at = stop

    def _reader(self, boundary: int) -> Read:
        if self._stream is None:
            return partial(self.tape.read, boundary)
        while self._at < boundary:
            with masked_block(self.decoder, self._at, self.masks):
                advance(self.decoder, self._at, self._stream, self.batch_tokens)
            self._at += 1
        return self._stream.read


@contextmanager
def masked_block(decoder: Decoder, index: int, masks: TensorFile | None) -> Iterator[nn.Module]:
    """Block `index` with its weights, masked ones zero."""
    with decoder.block(index) as block:
        if masks is not None:
            apply_masks(block, masks, index)
        yield block


def last_added(decoder: Decoder, block: int, hidden: Tensor) -> Matrix:
    """The last matrix of the loaded block whose output is added to the stream as it is, tried on `hidden`.

    Raises PalimpsestError if there is none: experts, or a norm behind the matrix.
    """
    for matrix in reversed(prunable_matrices(decoder.blocks[block])):
        if is_added(decoder, block, matrix, hidden):
            return matrix
    raise PalimpsestError(
        f"ghost.method: replaceme has nothing to fold into: no matrix of block {block} ({type(decoder.blocks[block]).__name__}) "
        "adds its output to the stream as it is (experts, or a norm behind it); use ghost or ghost_lowrank"
    )


def fold_block(block: nn.Module, operator: Operator) -> None:
    """Change the matrix of a loaded block that a folded operator goes into."""
    (matrix,) = [one for one in prunable_matrices(block) if one.name == operator.into]
    bias = getattr(block.get_submodule(matrix.module), "bias", None)
    fold_into(matrix.view(block), None if bias is None else bias.data, operator)


def repair(stream: Stream, operator: Operator, ids: Int[Tensor, "window token"], batch_tokens: int, device: str) -> None:
    """Push the whole stream through an operator."""
    operator = operator.to(torch.float32, device)
    for start, stop, hidden in read_batches(stream, batch_tokens, device):
        out = operator.apply(hidden.float(), ids[start:stop]).to(hidden.dtype)
        finite_or_stop(out, "operator", start)
        stream.write(start, out)


def operators_at(operators: Mapping[tuple[int, int], Operator], block: int) -> list[Operator]:
    """The operators, not folded, that act in place of removed block `block`."""
    return [one for (start, _), one in operators.items() if start == block and one.fold is None]


def first_masked(masks: TensorFile, decoder: Decoder, last: int) -> int:
    """The first block below `last` whose weights the masks change; `last` if there is none."""
    for index in range(last):
        for matrix in prunable_matrices(decoder.blocks[index]):
            name = mask_name(index, matrix.name)
            whole = int(masks.read(kept_name(name))) == matrix.view(decoder.blocks[index]).numel()
            if not whole or weight_name(name) in masks:
                return index
    return last
