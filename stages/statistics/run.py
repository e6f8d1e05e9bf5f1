"""Measure what every block and every prunable matrix sees and weighs, from the tape, one block at a time.

Block inputs and outputs stand on the tape; the inputs of the matrices come from running that one block again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pandas as pd
import torch
from torch import Tensor

from pipeline.artifacts import ArtifactError, producer, write_table
from pipeline.console import plan, progress, say
from pipeline.files import Files
from pipeline.tensors import TensorFile, write_tensors
from stages.decoder.matrices import Shared, prunable_matrices, watch
from stages.decoder.skeleton import Decoder, as_stored
from stages.decoder.stream import read_windows
from stages.decoder.tape import Tape
from stages.statistics import Params, Statistics
from stages.statistics.gradients import LOGIT_BYTES, Means, gradient_means
from stages.statistics.importance import ALPHAS, Row, alpha_rows, check_weights, score_columns, score_rows
from stages.statistics.place import Place

POOLED = "linears"  # place in statistics.csv: the inputs of all matrices of the block, pooled
KEEP_BYTES = 1 << 29  # a block's matrix inputs are kept for the second look if they fit in half a gigabyte


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write `statistics.csv` (a row per block and place), `statistics.safetensors` (squared norms per channel) and
    `importance.csv` (a row per block and per matrix: scores, tail exponents, gradients).

    Tensors: `blocks.{block}.{place}.squares` float32 [channel], the sum over tokens of x²; `blocks.{block}.{place}.tokens`.
    """
    compute, wanted = params.compute, params.statistics
    decoder = Decoder(inputs["model"], compute.resolve_dtype(), compute.resolve_device())
    source = as_stored(decoder)
    tape = Tape(inputs["tape.safetensors"])
    tape.check_model(len(decoder), decoder.width)
    ids = _gradient_windows(TensorFile(inputs["tokens.safetensors"]), decoder, tape, wanted.gradient_windows)
    folder = outputs["statistics.csv"].parent
    batch_bytes = min(compute.batch_tokens, tape.windows * tape.length) * tape.width * 4
    largest = max(matrix.view(block).numel() for block in decoder.blocks for matrix in prunable_matrices(block))
    looks = (
        decoder.block_bytes()
        + (source.block_bytes() if source is not decoder else 0)
        + min(KEEP_BYTES, 16 * tape.windows * tape.length * tape.width * 4)
        + 16 * batch_bytes
        + 24 * largest
    )
    backward = max(4 * decoder.block_bytes() + 64 * batch_bytes, decoder.trunk_bytes() + 5 * LOGIT_BYTES) if len(ids) else 0
    plan(
        memory=max(looks, backward),
        disk=ids.numel() * tape.width * 4,
        folder=folder,
        memory_key="compute.batch_tokens",
        disk_key="statistics.gradient_windows",
    )
    rows: list[Row] = []
    importance: list[Row] = []
    tensors: dict[str, Tensor] = {}
    gradients: Means = gradient_means(decoder, tape, ids, compute.batch_tokens, folder) if len(ids) else {}
    last: Place | None = None
    for index in progress(range(len(decoder)), "block"):
        places, weighed = measure_block(decoder, source, tape, index, compute.batch_tokens, wanted, last)
        last = places["output"]
        sizes = {one["matrix"]: one["parameters"] for one in weighed}
        for name, place in places.items():
            row = place.row(wanted.percentiles, wanted.outlier, sizes.get(name, 0))
            rows.append({"block": index, "place": name, **row})
            if name != POOLED:
                tensors[f"blocks.{index}.{name}.squares"] = place.squares.float().cpu()
                tensors[f"blocks.{index}.{name}.tokens"] = torch.tensor([place.tokens])
        importance += [{"block": index, **one, **gradients.get((index, one["matrix"]), {})} for one in weighed]
    columns = ["block", "matrix", "parameters", *score_columns(wanted.score_outliers), *ALPHAS, "gradient", "weighted_gradient"]
    write_table(outputs["statistics.csv"], pd.DataFrame(rows))
    write_table(outputs["importance.csv"], pd.DataFrame(importance, columns=columns))
    write_tensors(outputs["statistics.safetensors"], tensors, {"squares": "sum over tokens of x², per channel"})
    extra = f", gradients over {len(ids)} windows" if len(ids) else ""
    say(f"{len(rows)} places in {len(decoder)} blocks, {tape.windows * tape.length} tokens each{extra}")


