"""Decide, block by block, which weights of each prunable matrix stay, and what they become where the method changes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from pipeline.artifacts import ArtifactError, producer, read_table, write_table
from pipeline.console import progress
from pipeline.errors import PalimpsestError
from pipeline.files import Files
from pipeline.tensors import Spec, TensorFile, TensorWriter
from stages.decoder.masks import kept_name, mask_name, pack_mask, packed_shape, weight_name
from stages.decoder.matrices import Matrix, prunable_matrices
from stages.decoder.skeleton import Decoder, as_stored
from stages.decoder.stream import Stream, advance, embed, read_windows
from stages.masking import Masking, Params
from stages.masking.budget import Budget, Pruned, kept_share
from stages.masking.inputs import Inputs, collect
from stages.masking.magnitude import magnitude
from stages.masking.memory import map_large_tensors, say_plan
from stages.masking.notes import NEEDS_GRAMS, say_after, say_before
from stages.masking.shares import Key, Shares, budgets
from stages.masking.sparsegpt import sparsegpt
from stages.masking.wanda import wanda
from stages.masking.wanda_variant import wanda_variant

# A method takes matrices [out, in] that share their inputs, the sums of those, a budget each, the number of calibration windows,
# the settings, and a name for errors.
Method = Callable[[list[Tensor], Inputs, list[Budget], int, Masking, str], list[Pruned]]


def _each(prune: Callable[[Tensor, Inputs, Budget], Pruned]) -> Method:
    return lambda weights, inputs, some, *_: [prune(weight, inputs, one) for weight, one in zip(weights, some, strict=True)]


METHODS: dict[str, Method] = {
    "magnitude": _each(lambda weight, _, budget: magnitude(weight, budget)),
    "wanda": _each(lambda weight, x, budget: wanda(weight, x.squares, budget)),
    "wanda_variant": _each(lambda weight, x, budget: wanda_variant(weight, x.squares, budget)),
    "sparsegpt": lambda weights, x, some, windows, wanted, what: sparsegpt(
        weights, _gram(x), windows, some, wanted.sparsegpt.damping, wanted.sparsegpt.block, what
    ),
}
NEEDS_INPUTS = {"wanda", "wanda_variant", "sparsegpt"}
COLUMNS = [
    "block", "matrix", "parameters", "tokens", "sparsity_asked", "sparsity", "kept_magnitude", "kept_score", "damping",
    "dead_inputs", "method",
]  # fmt: skip


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write `masks.safetensors` (see `stages.decoder.masks`) and `masks.csv`, a row per matrix."""
    compute, wanted = params.compute, params.masking
    decoder = Decoder(inputs["model"], compute.resolve_dtype(), compute.resolve_device())
    source = as_stored(decoder)
    ids = read_windows(TensorFile(inputs["tokens.safetensors"]), "calibration", decoder)
    matrices = [prunable_matrices(block) for block in decoder.blocks]
    sizes = matrix_sizes(decoder, matrices)
    shares = Shares(read_table(inputs["allocation.csv"], ("block", "matrix"), ("sparsity",)), len(decoder))
    wishes = budgets(shares, sizes, wanted)
    say_before(shares, wishes, sizes, ids.numel(), wanted)
    map_large_tensors(decoder.block_bytes())

    changes, tape = wanted.method in NEEDS_GRAMS, wanted.activations == "tape"
    needs_inputs = wanted.method in NEEDS_INPUTS and any(one.share > 0 for one in wishes.values())
    streams = needs_inputs and (changes or not tape)
    saved = TensorFile(inputs["statistics.safetensors"]) if needs_inputs and not streams else None
    file = _open(outputs["masks.safetensors"], sizes, wishes, decoder.checkpoint.stored_dtype() if changes else None)
    say_plan(decoder, source, sizes, ids.numel(), compute.batch_tokens, file, streams, changes)

    rows: list[dict[str, Any]] = []
    with file, ExitStack() as stack:
        stream = None
        if streams:
            stream = stack.enter_context(Stream(file.path.parent, (*ids.shape, decoder.width), decoder.dtype))
            embed(decoder, ids, stream, compute.batch_tokens)
        for index in progress(range(len(decoder)), "block"):
            with decoder.block(index) if streams else nullcontext() as block, source.block(index) as exact:
                _check_weights(exact, index, matrices[index])
                if stream is not None:
                    seen = collect(decoder, index, matrices[index], stream, compute.batch_tokens, changes, advance=tape)
                    groups = seen.take(matrices[index])
                else:
                    groups = [([m], _saved(saved, index, m, sizes[index, m.name][1])) for m in matrices[index]]
                for matrix, weight, one, row in _mask(exact, index, groups, wishes, wanted, len(ids)):
                    rows.append({**row, "sparsity_asked": shares.of(index, matrix.name)})
                    _write(file, index, matrix.name, weight, one)
                    if block is not None and block is not exact:
                        matrix.view(block).copy_(weight)
                del groups
                if stream is not None and not tape and index + 1 < len(decoder):
                    advance(decoder, index, stream, compute.batch_tokens)
    table = pd.DataFrame(rows, columns=COLUMNS)
    write_table(outputs["masks.csv"], table)
    say_after(table, wishes, sizes, ids.numel(), wanted)


