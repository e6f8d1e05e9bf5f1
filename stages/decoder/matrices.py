"""The prunable matrices of a block, and what each of them is multiplied with.

Three forms are known: `nn.Linear` (weight [out, in]), transposed linears such as GPT-2's `Conv1D` ([in, out]), and
experts fused into one three-dimensional parameter ([expert, out, in], or [expert, in, out]). Everything else of a block
(norms, biases, routers and other gates of experts, short convolutions) is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from pipeline.errors import PalimpsestError

MINIMUM_COVERAGE = 0.9  # of a block's parameters with two or more dimensions
See = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class Matrix:
    """One prunable matrix, as `out x in` whatever way it is stored."""

    name: str  # "self_attn.q_proj", "mlp.experts.gate_up_proj.3"
    module: str
    parameter: str
    expert: int | None
    transposed: bool

    def view(self, block: nn.Module) -> Float[Tensor, "out in"]:
        """The matrix inside `block`; writing to it writes to the parameter."""
        return self.take(self.stored(block).data)

    def stored(self, block: nn.Module) -> nn.Parameter:
        """The parameter of `block` that holds the matrix, alone or with other experts."""
        return getattr(block.get_submodule(self.module), self.parameter)

    def take(self, stored: Tensor) -> Float[Tensor, "out in"]:
        """The matrix's part of a tensor laid out as its parameter: its weights, or their gradient."""
        one = stored if self.expert is None else stored[self.expert]
        return one.T if self.transposed else one


def prunable_matrices(block: nn.Module) -> list[Matrix]:
    """All prunable matrices of `block`, in the order of its modules. Weights may be on the meta device.

    Raises PalimpsestError if they cover less than 90% of the block's matrix parameters: the block hides its weights in
    a form that is not known here, and pruning the rest alone would miss the target in silence.
    """
    found: list[Matrix] = []
    gates = expert_gates(block)
    covered: set[int] = set()
    for path, module in block.named_modules():
        if path in gates:
            covered.update(id(parameter) for parameter in module.parameters())
        elif isinstance(module, nn.Linear | Conv1D):
            found.append(Matrix(path, path, "weight", None, isinstance(module, Conv1D)))
            covered.add(id(module.weight))
        else:
            for name, parameter in _fused(module):
                transposed = bool(getattr(module, "is_transposed", False))
                found += [Matrix(f"{path}.{name}.{e}", path, name, e, transposed) for e in range(len(parameter))]
                covered.add(id(parameter))
    sizes = {id(p): (name, p.numel()) for name, p in block.named_parameters() if p.ndim >= 2}
    total, inside = sum(n for _, n in sizes.values()), sum(n for key, (_, n) in sizes.items() if key in covered)
    if inside < MINIMUM_COVERAGE * total:
        rest = sorted(((n, name) for key, (name, n) in sizes.items() if key not in covered), reverse=True)
        raise PalimpsestError(
            f"{type(block).__name__}: prunable matrices cover {inside / total:.0%} of its weights; not recognised: "
            + ", ".join(f"{name} ({n})" for n, name in rest[:3])
        )
    return found


def expert_gates(block: nn.Module) -> set[str]:
    """Paths of the linears that choose among experts, or weigh them: a handful of weights on which all tokens' ways depend.

    Known by their place alone: beside experts (fused into one parameter, or a list of modules of one class), the only linear of
    what stands there, with an output for each expert or a single one. What is inside the experts is none, whatever its shape.
    """
    experts = {path: len(parameter) for path, module in block.named_modules() for _, parameter in _fused(module)}
    experts |= {
        path: len(module)
        for path, module in block.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(one) for one in module}) == 1
        if any(isinstance(part, nn.Linear | Conv1D) for part in module[0].modules())
    }
    linears = {
        path: module.weight.shape[1 if isinstance(module, Conv1D) else 0]
        for path, module in block.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }
    outside = {path: outputs for path, outputs in linears.items() if not any(path.startswith(f"{one}.") for one in experts)}
    gates = set()
    for where, count in experts.items():
        start, near = where, []
        while start and not near:
            start = start.rpartition(".")[0]
            near = [path for path in outside if not start or path.startswith(f"{start}.")]
        for path in near:
            part = path.removeprefix(f"{start}.").split(".")[0]
            of_part = [one for one in near if one.removeprefix(f"{start}.").split(".")[0] == part]
            if of_part == [path] and outside[path] in (count, 1):
                gates.add(path)
    return gates


def _fused(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of `module` that hold a matrix for each expert."""
    if isinstance(module, nn.Conv1d):
        return []
    return [(name, parameter) for name, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3]


@contextmanager
def watch(block: nn.Module, matrices: list[Matrix], see: See) -> Iterator[None]:
    """While the context lasts, call `see(name, x)` with the input x [token, in] of each matrix that is multiplied.

    Matrices that share an input (query, key, value) are shown the same tensor object, one after the other. An expert
    sees the tokens routed to it, and is not seen at all in a batch that routes none.

    Raises PalimpsestError if no product with any expert of a fused parameter was recognised: its inputs would be missed
    in silence.
    """
    handles = []
    for matrix in matrices:
        if matrix.expert is None:
            hook = _input_hook(matrix.name, see)
            handles.append(block.get_submodule(matrix.module).register_forward_pre_hook(hook))
    experts = {(m.module, m.parameter): m for m in matrices if m.expert is not None}
    try:
        with _Experts(block, list(experts), see) as products:
            yield
        products.check()
    finally:
        for handle in handles:
            handle.remove()


class Shared:
    """Which matrices of a block are fed the same tensor, learnt as `watch` shows them."""

    def __init__(self) -> None:
        self.owner: dict[str, str] = {}  # matrix -> the first of those that it shares its inputs with
        self._last: tuple[str, Tensor] | None = None

    def is_first(self, name: str, x: Tensor) -> bool:
        """Whether x counts under `name`; false where the matrix shown before was fed the same tensor."""
        if self._last is not None and self._last[1] is x and self.owner.get(name) in (None, self._last[0]):
            self.owner[name] = self._last[0]
            return False
        self._last = (name, x)  # held, so that no other tensor can take its place in memory
        self.owner.setdefault(name, name)
        return True

    def let_go(self) -> None:
        """Drop the tensor that was seen last."""
        self._last = None


def _input_hook(name: str, see: See) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    return lambda _, args: see(name, args[0])


class _Experts(TorchFunctionMode):
    """Sees products with one expert's slice of a fused parameter, recognised by where the slice lies in memory."""

    def __init__(self, block: nn.Module, fused: list[tuple[str, str]], see: See):
        super().__init__()
        self._see = see
        self._spans = []
        self._seen: set[str] = set()
        for module, parameter in fused:
            weight = getattr(block.get_submodule(module), parameter)
            step = weight[0].numel() * weight.element_size()
            self._spans.append((weight.data_ptr(), weight.data_ptr() + step * len(weight), step, f"{module}.{parameter}"))

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if self._spans and func in (nn.functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm):
            x, weight = args[0], args[1]
            for start, stop, step, name in self._spans:
                if start <= weight.data_ptr() < stop:
                    self._seen.add(name)
                    self._see(f"{name}.{(weight.data_ptr() - start) // step}", x)
        return func(*args, **(kwargs or {}))

    def check(self) -> None:
        """Raise PalimpsestError naming a fused parameter no product with which was seen."""
        for *_, name in self._spans:
            if name not in self._seen:
                raise PalimpsestError(f"{name}: experts that are not multiplied one by one; this form is not known here")
