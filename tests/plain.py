"""What the stages should give, said with the plain model of `transformers` and hooks: nothing of `stages/` is used here."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

PATHS = {"gpt2": "transformer.h", "gpt_neox": "gpt_neox.layers", "opt": "model.decoder.layers", "falcon": "transformer.h"}
PATHS |= dict.fromkeys(("bloom", "gpt_neo"), "transformer.h")
Runs = Mapping[tuple[int, int], Tensor | Callable[[Tensor], Tensor]]


def blocks_of(model: Any) -> nn.ModuleList:
    """The decoder blocks, by the name the architecture gives them."""
    return model.get_submodule(PATHS.get(model.config.model_type, "model.layers"))


def matrix_of(block: nn.Module, name: str) -> Tensor:
    """Matrix `name` of masks.safetensors as [out, in]; writing to it writes to the model."""
    path, _, last = name.rpartition(".")
    if last.isdigit():  # an expert of a fused parameter
        weight = block.get_parameter(path).data[int(last)]
        return weight.T if getattr(block.get_submodule(path.rpartition(".")[0]), "is_transposed", False) else weight
    module: Any = block.get_submodule(name)
    return module.weight.data.T if isinstance(module, Conv1D) else module.weight.data


def read_masks(path: Path, model: Any) -> dict[tuple[int, str], Tensor]:
    """(block, matrix) -> which weights stay, [out, in], unpacked by numpy."""
    masks = {}
    for key, packed in load_file(path).items():
        if not key.startswith("blocks."):
            continue
        _, block, name = key.split(".", 2)
        columns = matrix_of(blocks_of(model)[int(block)], name).shape[1]
        bits = np.unpackbits(packed, axis=1, bitorder="little")
        assert not bits[:, columns:].any(), "the filling is zero"
        masks[int(block), name] = torch.from_numpy(bits[:, :columns].astype(bool))
    return masks


def read_operators(path: Path) -> dict[tuple[int, int], Tensor]:
    """Run [start, stop) -> M, from ghost.safetensors, where it has nothing but matrices."""
    runs = {}
    for name, value in load_file(path).items():
        start, stop = name.removeprefix("runs.").split("-")
        runs[int(start), int(stop)] = torch.from_numpy(value)
    return runs


def plain_variant(
    model: Any,
    masks: Mapping[tuple[int, str], Tensor] | None = None,
    removed: Iterable[int] = (),
    operators: Runs | None = None,
) -> Any:
    """A copy of `model` with masked weights zero; a removed block hands on its input x, the first of a run x + x M.

    An operator may also be a function of x.
    """
    twin = copy.deepcopy(model)
    blocks = blocks_of(twin)
    for (block, name), keep in (masks or {}).items():
        weight = matrix_of(blocks[block], name)
        weight[~keep] = 0.0
    first = {start: m for (start, _), m in (operators or {}).items()}
    for block in removed:
        blocks[block].register_forward_hook(_instead(first.get(block)), with_kwargs=True)
    return twin


def _instead(m: Any) -> Any:
    def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        y = x if m is None else x + x @ m if isinstance(m, Tensor) else m(x)
        return (y, *output[1:]) if isinstance(output, tuple) else y

    return hook


@torch.no_grad()
def plain_logits(model: Any, ids: Tensor) -> Tensor:
    """[window, token, vocabulary]."""
    return model(input_ids=ids.long(), attention_mask=torch.ones_like(ids), use_cache=False).logits


def plain_losses(model: Any, ids: Tensor) -> np.ndarray:
    """Mean loss in nats of each window over its length - 1 predicted tokens, by float64 numpy."""
    logits = plain_logits(model, ids).double().numpy()[:, :-1]
    top = logits.max(-1, keepdims=True)
    normaliser = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    chosen = np.take_along_axis(logits, ids[:, 1:, None].long().numpy(), -1)[..., 0]
    return (normaliser - chosen).mean(-1)


@torch.no_grad()
def plain_boundaries(model: Any, ids: Tensor) -> list[Tensor]:
    """The stream at each boundary, by hooks on the whole model: every block's input, and the last one's output."""
    seen: list[Tensor] = []
    blocks = blocks_of(model)
    take = lambda _, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"])  # noqa: E731
    handles = [block.register_forward_pre_hook(take, with_kwargs=True) for block in blocks]
    last = lambda _, args, output: seen.append(output[0] if isinstance(output, tuple) else output)  # noqa: E731
    handles.append(blocks[-1].register_forward_hook(last))
    plain_logits(model, ids)
    for handle in handles:
        handle.remove()
    return seen


def relative_gap(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    return float((found - expected).abs().max() / expected.abs().max())


@torch.no_grad()
def matrix_inputs(model: Any, block: int, ids: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    """Name -> all inputs [token, channel] of that matrix of one block, by hooks on the whole model.

    What an expert is given follows from what the experts' module is given: the tokens that the router chose it for.
    """
    inner, seen = blocks_of(model)[block], {}
    handles = []
    for name in names:
        path, _, last = name.rpartition(".")
        module = inner.get_submodule(path.rpartition(".")[0] if last.isdigit() else name)
        handles.append(module.register_forward_pre_hook(_note(seen, name)))
    plain_logits(model, ids)
    for handle in handles:
        handle.remove()
    inputs = {}
    for name, args in seen.items():
        path, _, last = name.rpartition(".")
        if not last.isdigit():
            inputs[name] = args[0].reshape(-1, args[0].shape[-1])
            continue
        hidden, chosen, _ = args
        rows = hidden[(chosen == int(last)).any(-1)]
        if "down_proj" in path:
            gate, up = (rows @ matrix_of(inner, name.replace("down_proj", "gate_up_proj")).T).chunk(2, dim=-1)
            rows = nn.functional.silu(gate) * up
        if len(rows):
            inputs[name] = rows
    return inputs


def _note(seen: dict[str, Any], name: str) -> Any:
    return lambda module, args: seen.__setitem__(name, args)
