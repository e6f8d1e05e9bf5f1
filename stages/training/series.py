"""The training itself: AdamW over windows in an order drawn by seed and epoch, on weights that may be of few bits."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from pipeline.errors import PalimpsestError
from stages.decoder.lowbit import choose_matrices, settle, train_on_grid
from stages.decoder.skeleton import find_blocks
from stages.training import Training

BETAS = (0.9, 0.95)
LARGEST_NORM = 1.0  # gradients are clipped to it


def build(config: Any, training: Training) -> nn.Module:
    """A model with random weights by `training.seed`, float32; `training.matrices` on the grid. Global randomness is untouched.

    Raises PalimpsestError naming the pattern that fits no matrix.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(training.seed)
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if training.grid != "none":
        blocks = list(find_blocks(model)[1])
        try:
            chosen = choose_matrices(blocks, training.matrices)
        except PalimpsestError as error:
            raise PalimpsestError(f"training.matrices: {error}") from None
        for block, matrices in zip(blocks, chosen, strict=True):
            train_on_grid(block, matrices, training.grid)
    return model


def optimiser_of(model: nn.Module, training: Training) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices alone."""
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim >= 2) is matrix], "weight_decay": training.weight_decay * matrix}
        for matrix in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=training.learning_rate, betas=BETAS)


def train_epoch(
    model: nn.Module, optimiser: torch.optim.Optimizer, windows: Int[Tensor, "window length"], training: Training, epoch: int
) -> float:
    """One pass over `windows`, in the order of `epoch` (from 0). Returns the mean loss of its tokens as they were trained on.

    Raises PalimpsestError with the step and the learning rate once the loss is not finite.
    """
    model.train()
    total = 0.0
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(training.seed * 1_000_003 + epoch))
    for number, batch in enumerate(order.split(training.batch_windows)):
        step = epoch * training.steps + number
        rate = learning_rate(training, step)
        for group in optimiser.param_groups:
            group["lr"] = rate
        loss = _loss(model, windows[batch], "mean")
        if not torch.isfinite(loss):
            raise PalimpsestError(
                f"training: the loss is {float(loss.detach())} at step {step} (epoch {epoch + 1}, learning rate {rate:.2g}); "
                "lower training.learning_rate or raise training.warmup"
            )
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
        optimiser.step()
        total += float(loss.detach()) * len(batch)
    return total / len(windows)


def learning_rate(training: Training, step: int) -> float:
    """Of `step` (from 0): linear up to `warmup`, then level, or half a cosine that reaches zero behind the last step."""
    if step < training.warmup:
        return training.learning_rate * (step + 1) / training.warmup
    if training.decay == "none":
        return training.learning_rate
    left = (step - training.warmup) / (training.epochs * training.steps - training.warmup)
    return training.learning_rate * (1 + math.cos(math.pi * left)) / 2


def deployed(model: nn.Module) -> nn.Module:
    """A copy as it is stored: weights of few bits in the place of the full ones behind them, all under their ordinary names."""
    settled = copy.deepcopy(model).eval()
    settle(settled)
    return settled


@torch.inference_mode()
def mean_loss(model: nn.Module, windows: Int[Tensor, "window length"], batch_windows: int) -> float:
    """Cross-entropy in nats per scored token: all tokens of each window but its first."""
    total = sum(float(_loss(model, batch, "sum")) for batch in windows.split(batch_windows))
    return total / (windows.numel() - len(windows))


def _loss(model: nn.Module, windows: Tensor, reduction: str) -> Tensor:
    ids = windows.long().to(next(model.parameters()).device)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction=reduction)