def measure_block(
    decoder: Decoder,
    source: Decoder,
    tape: Tape,
    index: int,
    batch_tokens: int,
    wanted: Statistics,
    entering: Place | None = None,
) -> tuple[dict[str, Place], list[Row]]:
    """What block `index` sees and weighs.

    Args:
        source: the model in the precision that it is stored in, whose weights are scored.
        entering: the measured output of the block before, which is this one's input.

    Returns the places by name (block input and output, the input of every matrix, and all of these pooled), and the rows of
    importance.csv: the block's, then one for each matrix.
    """
    sequences = wanted.percentiles if wanted.per_sequence else []
    ranges = list(tape.batches(batch_tokens))
    ends = {"input": entering or Place(sequences=sequences), "output": Place(sequences=sequences)}
    for offset, place in enumerate(ends.values()):
        if place is not entering:
            for look in _looks(place, wanted):
                for start, stop in ranges:
                    look(tape.read(index + offset, start, stop).to(decoder.device))

    for start, stop in ranges:  # asked now, since asking runs block 0 on two tokens that must not be counted
        decoder.calls(stop - start, tape.length)
    matrices = prunable_matrices(decoder.blocks[index])
    seen = _MatrixInputs(index, sequences)
    with decoder.block(index) as block, source.block(index) as exact:
        weights = {m.name: m.view(exact) for m in matrices}
        check_weights(weights, index)
        with watch(block, matrices, seen.first_look):
            for start, stop in ranges:
                seen.shape = (stop - start, tape.length)
                decoder.call(index, tape.read(index, start, stop).to(decoder.device))
        seen.aim(wanted.percentiles, wanted.outlier)
        if seen.needs_second_look:
            if seen.kept is not None:
                for name, x in seen.kept:
                    seen.second_look(name, x)
                seen.kept = None
            else:
                with watch(block, matrices, seen.second_look):
                    for start, stop in ranges:
                        decoder.call(index, tape.read(index, start, stop).to(decoder.device))
        places = {name: seen.place_of(name) for name in weights}
        squares = {name: place.squares for name, place in places.items() if place.count}
        scores = score_rows(weights, squares, tape.windows, wanted.score_outliers, index)
        alphas = alpha_rows(weights) if wanted.spectra else {}
    sizes = {name: weight.numel() for name, weight in weights.items()}
    rows = [
        {"matrix": name, "parameters": size, **scores.get(name, {}), **alphas.get(name, {})}
        for name, size in {"": sum(sizes.values()), **sizes}.items()
    ]
    return {**ends, POOLED: seen.pooled, **places}, rows


def _gradient_windows(tokens: TensorFile, decoder: Decoder, tape: Tape, count: int) -> Tensor:
    """The token ids [window, token] that the loss is taken over. Raises ArtifactError if they are not those of the tape."""
    ids = read_windows(tokens, "calibration", decoder)
    if tuple(ids.shape) != (tape.windows, tape.length):
        raise ArtifactError(
            f"{tokens.path}: {ids.shape[0]} calibration windows of {ids.shape[1]} tokens, but the tape has {tape.windows} of "
            f"{tape.length}; {producer(tokens.path)}"
        )
    return ids[:count]


def _looks(place: Place, wanted: Statistics) -> Iterable[Callable[[Tensor], None]]:
    yield lambda x: place.see(x, len(x))
    place.aim(wanted.percentiles, [wanted.outlier])
    if place.needs_second_look:
        yield place.second_look


class _MatrixInputs:
    """The places of one block's matrices, and all of them pooled. Matrices that are fed the same tensor share one place."""

    def __init__(self, block: int, sequences: Sequence[float]):
        self.block, self.sequences = block, sequences
        self.shape: tuple[int, int] = (0, 0)  # windows and tokens of the batch that is running
        self.places: dict[str, Place] = {}
        self.pooled = Place(f"block {block}, inputs of its matrices")
        self.kept: list[tuple[str, Tensor]] | None = []
        self._bytes = 0
        self._shared = Shared()

    def place_of(self, matrix: str) -> Place:
        """Empty for an expert that no token was routed to."""
        return self.places.get(self._shared.owner.get(matrix, ""), Place(sequences=self.sequences))

    def first_look(self, name: str, x: Tensor) -> None:
        if not self._shared.is_first(name, x):
            return
        whole = x.numel() == x.shape[-1] * self.shape[0] * self.shape[1]
        place = self.places.setdefault(name, Place(f"block {self.block}, input of {name}", self.sequences))
        place.see(x, self.shape[0] if whole else None)
        if self.kept is not None:
            self._bytes += x.numel() * x.element_size()
            self.kept = [*self.kept, (name, x)] if self._bytes <= KEEP_BYTES else None

    def aim(self, percentiles: Sequence[float], outlier: float) -> None:
        """After the first look at every batch: pool the places, each as often as matrices share it, and aim them all."""
        for owner in self._shared.owner.values():
            self.pooled.pool_place(self.places[owner])
        for place in (self.pooled, *self.places.values()):
            place.aim(percentiles, [outlier])

    @property
    def needs_second_look(self) -> bool:
        return self.pooled.needs_second_look

    def second_look(self, name: str, x: Tensor) -> None:
        if self._shared.owner[name] == name:
            self.places[name].second_look(x)
            self.pooled.second_look(x, times=sum(owner == name for owner in self._shared.owner.values()))
