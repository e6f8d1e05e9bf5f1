"""Decide, block by block, which weights of each prunable matrix stay, and what they become where the method changes them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from pipeline.artifacts import ArtifactError, producer, read_table, write_table
from pipeline.console import plan, progress, say
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
from stages.masking.memory import map_large_tensors
from stages.masking.shares import Key, Shares, budgets, rounding_note
from stages.masking.sparsegpt import sparsegpt
from stages.masking.wanda import wanda
from stages.masking.wanda_variant import TOLERANCE as VARIANT_TOLERANCE
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
NEEDS_GRAMS = {"sparsegpt"}  # and changes the weights that stay
COLUMNS = [
    "block", "matrix", "parameters", "tokens", "sparsity_asked", "sparsity", "kept_magnitude", "kept_score", "damping",
    "dead_inputs", "method",
]  # fmt: skip


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write `masks.safetensors` (see `stages.decoder.masks`) and `masks.csv`, a row per matrix."""
    compute, wanted = params.compute, params.masking
    decoder = Decoder(inputs["model"], compute.resolve_dtype(), compute.resolve_device())
    source = as_stored(decoder)
    shares = Shares(read_table(inputs["allocation.csv"], ("block", "matrix"), ("sparsity",)), len(decoder))
    ids = read_windows(TensorFile(inputs["tokens.safetensors"]), "calibration", decoder)
    matrices = [prunable_matrices(block) for block in decoder.blocks]
    sizes: dict[Key, tuple[int, int]] = {
        (i, m.name): (len(view), view.shape[1])
        for i, some in enumerate(matrices)
        for m in some
        for view in [m.view(decoder.blocks[i])]
    }
    wishes = budgets(shares, sizes, wanted)
    for note in (rounding_note(shares, wishes, wanted), few_tokens_note(sizes, ids.numel(), wanted)):
        if note:
            say(note)
    map_large_tensors(decoder.block_bytes())

    changes = wanted.method in NEEDS_GRAMS
    needs_inputs = wanted.method in NEEDS_INPUTS and any(one.share > 0 for one in wishes.values())
    streams = needs_inputs and (wanted.activations == "pruned" or changes)
    stored = decoder.checkpoint.stored_dtype()
    specs: dict[str, Spec] = {}
    for key, size in sizes.items():
        specs |= {mask_name(*key): (packed_shape(size), torch.uint8), kept_name(*key): ((1,), torch.int64)}
        if changes and wishes[key].share > 0:
            specs[weight_name(*key)] = (size, stored)
    file = TensorWriter(outputs["masks.safetensors"], specs, {"bits": "1 = kept; least significant bit first, along the inputs"})
    _plan(decoder, source, sizes, ids.numel(), compute.batch_tokens, file, streams, changes)

    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        stack.enter_context(file)
        stream = None
        if streams:
            stream = stack.enter_context(Stream(file.path.parent, (*ids.shape, decoder.width), decoder.dtype))
            embed(decoder, ids, stream, compute.batch_tokens)
        statistics = TensorFile(inputs["statistics.safetensors"]) if needs_inputs and stream is None else None
        for index in progress(range(len(decoder)), "block"):
            with decoder.block(index) if streams else nullcontext() as block, source.block(index) as exact:
                for matrix in matrices[index]:
                    _check_weights(matrix.view(exact), index, matrix)
                if stream is not None:
                    dense = wanted.activations == "tape"
                    groups = collect(
                        decoder, index, matrices[index], stream, compute.batch_tokens, grams=changes, advance=dense
                    ).take(matrices[index])
                else:
                    groups = [([m], _saved(statistics, index, m, sizes[index, m.name][1])) for m in matrices[index]]
                for members, seen in groups:
                    for some in _alike(members, {m.name: wishes[index, m.name] for m in members}):
                        weights = [matrix.view(exact) for matrix in some]
                        asked = [wishes[index, matrix.name] for matrix in some]
                        method, pruned = _prune(wanted, weights, seen, asked, len(ids), f"block {index}, {some[0].name}")
                        for matrix, weight, one in zip(some, weights, pruned, strict=True):
                            rows.append(_row(index, matrix, weight, one, shares, seen, method))
                            _write(file, index, matrix.name, weight, one)
                            if block is not None and block is not exact:
                                matrix.view(block).copy_(weight)
                del groups
                if stream is not None and wanted.activations == "pruned" and index + 1 < len(decoder):
                    advance(decoder, index, stream, compute.batch_tokens)
    table = pd.DataFrame(rows, columns=COLUMNS)
    write_table(outputs["masks.csv"], table)
    _tell(table, wanted, sizes, wishes, ids.numel())


def _plan(
    decoder: Decoder,
    source: Decoder,
    sizes: dict[Key, tuple[int, int]],
    tokens: int,
    batch_tokens: int,
    file: TensorWriter,
    streams: bool,
    grams: bool,
) -> None:
    batch_bytes = min(batch_tokens, tokens) * decoder.width * decoder.dtype.itemsize
    block_bytes = 3 * source.block_bytes() + (decoder.block_bytes() if streams and source is not decoder else 0)
    plan(
        memory=block_bytes + 16 * batch_bytes + (gram_bytes(sizes) if grams else 0),
        disk=file.bytes + (tokens * decoder.width * decoder.dtype.itemsize if streams else 0),
        folder=file.path.parent,
        memory_key="compute.batch_tokens",
        disk_key="tokens.calibration_windows",
    )


