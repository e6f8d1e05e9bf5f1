"""Operators that stand in for removed blocks: their form, how they are stored, and what they do to the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pipeline.artifacts import ArtifactError, producer, read_json
from pipeline.tensors import TensorFile, check_finite


@dataclass(frozen=True)
class Sinks:
    """Which tokens are treated apart when the model runs: the first of a text, and those of some ids."""

    action: str  # "bypass": the operator leaves them alone; "restore": they become the vectors of `Operator.targets`
    first: bool = False
    ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Number of kinds of sinks, each with a vector of its own."""
        return int(self.first) + len(self.ids)

    def kinds(self, ids: Int[Tensor, "window token"]) -> Int[Tensor, "window token"]:
        """For full windows, the kind of each token: an index into `Operator.targets`, -1 for a token that is no sink."""
        kinds = torch.full(ids.shape, -1, dtype=torch.long, device=ids.device)
        for place, one in enumerate(self.ids, start=int(self.first)):
            kinds[ids == one] = place
        if self.first:
            kinds[:, 0] = 0
        return kinds


@dataclass(frozen=True)
class Operator:
    """What is added to the stream x [token, channel] where blocks were removed: x M + bias, with M in one of three forms.

    A `fold` is never run: it changes the matrix whose output o is added to the stream before the gap, o -> o + o F + bias.
    """

    dense: Float[Tensor, "channel channel"] | None = None  # M
    scale: Float[Tensor, " channel"] | None = None  # M = diag(scale)
    down: Float[Tensor, "channel rank"] | None = None  # M = down up
    up: Float[Tensor, "rank channel"] | None = None
    fold: Float[Tensor, "channel channel"] | None = None  # F
    bias: Float[Tensor, " channel"] | None = None
    targets: Float[Tensor, "kind channel"] | None = None  # what restored sinks become
    into: str = ""  # of a fold: the matrix it changes, of the block before the gap
    sinks: Sinks | None = None

    @property
    def does_nothing(self) -> bool:
        """Whether it has no tensors and treats no token apart: there is nothing to store or to run."""
        return not self.tensors() and (self.sinks is None or not len(self.sinks))

    def matrix(self, width: int) -> Float[Tensor, "channel channel"]:
        """M as one matrix (F of a fold)."""
        whole = self.dense if self.dense is not None else self.fold
        if whole is not None:
            return whole
        if self.scale is not None:
            return torch.diag(self.scale)
        if self.down is not None and self.up is not None:
            return self.down @ self.up
        return torch.zeros(width, width, dtype=torch.float64 if self.bias is None else self.bias.dtype)

    def step(self, x: Float[Tensor, "*batch channel"]) -> Float[Tensor, "*batch channel"]:
        """x M + bias, sinks not looked at."""
        if self.scale is not None:
            step = x * self.scale
        elif self.down is not None and self.up is not None:
            step = x @ self.down @ self.up
        else:
            whole = self.dense if self.dense is not None else self.fold
            step = torch.zeros_like(x) if whole is None else x @ whole
        return step if self.bias is None else step + self.bias

    def apply(
        self, x: Float[Tensor, "window token channel"], ids: Int[Tensor, "window token"]
    ) -> Float[Tensor, "window token channel"]:
        """The stream behind the operator, for full windows with their token ids."""
        y = x + self.step(x)
        if self.sinks is None or not len(self.sinks):
            return y
        kinds = self.sinks.kinds(ids.to(x.device))
        apart = (kinds >= 0)[..., None]
        if self.targets is None:
            return torch.where(apart, x, y)
        return torch.where(apart, self.targets.to(x)[kinds.clamp(min=0)], y)

    def to(self, dtype: torch.dtype, device: str = "cpu") -> Operator:
        """The same in another precision."""
        return Operator(
            **{name: value.to(device, dtype) for name, value in self.tensors().items()}, into=self.into, sinks=self.sinks
        )

    def tensors(self) -> dict[str, Tensor]:
        """Name of the field -> tensor, those that are there."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def fold_into(weight: Float[Tensor, "channel in"], bias: Float[Tensor, " channel"] | None, operator: Operator) -> None:
    """Change, in place, the matrix whose output o = z weightᵀ + bias is added to the stream, so that it gives o + o F.

    The sum is float32 and rounded once to the dtype of the weight.
    """
    assert operator.fold is not None
    f = operator.fold.to(weight.device, torch.float32)
    weight.copy_(weight.float() + f.T @ weight.float())
    if bias is not None:
        bias.copy_(bias.float() + bias.float() @ f)


def write_operators(operators: Mapping[tuple[int, int], Operator]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata of ghost.safetensors. M of run [start, stop) is `runs.{start}-{stop}`, all else has a suffix."""
    tensors, details = {}, {}
    for (start, stop), operator in operators.items():
        name = operator_name(start, stop)
        for field, value in operator.to(torch.float32).tensors().items():
            tensors[name if field == "dense" else f"{name}.{field}"] = value.contiguous()
        sinks = operator.sinks
        apart = None if sinks is None else {"action": sinks.action, "first": sinks.first, "ids": list(sinks.ids)}
        details[name] = {"start": start, "stop": stop, "into": operator.into, "sinks": apart}
    return tensors, details


