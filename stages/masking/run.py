"""Decide, block by block, which weights of each prunable matrix stay, and what they become where the method changes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import pandas as pd
from torch import Tensor, nn

from pipeline.artifacts import ArtifactError, producer, read_table, write_table
from pipeline.console import progress
from pipeline.files import Files
from pipeline.tensors import TensorFile
from stages.decoder.masks import HEAD, mask_name
from stages.decoder.matrices import Matrix, prunable_matrices
from stages.decoder.skeleton import Decoder, as_stored
from stages.decoder.stream import Stream, advance, embed, read_windows
from stages.masking import Masking, Params
from stages.masking.budget import Budget, Pruned
from stages.masking.file import check_weights, mask_row, open_masks, write_mask
from stages.masking.head import head_budget, mask_head
from stages.masking.inputs import Inputs, collect
from stages.masking.memory import map_large_tensors, say_plan
from stages.masking.methods import NEEDS_GRAMS, NEEDS_INPUTS, prune
from stages.masking.notes import say_after, say_before
from stages.masking.shares import OF_HEAD, Key, Shares, budgets

COLUMNS = [
    "block", "matrix", "parameters", "tokens", "sparsity_asked", "sparsity", "kept_magnitude", "kept_score", "damping",
    "dead_inputs", "method",
]  # fmt: skip


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write `masks.safetensors` (see `stages.decoder.masks`) and `masks.csv`, a row per matrix (the head's has no block)."""
    compute, wanted = params.compute, params.masking
    decoder = Decoder(inputs["model"], compute.resolve_dtype(), compute.resolve_device())
    source = as_stored(decoder)
    ids = read_windows(TensorFile(inputs["tokens.safetensors"]), "calibration", decoder)
    matrices = [prunable_matrices(block) for block in decoder.blocks]
    sizes = matrix_sizes(decoder, matrices)
    shares = Shares(read_table(inputs["allocation.csv"], ("block", "matrix"), ("sparsity",)), len(decoder))
    wishes = budgets(shares, sizes, wanted)
    head = head_budget(decoder, wanted)
    say_before(shares, wishes, sizes, ids.numel(), wanted)
    if head is not None:
        vocabulary, width = decoder.head_weight.shape
        sizes[OF_HEAD], wishes[OF_HEAD] = (vocabulary, width), head
    map_large_tensors(decoder.block_bytes())

    changes, tape = wanted.method in NEEDS_GRAMS, wanted.activations == "tape"
    needs_inputs = wanted.method in NEEDS_INPUTS and any(one.share > 0 for one in wishes.values())
    streams = needs_inputs and (changes or not tape or head is not None)  # of the head's inputs there are no statistics
    saved = TensorFile(inputs["statistics.safetensors"]) if needs_inputs and not streams else None
    planned = {HEAD if key == OF_HEAD else mask_name(*key): (size, wishes[key]) for key, size in sizes.items()}
    file = open_masks(outputs["masks.safetensors"], planned, decoder.checkpoint.stored_dtype() if changes else None)
    say_plan(decoder, source, sizes, ids.numel(), compute.batch_tokens, file, streams, changes, head is not None)

    rows: list[dict[str, Any]] = []
    with file, ExitStack() as stack:
        stream = None
        if streams:
            stream = stack.enter_context(Stream(file.path.parent, (*ids.shape, decoder.width), decoder.dtype))
            embed(decoder, ids, stream, compute.batch_tokens)
        for index in progress(range(len(decoder)), "block"):
            with decoder.block(index) if streams else nullcontext() as block, source.block(index) as exact:
                for matrix in matrices[index]:
                    check_weights(matrix.view(exact), f"block {index}, {matrix.name}")
                if stream is not None:
                    seen = collect(decoder, index, matrices[index], stream, compute.batch_tokens, changes, advance=tape)
                    groups = seen.take(matrices[index])
                else:
                    groups = [([m], _saved(saved, index, m, sizes[index, m.name][1])) for m in matrices[index]]
                for matrix, weight, one, row in _mask(exact, index, groups, wishes, wanted, len(ids)):
                    rows.append({**row, "sparsity_asked": shares.of(index, matrix.name)})
                    write_mask(file, mask_name(index, matrix.name), weight, one)
                    if block is not None and block is not exact:
                        matrix.view(block).copy_(weight)
                del groups
                if stream is not None and not tape and (head is not None or index + 1 < len(decoder)):
                    advance(decoder, index, stream, compute.batch_tokens)
        if head is not None:
            row = mask_head(source, decoder, stream, head, wanted, compute.batch_tokens, file)
            rows.append({**row, "sparsity_asked": head.share})
    table = pd.DataFrame(rows, columns=COLUMNS)
    write_table(outputs["masks.csv"], table.assign(block=table.block.where(table.block >= 0).astype("Int64")))
    say_after(table, wishes, sizes, ids.numel(), wanted)


def matrix_sizes(decoder: Decoder, matrices: list[list[Matrix]]) -> dict[Key, tuple[int, int]]:
    """(block, matrix) -> (out, in)."""
    return {
        (index, matrix.name): (len(view), view.shape[1])
        for index, (block, some) in enumerate(zip(decoder.blocks, matrices, strict=True))
        for matrix in some
        for view in [matrix.view(block)]
    }


def _mask(
    block: nn.Module,
    index: int,
    groups: list[tuple[list[Matrix], Inputs | None]],
    wishes: dict[Key, Budget],
    wanted: Masking,
    windows: int,
) -> Iterator[tuple[Matrix, Tensor, Pruned, dict[str, Any]]]:
    """Prune the matrices of one block, those that share their inputs together.

    Yields each matrix, its weights [out, in] as they were, what the method decided, and its row of masks.csv.
    """
    for members, seen in groups:
        for some in _alike(members, {m.name: wishes[index, m.name] for m in members}):
            weights = [matrix.view(block) for matrix in some]
            asked = [wishes[index, matrix.name] for matrix in some]
            method, pruned = prune(wanted, weights, seen, asked, windows, f"block {index}, {some[0].name}")
            for matrix, weight, one in zip(some, weights, pruned, strict=True):
                yield matrix, weight, one, mask_row(index, matrix.name, weight, one, seen, method)


def _alike(members: list[Matrix], wishes: dict[str, Budget]) -> list[list[Matrix]]:
    """Those that can be pruned together: of one pattern, and none that is to be left alone."""
    parts: dict[object, list[Matrix]] = {}
    for matrix in members:
        one = wishes[matrix.name]
        parts.setdefault((one.share > 0, one.group), []).append(matrix)
    return list(parts.values())


def _saved(statistics: TensorFile | None, index: int, matrix: Matrix, width: int) -> Inputs | None:
    """What a matrix sees on the dense tape; None if no token reached it, or no inputs are needed."""
    if statistics is None:
        return None
    key = f"blocks.{index}.{matrix.name}"
    tokens = int(statistics.read(f"{key}.tokens"))
    if tokens == 0:
        return None
    squares = statistics.read(f"{key}.squares")
    if squares.shape != (width,):
        raise ArtifactError(f"{statistics.path}: '{key}' is not of {width} inputs, as in the model; {producer(statistics.path)}")
    return Inputs(tokens, squares)