def few_tokens_note(sizes: dict[Key, tuple[int, int]], tokens: int, wanted: Masking) -> str | None:
    """In words, that the calibration tokens cannot fill the largest Hessian; None if they can, or none is made."""
    widest = max(sizes, key=lambda key: sizes[key][1])
    width = sizes[widest][1]
    if wanted.method not in NEEDS_GRAMS or tokens >= width:
        return None
    return (
        f"{tokens} calibration tokens are fewer than the {width} inputs of {widest[1]}: its Hessian is singular, and damping "
        f"alone ({wanted.sparsegpt.damping:g}) carries it; tokens.calibration_windows or tokens.length would mend that"
    )


def gram_bytes(sizes: dict[Key, tuple[int, int]]) -> int:
    """Bytes of the Grams of the block that needs most, and of the work on the largest; `sizes` as `budgets` takes them."""
    shared: dict[int, dict[tuple[str, int], int]] = {}  # matrices of one module with as many inputs most often share them
    for (block, name), (_, columns) in sizes.items():
        module, _, last = name.rpartition(".")
        shared.setdefault(block, {})[name if last.isdigit() else module, columns] = columns
    return max(8 * (sum(c**2 for c in widths.values()) + 4 * max(widths.values()) ** 2) for widths in shared.values())


def _alike(members: list[Matrix], wishes: dict[str, Budget]) -> list[list[Matrix]]:
    """Those that can be pruned together: of one pattern, and none that is to be left alone."""
    parts: dict[object, list[Matrix]] = {}
    for matrix in members:
        one = wishes[matrix.name]
        parts.setdefault((one.share > 0, one.group), []).append(matrix)
    return list(parts.values())


def _check_weights(weight: Tensor, index: int, matrix: Matrix) -> None:
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


def _row(
    index: int, matrix: Matrix, weight: Tensor, one: Pruned, shares: Shares, seen: Inputs | None, method: str
) -> dict[str, Any]:
    kept = int(one.keep.sum())
    return {
        "block": index,
        "matrix": matrix.name,
        "parameters": weight.numel(),
        "tokens": seen.tokens if seen is not None else None,
        "sparsity_asked": shares.of(index, matrix.name),
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


def _tell(
    table: pd.DataFrame, wanted: Masking, sizes: dict[Key, tuple[int, int]], wishes: dict[Key, Budget], tokens: int
) -> None:
    """Say what was done, and whatever was not done as asked."""
    keys: list[Key] = list(zip(table.block, table.matrix, strict=True))
    fallen = table[(table.method == "magnitude") & (wanted.method != "magnitude")]
    if len(fallen):
        blocks = ", ".join(map(str, sorted(set(fallen.block))))
        say(
            f"{len(fallen)} of {len(table)} matrices saw fewer than masking.expert_tokens = {wanted.expert_tokens} tokens and "
            f"were masked by magnitude, in blocks {blocks}; masks.csv names them"
        )
    widths = pd.Series([sizes[key][1] for key in keys])
    thin = table[table.method.isin(NEEDS_GRAMS) & (table.tokens < widths) & (table.tokens < tokens)]
    if len(thin):
        names = [f"{name} of block {block}" for block, name in zip(thin.block, thin.matrix, strict=True)]
        some = ", ".join([*names[:3], *(["…"] if len(names) > 3 else [])])
        say(
            f"{len(thin)} of {len(table)} matrices saw fewer tokens than they have inputs ({some}): damping "
            " carries their Hessians; masking.expert_tokens sets from how many on they are trusted"
        )
    asked = pd.Series([wishes[key].share for key in keys])
    off = (table.sparsity - asked).abs()
    missed = off[(table.method == "wanda_variant") & (off > VARIANT_TOLERANCE)]
    if wanted.rounding == "published" and len(missed):
        worst = missed.idxmax()
        say(
            f"{len(missed)} of {len(table)} matrices miss their share by more than {VARIANT_TOLERANCE:g}, most of all "
            f"{table.matrix[worst]} of block {table.block[worst]} ({table.sparsity[worst]:.4f} instead of {asked[worst]:.4f}): "
            "the published search of wanda_variant ends there; masking.rounding: exact meets the share"
        )
    raised = table[table.damping > wanted.sparsegpt.damping]
    for block, name, used in zip(raised.block, raised.matrix, raised.damping, strict=True):
        say(f"block {block}, {name}: damping raised from {wanted.sparsegpt.damping:g} to {used:g}")
    dead = table[table.dead_inputs > 0]
    if len(dead):
        say(f"{int(dead.dead_inputs.sum())} inputs of {len(dead)} matrices are zero for every token; their weights become zero")
    target = float((table.sparsity_asked * table.parameters).sum() / table.parameters.sum())
    found = float((table.sparsity * table.parameters).sum() / table.parameters.sum())
    say(f"{wanted.method}: {found:.6f} of {int(table.parameters.sum()):,} weights masked, target {target:.6f}")