def read_operators(file: TensorFile, width: int) -> dict[tuple[int, int], Operator]:
    """(start, stop) -> operator, float32, in the order of the model.

    Raises ArtifactError naming the file if an operator is of another width, incomplete or not finite.
    """
    found: dict[tuple[int, int], Operator] = {}
    try:
        details = sorted(file.metadata["operators"].items(), key=lambda item: item[1]["start"])
        for name, detail in details:
            tensors = {
                field.name: check_finite(file.read(key), f"{file.path}: {key}")
                for field in fields(Operator)
                if (key := name if field.name == "dense" else f"{name}.{field.name}") in file
            }
            _check_shapes(file, name, tensors, width)
            apart = detail["sinks"]
            sinks = Sinks(apart["action"], bool(apart["first"]), tuple(apart["ids"])) if apart else None
            wanted = len(sinks) if sinks is not None and sinks.action == "restore" else 0
            if wanted != (len(tensors["targets"]) if "targets" in tensors else 0) or not (tensors or sinks):
                raise ArtifactError(f"{file.path}: '{name}' is not whole; {producer(file.path)}")
            found[detail["start"], detail["stop"]] = Operator(**tensors, into=detail["into"], sinks=sinks)
    except (KeyError, TypeError, AttributeError):
        raise ArtifactError(f"{file.path}: does not say what its operators are; {producer(file.path)}") from None
    return found


def _check_shapes(file: TensorFile, name: str, tensors: dict[str, Tensor], width: int) -> None:
    rank = tensors["down"].shape[-1] if "down" in tensors else 0
    shapes = {
        "dense": (width, width), "fold": (width, width), "scale": (width,), "bias": (width,),
        "down": (width, rank), "up": (rank, width), "targets": (len(tensors.get("targets", ())), width),
    }  # fmt: skip
    for field, value in tensors.items():
        if tuple(value.shape) != shapes[field]:
            raise ArtifactError(
                f"{file.path}: '{name}' of shape {tuple(value.shape)} is no operator on {width} channels; {producer(file.path)}"
            )


def read_removed(path: Path, blocks: int) -> list[int]:
    """The removed blocks that removal.json names, for a model of `blocks` blocks. Raises ArtifactError naming the file."""
    content = read_json(path)
    removed = content.get("removed") if isinstance(content, dict) else None
    if not isinstance(removed, list) or not all(type(one) is int and 0 <= one < blocks for one in removed):
        raise ArtifactError(f"{path}: names no blocks of a model of {blocks} ({removed}); {producer(path)}")
    if len(set(removed)) == blocks:
        raise ArtifactError(f"{path}: names all {blocks} blocks of the model; at least one has to stay")
    return removed


def runs_of(removed: list[int]) -> list[tuple[int, int]]:
    """Maximal runs [start, stop) of adjacent removed blocks: `[3, 4, 7]` -> `[(3, 5), (7, 8)]`."""
    runs: list[tuple[int, int]] = []
    for block in sorted(removed):
        if runs and runs[-1][1] == block:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return runs


def spell(start: int, stop: int) -> str:
    """A run [start, stop) in words: "block 1", "blocks 1 to 2"."""
    return f"block {start}" if stop - start == 1 else f"blocks {start} to {stop - 1}"


def operator_name(start: int, stop: int) -> str:
    """Name of the operator of run [start, stop) in ghost.safetensors."""
    return f"runs.{start}-{stop}"
