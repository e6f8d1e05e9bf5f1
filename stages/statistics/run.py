"""Measure what every block and every prunable matrix sees, from the tape, one block at a time.

Block inputs and outputs stand on the tape; the inputs of the matrices come from running that one block again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from pipeline.artifacts import write_table
from pipeline.console import plan, progress, say
from pipeline.files import Files
from pipeline.tensors import write_tensors
from stages.decoder.matrices import Matrix, prunable_matrices, watch
from stages.decoder.skeleton import Decoder
from stages.decoder.tape import Tape
from stages.statistics import Params
from stages.statistics.place import Place

KEEP_BYTES = 1 << 29  # a block's matrix inputs are kept for the second look if they fit in half a gigabyte


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write `statistics.csv` (a row per block and place) and `statistics.safetensors` (squared norms per channel).

    Tensors: `blocks.{block}.{place}.squares` float32 [channel], the sum over tokens of x²; `blocks.{block}.{place}.tokens`.
    """
    compute, wanted = params.compute, params.statistics
    decoder = Decoder(inputs["model"], compute.resolve_dtype(), compute.resolve_device())
    tape = Tape(inputs["tape.safetensors"])
    tape.check_model(len(decoder), decoder.width)
    batch_bytes = min(compute.batch_tokens, tape.windows * tape.length) * tape.width * 4
    plan(
        memory=decoder.block_bytes() + 16 * batch_bytes + min(KEEP_BYTES, 16 * tape.windows * tape.length * tape.width * 4),
        disk=0,
        folder=outputs["statistics.csv"].parent,
        memory_key="compute.batch_tokens",
        disk_key="",
    )
    rows: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for index in progress(range(len(decoder)), "block"):
        for matrix, name, place in measure_block(decoder, tape, index, compute.batch_tokens, wanted.percentiles, wanted.outlier):
            rows.append({"block": index, "place": name, **place.row(wanted.percentiles, matrix)})
            tensors[f"blocks.{index}.{name}.squares"] = place.squares.float().cpu()
            tensors[f"blocks.{index}.{name}.tokens"] = torch.tensor([place.tokens])
    write_table(outputs["statistics.csv"], pd.DataFrame(rows))
    write_tensors(outputs["statistics.safetensors"], tensors, {"squares": "sum over tokens of x², per channel"})
    say(f"{len(rows)} places in {len(decoder)} blocks, {tape.windows * tape.length} tokens each")


def measure_block(
    decoder: Decoder, tape: Tape, index: int, batch_tokens: int, percentiles: list[float], outlier: float
) -> list[tuple[int, str, Place]]:
    """(weights of the matrix or 0, name, measured place) for block input, block output and the input of every matrix."""
    ranges = list(tape.batches(batch_tokens))
    ends = {"input": Place(), "output": Place()}
    for offset, place in enumerate(ends.values()):
        for look in _looks(place, percentiles, outlier):
            for start, stop in ranges:
                look(tape.read(index + offset, start, stop).to(decoder.device))

    for start, stop in ranges:  # asked now, since asking runs block 0 on two tokens that must not be counted
        decoder.calls(stop - start, tape.length)
    matrices = prunable_matrices(decoder.blocks[index])
    seen = _MatrixInputs(index)
    with decoder.block(index) as block:
        sizes = {m.name: m.view(block).numel() for m in matrices}
        with watch(block, matrices, seen.first_look):
            for start, stop in ranges:
                decoder.call(index, tape.read(index, start, stop).to(decoder.device))
        for place in seen.places.values():
            place.aim(percentiles, outlier)
        if any(place.needs_second_look for place in seen.places.values()):
            if seen.kept is not None:
                for name, x in seen.kept:
                    seen.places[name].second_look(x)
            else:
                with watch(block, matrices, seen.second_look):
                    for start, stop in ranges:
                        decoder.call(index, tape.read(index, start, stop).to(decoder.device))
    result = [(0, "input", ends["input"]), (0, "output", ends["output"])]
    return result + [(sizes[m.name], m.name, seen.place_of(m)) for m in matrices]


def _looks(place: Place, percentiles: list[float], outlier: float) -> Iterable[Callable[[Tensor], None]]:
    yield place.first_look
    place.aim(percentiles, outlier)
    if place.needs_second_look:
        yield place.second_look


class _MatrixInputs:
    """The places of one block's matrices. Matrices that are fed the same tensor share one place."""

    def __init__(self, block: int):
        self.block = block
        self.places: dict[str, Place] = {}
        self.owner: dict[str, str] = {}  # matrix -> the first matrix that is fed the same tensor
        self.kept: list[tuple[str, Tensor]] | None = []
        self._bytes = 0
        self._last: tuple[str, Tensor] | None = None

    def place_of(self, matrix: Matrix) -> Place:
        """Empty for an expert that no token was routed to."""
        return self.places.get(self.owner.get(matrix.name, ""), Place())

    def first_look(self, name: str, x: Tensor) -> None:
        if self._last is not None and self._last[1] is x and self.owner.get(name) in (None, self._last[0]):
            self.owner[name] = self._last[0]
            return
        self._last = (name, x)  # held, so that no other tensor can take its place in memory
        self.owner.setdefault(name, name)
        self.places.setdefault(name, Place(f"block {self.block}, input of {name}")).first_look(x)
        if self.kept is not None:
            self._bytes += x.numel() * x.element_size()
            self.kept = [*self.kept, (name, x)] if self._bytes <= KEEP_BYTES else None

    def second_look(self, name: str, x: Tensor) -> None:
        if self.owner[name] == name:
            self.places[name].second_look(x)
