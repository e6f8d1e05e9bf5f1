"""Weights of few bits: each output channel of a matrix takes a few multiples of a scale of its own.

| grid | values of a channel | scale |
|---|---|---|
| `binary` | -α, α | α = mean \\|w\\| (XNOR-Net, arXiv 1603.05279, eq. 6) |
| `ternary` | -γ, 0, γ: γ·clip(round(w/γ), -1, 1) | γ = mean \\|w\\| (BitNet b1.58, arXiv 2402.17764, eq. 1-3, here per channel) |
| `2bit` … `8bit` | s·{-q, …, q}, q = 2^(bits - 1) - 1, rounded to the nearest | s = max \\|w\\| / q |

What is quantised already stays: a channel that lies on the grid is given back as it is, to the bit. Weights stay in their own
dtype. For binary and ternary that is exact, since scales are rounded to it; of the others each value is the multiple of the
scale rounded to the dtype once, which never leads to another multiple.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pipeline.errors import PalimpsestError
from pipeline.tensors import check_finite
from stages.decoder.grids import GRIDS as GRIDS
from stages.decoder.matrices import Matrix, prunable_matrices


def quantise(weight: Float[Tensor, "out in"], grid: str) -> Float[Tensor, "out in"]:
    """`weight` on the grid, channel by channel, in its own dtype. NaN gives NaN.

    Raises PalimpsestError if `grid` is none of `GRIDS`.
    """
    if grid not in GRIDS:
        raise PalimpsestError(f"grid = '{grid}': there is no such grid; allowed: {', '.join(GRIDS)}")
    if grid == "binary":
        scale = _mean(weight)
        return torch.where(weight >= 0, scale, -scale)
    largest = weight.abs().amax(1, keepdim=True)
    if grid == "ternary":
        on_grid = ((weight.abs() == largest) | (weight == 0)).all(1, keepdim=True)  # the mean would shrink it
        scale = torch.where(on_grid, largest, _mean(weight))
        near_zero = weight.abs() <= scale / 2  # round() takes halves to the even number, here to 0
        return torch.where(near_zero, torch.zeros_like(weight), scale.copysign(weight))
    levels = 2 ** (int(grid.removesuffix("bit")) - 1) - 1
    step = torch.where(largest == 0, 1.0, largest.double() / levels)
    return (torch.round(weight.double() / step) * step).to(weight.dtype)


def straight_through(weight: Float[Tensor, "out in"], grid: str) -> Float[Tensor, "out in"]:
    """`quantise(weight, grid)` whose gradient reaches `weight` unchanged (Bengio et al., arXiv 1308.3432)."""
    return _StraightThrough.apply(weight, grid)  # type: ignore[return-value]


class _StraightThrough(torch.autograd.Function):
    """A function of its own, because w + (quantise(w) - w) leaves the grid by rounding."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, grid: str) -> Tensor:  # type: ignore[override]
        return quantise(weight, grid)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def choose_matrices(blocks: Iterable[nn.Module], patterns: Sequence[str]) -> list[list[Matrix]]:
    """For each block those of its prunable matrices whose name ("mlp.down_proj") fits a pattern ("mlp.*"), case included.

    Raises PalimpsestError naming a pattern that fits no matrix of any block, and the names there are.
    """
    every = [prunable_matrices(block) for block in blocks]
    names = list(dict.fromkeys(matrix.name for matrices in every for matrix in matrices))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise PalimpsestError(f"'{pattern}' fits no matrix of a block; there are {', '.join(names)}")
    return [[one for one in matrices if any(fnmatchcase(one.name, pattern) for pattern in patterns)] for matrices in every]


@torch.no_grad()
def quantise_matrices(block: nn.Module, matrices: Iterable[Matrix], grid: str, where: str) -> None:
    """Put `matrices` of `block` on the grid for good. Raises ArtifactError naming `where` and the matrix that holds NaN."""
    for matrix in matrices:
        weight = matrix.view(block)
        weight.copy_(quantise(check_finite(weight, f"{where}, {matrix.name}"), grid))


def train_on_grid(block: nn.Module, matrices: Iterable[Matrix], grid: str) -> None:
    """From here on `block` computes with quantised `matrices`, and gradients go straight through to the full ones.

    Its parameters are the full ones, under other names (`….parametrizations.weight.original`); `settle` ends it.
    """
    held: dict[tuple[str, str], list[Matrix]] = {}
    for matrix in matrices:
        held.setdefault((matrix.module, matrix.parameter), []).append(matrix)
    for (module, parameter), of_parameter in held.items():
        parametrize.register_parametrization(block.get_submodule(module), parameter, _OnGrid(of_parameter, grid))


def settle(block: nn.Module) -> None:
    """End `train_on_grid`: the quantised weights become the block's ordinary parameters, under their ordinary names."""
    for module in [one for one in block.modules() if parametrize.is_parametrized(one)]:
        # torch takes the weight's property off the module's class, which copies of the module share
        kind = type(module)
        own = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
        module.__class__ = type(kind.__name__, kind.__bases__, own)  # type: ignore[assignment]
        for name in list(module.parametrizations):  # type: ignore[arg-type]
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)


class _OnGrid(nn.Module):
    """A parameter with the matrices it holds put on the grid."""

    def __init__(self, matrices: list[Matrix], grid: str):
        super().__init__()
        self.matrices, self.grid = matrices, grid

    def forward(self, stored: Tensor) -> Tensor:
        if self.matrices[0].expert is None:
            return self._one(self.matrices[0], stored)
        experts = list(stored.unbind(0))
        for matrix in self.matrices:
            experts[matrix.expert or 0] = self._one(matrix, stored)
        return torch.stack(experts)

    def _one(self, matrix: Matrix, stored: Tensor) -> Tensor:
        weight = straight_through(matrix.take(stored), self.grid)
        return weight.T if matrix.transposed else weight


def _mean(weight: Tensor) -> Tensor:
    """Mean absolute value of each channel [out, 1]. Summed in float64: of equal values it is that value, to the bit."""
    return weight.abs().mean(1, keepdim=True, dtype=torch.float64).to(weight.dtype)
