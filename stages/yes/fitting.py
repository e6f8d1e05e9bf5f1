"""One block fitted by regression to a boundary of the tape: the step of peeling (arXiv 2605.02853, by public summaries)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from stages.decoder.skeleton import Decoder
from stages.decoder.stream import Stream
from stages.yes import Yes
from stages.yes.block import Weights, cast, gridded_matrices, installed, on_grid
from stages.yes.descent import descend
from stages.yes.parts import Parts, batch_order, generator_of, rows

Goal = Callable[[Sequence[int]], Tensor]  # windows -> the target stream [window, token, channel]


def token_errors(
    out: Float[Tensor, "window token channel"], goal: Float[Tensor, "window token channel"], energy: float | None
) -> Float[Tensor, "window token"]:
    """||out - goal||² of each token over its own ||goal||², or over `energy`, the mean of ||goal||² over tokens; float32.

    Their mean over tokens is what a fit minimises. With `energy` it is the plain regression that is published, which sink
    tokens rule where there are any: their norms are hundreds of times the others'.
    """
    goal = goal.float()
    whole = goal.square().sum(-1).clamp_min(1e-12) if energy is None else energy
    return (out.float() - goal).square().sum(-1) / whole


def goal_energy(goal: Goal, parts: Parts) -> float:
    """Mean of ||goal||² over the tokens of the fit."""
    sums = [float(goal([window]).float().square().sum(-1).mean(dtype=torch.float64)) for window in range(parts.fit)]
    return max(sum(sums) / len(sums), 1e-12)


def fit_block(
    decoder: Decoder,
    slot: int,
    start: Weights,
    source: Stream,
    goal: Goal,
    energy: float | None,
    parts: Parts,
    wanted: Yes,
    batch_tokens: int,
    seed: int,
) -> tuple[Weights, int]:
    """The weights with which block `slot` takes `source` nearest to `goal`, and the steps taken.

    They lie on the grid and have the dtypes of the checkpoint.

    Args:
        start: where the descent starts, float32.
        batch_tokens: of passes over the held-out windows; those of a step are `yes.batch_tokens`.
        seed: of the order of windows.
    """
    block, names = decoder.blocks[slot], list(start)
    matrices = gridded_matrices(decoder, wanted)[slot]
    leaves = [start[name].clone().requires_grad_() for name in names]
    order = batch_order(parts.fit, max(1, wanted.batch_tokens // source.length), wanted.steps, generator_of(seed, "order"))

    def kept(values: Sequence[Tensor]) -> Weights:
        """As they are stored: rounded first, so that the grid's scales are of the stored dtype and stay on it."""
        dtypes = (stored_dtype(decoder, f"{decoder.path}.{slot}.{name}") for name in names)
        rounded = {name: value.to(dtype) for name, value, dtype in zip(names, values, dtypes, strict=True)}
        return on_grid(rounded, matrices, wanted.grid, train=False)

    def errors(windows: Sequence[int], train: bool) -> Tensor:
        weights = on_grid(dict(zip(names, leaves, strict=True)), matrices, wanted.grid, True) if train else kept(leaves)
        with installed(block, cast(weights, decoder.dtype)):
            out = decoder.call(slot, rows(source, windows).to(decoder.device))
        return token_errors(out, goal(windows).to(decoder.device), energy)

    def loss(step: int) -> Tensor:
        with decoder.gradients():
            return errors(order[step], train=True).mean()

    @torch.no_grad()
    def heldout() -> float:
        held = range(parts.fit, parts.calibration)
        step = max(1, batch_tokens // source.length)
        sums = [float(errors(held[at : at + step], train=False).sum(dtype=torch.float64)) for at in range(0, len(held), step)]
        return sum(sums) / (len(held) * source.length)

    found = descend(
        leaves,
        loss,
        heldout,
        steps=wanted.steps,
        learning_rate=wanted.learning_rate,
        optimiser=wanted.optimiser,
        check=wanted.check,
        patience=wanted.patience,
        what=f"reference block {slot}",
    )
    with torch.no_grad():
        return kept(found.best), found.steps


def stored_dtype(decoder: Decoder, name: str) -> torch.dtype:
    """The dtype in which the checkpoint has a tensor of the model; float32 where that holds no plain numbers."""
    stored = decoder.stored.get(name, torch.float32)
    return stored if stored.is_floating_point and stored.itemsize > 1 else torch.float32