def matrix_sizes(decoder: Decoder, matrices: list[list[Matrix]]) -> dict[Key, tuple[int, int]]:
    """(block, matrix) -> (out, in)."""
    return {
        (index, matrix.name): (len(view), view.shape[1])
        for index, (block, some) in enumerate(zip(decoder.blocks, matrices, strict=True))
        for matrix in some
        for view in [matrix.view(block)]
    }


def _open(path: Path, sizes: dict[Key, tuple[int, int]], wishes: dict[Key, Budget], mended: torch.dtype | None) -> TensorWriter:
    """The file of masks; with `mended`, the checkpoint's dtype, also of the weights that the method changes."""
    specs: dict[str, Spec] = {}
    for key, size in sizes.items():
        specs |= {mask_name(*key): (packed_shape(size), torch.uint8), kept_name(*key): ((1,), torch.int64)}
        if mended is not None and wishes[key].share > 0:
            specs[weight_name(*key)] = (size, mended)
    return TensorWriter(path, specs, {"bits": "1 = kept; least significant bit first, along the inputs"})


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
            method, pruned = _prune(wanted, weights, seen, asked, windows, f"block {index}, {some[0].name}")
            for matrix, weight, one in zip(some, weights, pruned, strict=True):
                yield matrix, weight, one, _row(index, matrix, weight, one, seen, method)


def _alike(members: list[Matrix], wishes: dict[str, Budget]) -> list[list[Matrix]]:
    """Those that can be pruned together: of one pattern, and none that is to be left alone."""
    parts: dict[object, list[Matrix]] = {}
    for matrix in members:
        one = wishes[matrix.name]
        parts.setdefault((one.share > 0, one.group), []).append(matrix)
    return list(parts.values())


def _check_weights(block: nn.Module, index: int, matrices: list[Matrix]) -> None:
    for matrix in matrices:
        weight = matrix.view(block)
        if not torch.isfinite(weight.sum(dtype=torch.float32)) and not torch.isfinite(weight).all():
            raise PalimpsestError(
                f"block {index}, {matrix.name}: NaN or infinite weights; check the checkpoint that stage model made"
            )


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


def _gram(inputs: Inputs) -> Tensor:
    assert inputs.gram is not None
    return inputs.gram


def _prune(
    wanted: Masking, weights: list[Tensor], seen: Inputs | None, some: list[Budget], windows: int, what: str
) -> tuple[str, list[Pruned]]:
    """The method that was used and what it decided: magnitude where too few tokens came by; nothing where nothing is to go."""
    if all(budget.share == 0 for budget in some):
        return "none", [Pruned(torch.ones_like(weight, dtype=torch.bool), 1.0) for weight in weights]
    if wanted.method not in NEEDS_INPUTS:
        return wanted.method, METHODS[wanted.method](weights, Inputs(0, torch.zeros(0)), some, windows, wanted, what)
    if seen is None or seen.tokens < wanted.expert_tokens:
        return "magnitude", [magnitude(weight, budget) for weight, budget in zip(weights, some, strict=True)]
    if not torch.isfinite(seen.squares).all():
        raise ArtifactError(f"{what}: NaN or infinite inputs; try compute.dtype: float32 in params.yaml, or check the checkpoint")
    seen.squares = seen.squares.to(weights[0].device)
    return wanted.method, METHODS[wanted.method](weights, seen, some, windows, wanted, what)


def _row(index: int, matrix: Matrix, weight: Tensor, one: Pruned, seen: Inputs | None, method: str) -> dict[str, Any]:
    kept = int(one.keep.sum())
    return {
        "block": index,
        "matrix": matrix.name,
        "parameters": weight.numel(),
        "tokens": seen.tokens if seen is not None else None,
        "sparsity": 1 - kept / weight.numel(),
        "kept_magnitude": kept_share(weight.float().abs(), one.keep),
        "kept_score": one.score,
        "damping": one.damping,
        "dead_inputs": one.dead,
        "method": method,
    }


def _write(file: TensorWriter, index: int, name: str, weight: Tensor, one: Pruned) -> None:
    """Write the mask, and the weights where they are to be changed; leave in `weight` what the export will hold.

    `weight` is as precise as the checkpoint or more so, never less: what is written was rounded to the checkpoint's dtype alone.
    """
    file.write(mask_name(index, name), pack_mask(one.keep))
    file.write(kept_name(index, name), one.keep.sum().view(1))
    if weight_name(index, name) in file.specs:
        stored = file.specs[weight_name(index, name)][1]
        if one.weight is not None:
            weight.copy_(one.weight.to(stored))
        weight.masked_fill_(~one.keep, 0.0)
        file.write(weight_name(index, name), weight.to(stored))
    else:
        weight.masked_fill_(~one.keep, 0.0)
