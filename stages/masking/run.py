"""Decide, block by block, which weights of each prunable matrix stay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pandas as pd
import torch
from torch import Tensor

from pipeline.artifacts import ArtifactError, producer, read_table
from pipeline.console import plan, progress, say
from pipeline.errors import PalimpsestError
from pipeline.files import Files
from pipeline.tensors import TensorFile, TensorWriter
from stages.decoder.masks import mask_name, pack_mask, packed_shape
from stages.decoder.matrices import Matrix, prunable_matrices, watch
from stages.decoder.scores import magnitude_score, wanda_score
from stages.decoder.selection import keep_per_row
from stages.decoder.skeleton import Decoder
from stages.decoder.stream import Stream, advance, embed, read_batches, read_windows
from stages.masking import Params

# A method scores a matrix [out, in] given the squared norms of its input channels [in]; low scores go first.
Method = Callable[[Tensor, Tensor], Tensor]
METHODS: dict[str, Method] = {"magnitude": lambda weight, _: magnitude_score(weight), "wanda": wanda_score}
NEEDS_ACTIVATIONS = {"wanda"}


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write `masks.safetensors`: for each matrix its mask, one bit per weight (1 stays), packed along the inputs."""
    compute, wanted = params.compute, params.masking
    decoder = Decoder(inputs["model"], compute.resolve_dtype(), compute.resolve_device())
    shares = Shares(read_table(inputs["allocation.csv"], ("block", "matrix", "sparsity")), len(decoder))
    ids = read_windows(TensorFile(inputs["tokens.safetensors"]), "calibration", decoder)
    statistics = TensorFile(inputs["statistics.safetensors"])
    needs_activations = wanted.method in NEEDS_ACTIVATIONS and shares.largest > 0
    runs_blocks = needs_activations and wanted.activations == "pruned"

    matrices = [prunable_matrices(block) for block in decoder.blocks]
    sizes = {(i, m.name): tuple(m.view(decoder.blocks[i]).shape) for i, some in enumerate(matrices) for m in some}
    specs = {mask_name(i, name): (packed_shape(size), torch.uint8) for (i, name), size in sizes.items()}
    file = TensorWriter(outputs["masks.safetensors"], specs, {"bits": "1 = kept; least significant bit first, along the inputs"})
    batch_bytes = min(compute.batch_tokens, ids.numel()) * decoder.width * decoder.dtype.itemsize
    stream_bytes = ids.numel() * decoder.width * decoder.dtype.itemsize if runs_blocks else 0
    plan(
        memory=3 * decoder.block_bytes() + 16 * batch_bytes,
        disk=file.bytes + stream_bytes,
        folder=outputs["masks.safetensors"].parent,
        memory_key="compute.batch_tokens",
        disk_key="tokens.calibration_windows",
    )
    kept = 0
    with ExitStack() as stack:
        stack.enter_context(file)
        stream = None
        if runs_blocks:
            folder = outputs["masks.safetensors"].parent
            stream = stack.enter_context(Stream(folder, (*ids.shape, decoder.width), decoder.dtype))
            embed(decoder, ids, stream, compute.batch_tokens)
        for index in progress(range(len(decoder)), "block"):
            with decoder.block(index) as block:
                squares = {}
                if stream is not None:
                    squares = watch_squares(decoder, index, matrices[index], stream, compute.batch_tokens)
                elif needs_activations:
                    squares = _saved_squares(statistics, index, {m.name: sizes[index, m.name][1] for m in matrices[index]})
                for matrix in matrices[index]:
                    weight, share = matrix.view(block), shares.of(index, matrix.name)
                    if share == 0:
                        keep = torch.ones_like(weight, dtype=torch.bool)
                    else:
                        keep = keep_per_row(
                            _score(wanted.method, weight, squares.get(matrix.name), index, matrix), share, exact=False
                        )
                    weight.mul_(keep)
                    file.write(mask_name(index, matrix.name), pack_mask(keep))
                    kept += int(keep.sum())
                if stream is not None:
                    advance(decoder, index, stream, compute.batch_tokens)
    total = sum(rows * columns for rows, columns in sizes.values())
    say(f"{wanted.method}: {1 - kept / total:.6f} of {total:,} weights masked, target {shares.mean(sizes):.6f}")


class Shares:
    """allocation.csv: the sparsity of each matrix, given for its block or for itself."""

    def __init__(self, table: pd.DataFrame, blocks: int):
        if set(table.block) != set(range(blocks)):
            raise PalimpsestError(
                f"allocation.csv has blocks {sorted(set(table.block))}, the model has {blocks}; run: dvc repro allocation"
            )
        names = ["" if pd.isna(name) else str(name) for name in table.matrix]
        self._shares = dict(zip(zip(table.block, names, strict=True), table.sparsity.astype(float), strict=True))
        self.largest = float(table.sparsity.max())

    def of(self, block: int, matrix: str) -> float:
        """The share of `matrix`'s weights to remove."""
        return self._shares[block, matrix] if (block, matrix) in self._shares else self._shares[block, ""]

    def mean(self, sizes: dict[tuple[int, str], tuple[int, ...]]) -> float:
        """The mean over all weights."""
        counts = {key: size[0] * size[1] for key, size in sizes.items()}
        return sum(self.of(*key) * count for key, count in counts.items()) / sum(counts.values())


def watch_squares(decoder: Decoder, index: int, matrices: list[Matrix], stream: Stream, batch_tokens: int) -> dict[str, Tensor]:
    """Sum over the stream's tokens of x² per input channel, for each matrix of the loaded block that any token reaches."""
    squares: dict[str, Tensor] = {}
    last: dict[str, Tensor] = {}  # the newest input and its sum: query, key and value are fed the same tensor

    def see(name: str, x: Tensor) -> None:
        if last.get("x") is not x:
            last["x"], last["sum"] = x, x.reshape(-1, x.shape[-1]).float().square().sum(0, dtype=torch.float64)
        squares[name] = squares[name] + last["sum"] if name in squares else last["sum"]

    with watch(decoder.blocks[index], matrices, see):
        for _, _, hidden in read_batches(stream, batch_tokens, decoder.device):
            decoder.call(index, hidden)
    return squares


def _saved_squares(statistics: TensorFile, index: int, widths: dict[str, int]) -> dict[str, Tensor]:
    """The same from the dense tape, for each matrix (name -> inputs) that any token reached."""
    squares = {}
    for name, width in widths.items():
        key = f"blocks.{index}.{name}"
        if int(statistics.read(f"{key}.tokens")) == 0:
            continue
        squares[name] = statistics.read(f"{key}.squares")
        if squares[name].shape != (width,):
            raise ArtifactError(
                f"{statistics.path}: '{key}' is not of {width} inputs, as in the model; {producer(statistics.path)}"
            )
    return squares


def _score(method: str, weight: Tensor, squares: Tensor | None, index: int, matrix: Matrix) -> Tensor:
    """The method's scores; by magnitude where the method needs activations and no token reached the matrix."""
    if squares is None and method in NEEDS_ACTIVATIONS:
        say(f"block {index}, {matrix.name}: no token was routed here; scored by magnitude")
        method = "magnitude"
    return METHODS[method](weight, torch.ones(0) if squares is None else squares.to(weight.device))
