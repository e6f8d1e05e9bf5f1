"""Pruning of a whole model in memory as the published codes do it: `python -m tests.bench.published FOLDER METHOD PATTERN SHARE`.

Float32. Block by block: one window at a time through the dense block with hooks on every linear, every linear sorted and
pruned by itself, then one window at a time through the pruned block. Run by `tests.bench.pruning`; prints its own seconds.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from pipeline.tensors import TensorFile
from tests.plain import blocks_of
from tests.published import drop_groups, drop_layer, drop_rows, prune_sparsegpt, scores_of


class _Stop(Exception):
    pass


def first_inputs(model: Any, ids: Tensor) -> tuple[list[Tensor], dict[str, Any]]:
    """What block 0 is given: hidden states of each window, and the other arguments."""
    seen: list[Tensor] = []
    kwargs: dict[str, Any] = {}

    def catch(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        seen.append(args[0] if args else given["hidden_states"])
        kwargs.update(given)
        raise _Stop

    handle = blocks_of(model)[0].register_forward_pre_hook(catch, with_kwargs=True)
    for window in ids.long():
        try:
            model(input_ids=window[None], use_cache=False)
        except _Stop:
            continue
    handle.remove()
    kwargs.pop("hidden_states", None)
    return seen, kwargs


def add_batch(sums: dict[str, Tensor], name: str, x: Tensor, count: int, hessian: bool) -> None:
    """The running mean over windows of 2 x xᵀ, or of the squared norms."""
    x = x.reshape(-1, x.shape[-1]).T
    new = 2 / (count + 1) * x @ x.T if hessian else torch.linalg.vector_norm(x, dim=1) ** 2 / (count + 1)
    sums[name] = sums[name] * (count / (count + 1)) + new if name in sums else new


def _adder(sums: dict[str, Tensor], name: str, index: int, method: str) -> Any:
    return lambda _, args, out: add_batch(sums, name, args[0], index, method == "sparsegpt")


@torch.no_grad()
def prune(model: Any, ids: Tensor, method: str, group: tuple[int, int] | None, share: float) -> None:
    """Prune the linears of every block in place."""
    hidden, kwargs = first_inputs(model, ids)
    run = lambda block, x: (lambda out: out[0] if isinstance(out, tuple) else out)(block(x, **kwargs))  # noqa: E731
    for block in blocks_of(model):
        linears = {name: one for name, one in block.named_modules() if isinstance(one, nn.Linear)}
        sums: dict[str, Tensor] = {}
        if method != "magnitude":
            for index, x in enumerate(hidden):
                handles = [one.register_forward_hook(_adder(sums, name, index, method)) for name, one in linears.items()]
                run(block, x)
                for handle in handles:
                    handle.remove()
        for name, one in linears.items():
            weight = one.weight.data
            if method == "sparsegpt":
                weight.copy_(prune_sparsegpt(weight, sums[name], share, group)[1])
                continue
            score = scores_of(weight, sums[name].sqrt() if method == "wanda" else None)
            drop = drop_groups(score, *group) if group else (drop_rows if method == "wanda" else drop_layer)(score, share)
            weight[drop] = 0
        if method != "magnitude":
            hidden = [run(block, x) for x in hidden]


def main() -> None:
    """Load, prune, print the seconds."""
    root, (method, pattern) = Path(sys.argv[1]), sys.argv[2:4]
    start = time.monotonic()
    model = AutoModelForCausalLM.from_pretrained(root / "data/model", dtype=torch.float32).eval()
    ids = TensorFile(root / "data/tokens.safetensors").read("calibration")
    group = None if pattern == "unstructured" else tuple(map(int, pattern.split(":")))
    prune(model, ids, method, group, float(sys.argv[4]))  # type: ignore[arg-type]
    print(time.monotonic() - start)


if __name__ == "__main__":
    main()
