"""What stands beside the references, so that a gain is not taken for more than it is.

The model's own last stream with its head refitted is made like any reference's head, in `run`. Here: targets of other
windows, which nothing about a window's own text can explain; and the compute of one chain spent on training the model on.
"""

from __future__ import annotations

import math
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from stages.decoder.skeleton import Decoder
from stages.decoder.stream import Stream
from stages.yes import Yes
from stages.yes.block import Weights, cast, gridded_matrices, installed, on_grid
from stages.yes.descent import descend
from stages.yes.parts import Parts, batch_order, generator_of


def derangement(parts: Parts, seed: int) -> list[int]:
    """For each calibration window another one of the same part (itself where its part has no other), to take targets from."""
    moved = [0] * parts.calibration
    for first, count in ((0, parts.fit), (parts.fit, parts.held_out)):
        order = (first + torch.randperm(count, generator=generator_of(seed, "shuffled", first))).tolist()
        for window, other in zip(order, order[1:] + order[:1], strict=True):  # one cycle through all of them: none stays
            moved[window] = other
    return moved


def same_compute(wanted: Yes, blocks: int, head: int) -> int:
    """Steps of the whole model that take at least the compute of a chain's blocks and of its head.

    Both go as weights times tokens: the head's steps on `yes.head_positions` each become steps of the model, which has
    `blocks` weights in its blocks and `head` in its head, on `yes.batch_tokens`.
    """
    spent = wanted.head_steps * wanted.head_positions * head
    return wanted.steps + math.ceil(spent / (wanted.batch_tokens * (blocks + head)))


def train_on(
    decoder: Decoder, ids: Tensor, parts: Parts, wanted: Yes, head: list[str], final: Stream, batch_tokens: int
) -> tuple[Weights, int]:
    """Train the whole model on by cross-entropy, with the compute of one chain and its head; fill `final` with its last stream.

    A step of each block of a chain, on as many tokens, is one step of the model's blocks: `yes.steps` of these, and as many
    more as `same_compute` says for the head. All tokens of a batch count here, so the model's head gets more compute than a
    reference's even so. It holds the whole model and its optimiser's state. Returns the tensors `head`, for losses of `final`,
    in the dtype of forward passes, and the steps taken.
    """
    with ExitStack() as loaded:
        for index in range(len(decoder)):
            loaded.enter_context(decoder.block(index))
        loaded.enter_context(decoder.trunk(head=True))
        places = {name: id(p) for name, p in decoder.model.named_parameters(remove_duplicate=False)}  # tied: one id, two names
        leaves = {id(p): p.detach().float().clone().requires_grad_() for p in decoder.model.parameters()}
        grids = gridded_matrices(decoder, wanted)

        def weights(values: dict[int, Tensor], train: bool) -> Weights:
            made = {name: values[place] for name, place in places.items()}
            for index, matrices in enumerate(grids):
                prefix = f"{decoder.path}.{index}."
                own = {name.removeprefix(prefix): value for name, value in made.items() if name.startswith(prefix)}
                put = on_grid(own, matrices, wanted.grid, train)
                made |= {prefix + name: value for name, value in put.items()}
            return cast(made, decoder.dtype)

        def cross_entropy(windows: list[int], train: bool) -> Tensor:
            some = ids[windows].long().to(decoder.device)
            with installed(decoder.model, weights(leaves, train)):
                logits = decoder.model(input_ids=some, use_cache=False).logits
            return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), some[:, 1:].flatten())

        @torch.no_grad()
        def heldout() -> float:
            held = range(parts.fit, parts.calibration)
            return sum(float(cross_entropy([window], train=False)) for window in held) / len(held)

        many = max(1, wanted.batch_tokens // ids.shape[1])
        around = sum(leaves[places[name]].numel() for name in head)
        blocks = sum(leaves[place].numel() for name, place in places.items() if name.startswith(decoder.path + "."))
        steps = same_compute(wanted, blocks, around)
        order = batch_order(parts.fit, many, steps, generator_of(wanted.seed, "continued"))
        found = descend(
            list(leaves.values()),
            lambda step: cross_entropy(order[step], train=True),
            heldout,
            steps=steps,
            learning_rate=wanted.continued_learning_rate or wanted.learning_rate,
            optimiser=wanted.optimiser,
            check=wanted.check,
            patience=wanted.patience,
            what="the model trained on",
        )
        with torch.no_grad():
            best = weights(dict(zip(leaves, found.best, strict=True)), train=False)
        with installed(decoder.model, best):
            _push_through(decoder, ids, parts, final, batch_tokens)
        return {name: best[name].clone() for name in head}, found.steps


@torch.inference_mode()
def _push_through(decoder: Decoder, ids: Tensor, parts: Parts, final: Stream, batch_tokens: int) -> None:
    """Fill `final` with what leaves the last block of the loaded model."""
    for start, stop in parts.batches(ids.shape[1], batch_tokens):
        hidden = decoder.embed(ids[start:stop].long())
        for index in range(len(decoder)):
            hidden = decoder.call(index, hidden)
        final.write(start, hidden)
