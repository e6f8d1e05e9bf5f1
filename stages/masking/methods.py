"""The methods by name, and which of them prunes what."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.artifacts import ArtifactError
from stages.masking import Masking
from stages.masking.budget import Budget, Pruned
from stages.masking.inputs import Inputs
from stages.masking.magnitude import magnitude
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
NEEDS_GRAMS = {"sparsegpt"}  # methods that do, and that change the weights which stay


def prune(
    wanted: Masking, weights: list[Tensor], seen: Inputs | None, some: list[Budget], windows: int, what: str
) -> tuple[str, list[Pruned]]:
    """The method that was used and what it decided: magnitude where too few tokens came by; nothing where nothing is to go.

    Args:
        weights: matrices [out, in] that share their inputs.
        seen: sums of those; None if no token reached them, or no method needs them.
        some: a budget for each matrix.
        windows: of the calibration.
        what: names them in errors.

    Raises ArtifactError if the inputs are not finite.
    """
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


def _gram(inputs: Inputs) -> Tensor:
    assert inputs.gram is not None
    return inputs.gram
