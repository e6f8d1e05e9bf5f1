"""Gradient descent on a few tensors, by a cosine schedule, that keeps what was best on held-out windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pipeline.errors import PalimpsestError

WARM = 0.05  # share of the steps in which the learning rate rises
LARGEST_NORM = 1.0  # of the gradient; longer ones are cut to it
OPTIMISERS = {  # fused: one pass over the tensors; several, as is the default on a CPU, take longer than a head's products
    "adamw": partial(torch.optim.AdamW, fused=True),
    "sgd": partial(torch.optim.SGD, momentum=0.9, fused=True),
}


@dataclass(frozen=True)
class Descent:
    """Where it ended: the tensors with the lowest held-out loss seen, the starting ones among them."""

    best: list[Tensor]
    heldout: float
    steps: int  # taken


def descend(
    parameters: Sequence[Tensor],
    loss: Callable[[int], Tensor],
    heldout: Callable[[], float],
    *,
    steps: int,
    learning_rate: float,
    optimiser: str,
    check: int,
    patience: int,
    what: str,
) -> Descent:
    """Minimise `loss(step)` over `parameters` (leaves, float32).

    Args:
        heldout: the loss that decides what is kept and when to stop, asked before the first step and every `check` steps.
        patience: looks without a gain before stopping; 0: never.
        what: named in the error.

    Raises PalimpsestError naming `what` if no held-out loss was finite.
    """
    best, lowest, waited, taken = _copy(parameters), heldout(), 0, 0
    rule = OPTIMISERS[optimiser](parameters, lr=learning_rate)
    for step in range(steps):
        for group in rule.param_groups:
            group["lr"] = learning_rate * schedule(step, steps)
        rule.zero_grad(set_to_none=True)
        loss(step).backward()
        torch.nn.utils.clip_grad_norm_(parameters, LARGEST_NORM)
        rule.step()
        taken = step + 1
        if taken % check and taken < steps:
            continue
        now = heldout()
        if now < lowest or (math.isnan(lowest) and not math.isnan(now)):
            best, lowest, waited = _copy(parameters), now, 0
            continue
        waited += 1
        if patience and waited >= patience:
            break
    if not math.isfinite(lowest):
        raise PalimpsestError(f"{what}: no finite held-out loss; lower yes.learning_rate, or try compute.dtype: float32")
    return Descent(best, lowest, taken)


def schedule(step: int, steps: int) -> float:
    """Share of the learning rate at `step`: a linear rise, then half a cosine down to 0 behind the last step."""
    warm = min(1.0, (step + 1) / max(1.0, WARM * steps))
    return warm * 0.5 * (1 + math.cos(math.pi * step / steps))


def _copy(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [one.detach().clone() for one in parameters]
