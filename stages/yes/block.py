"""The weights of one block that is being fitted: where they start, what the grid makes of them, how the block comes by them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipeline.errors import PalimpsestError
from stages.decoder.grids import LowBit
from stages.decoder.lowbit import choose_matrices, quantise, straight_through
from stages.decoder.matrices import Matrix
from stages.decoder.skeleton import Decoder

Weights = dict[str, Tensor]  # name inside the block (or the model) -> tensor


def fresh_weights(decoder: Decoder, slot: int, seed: int) -> Weights:
    """Weights of block `slot` as the model's own initialisation draws them, float32.

    Raises PalimpsestError naming a tensor that it leaves unset.
    """
    block = decoder.blocks[slot]
    made = {name: torch.full(p.shape, torch.nan, device=decoder.device) for name, p in block.named_parameters()}
    with installed(block, {name: nn.Parameter(value, requires_grad=False) for name, value in made.items()}):
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            for module in block.modules():
                decoder.model._init_weights(module)  # type: ignore[operator]
        weights = {name: p.detach().clone() for name, p in block.named_parameters()}
    unset = [name for name, value in weights.items() if not torch.isfinite(value).all()]
    if unset:
        raise PalimpsestError(
            f"params.yaml: yes.initial = 'fresh': {type(block).__name__} does not say how {unset[0]} starts; allowed here: "
            "checkpoint, pretrained"
        )
    return weights


def stored_weights(source: Decoder, slot: int, device: str) -> Weights:
    """Weights of block `slot` of a checkpoint, float32."""
    with source.block(slot) as block:
        return {name: p.detach().float().clone().to(device) for name, p in block.named_parameters()}


def gridded_matrices(decoder: Decoder, wanted: LowBit) -> list[list[Matrix]]:
    """For each block its matrices that lie on the grid. Raises PalimpsestError naming the key and a pattern that fits none."""
    if wanted.grid == "none":
        return [[] for _ in decoder.blocks]
    try:
        return choose_matrices(decoder.blocks, wanted.matrices)
    except PalimpsestError as error:
        raise PalimpsestError(f"params.yaml: yes.matrices: {error}") from None


def on_grid(weights: Mapping[str, Tensor], matrices: Sequence[Matrix], grid: str, train: bool) -> Weights:
    """`weights` of a block with the given matrices on the grid; with `train` gradients pass straight through."""
    made, put = dict(weights), straight_through if train else quantise
    for matrix in matrices:
        name = f"{matrix.module}.{matrix.parameter}" if matrix.module else matrix.parameter
        row = put(matrix.take(weights[name]), grid)
        row = row.T if matrix.transposed else row
        if matrix.expert is not None:
            row = torch.stack([row if at == matrix.expert else one for at, one in enumerate(made[name])])
        made[name] = row
    return made


def cast(weights: Mapping[str, Tensor], dtype: torch.dtype) -> Weights:
    """All of `weights` in `dtype`."""
    return {name: value.to(dtype) for name, value in weights.items()}


@contextmanager
def installed(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """While the context lasts, the parameters of `module` of these names are the given tensors, gradients included."""
    places = [(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], value) for name, value in weights.items()]
    before = [owner._parameters[last] for owner, last, _ in places]
    try:
        for owner, last, value in places:
            owner._parameters[last] = value  # type: ignore[assignment]
        yield
    finally:
        for (owner, last, _), old in zip(places, before, strict=True):
            owner._parameters[last] = old
