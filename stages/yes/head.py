"""A light head on final streams: the model's own final norm and output matrix, refitted by cross-entropy; and losses under it.

Logits over a vocabulary cost more than a block, so each step sees a sample of positions. The sample depends on seed and step
alone: all nets are fitted on the same one, which leaves less chance in their differences.

Heads are fitted one after another: nothing but the sample is common to them, and stacked into one batched product three of them
took 1.75 times the time of three apart (12,288 tokens, width 576, bfloat16 on a CPU; `python -m tests.bench.yes` measures it) and
three times the memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pipeline.errors import PalimpsestError
from stages.decoder.skeleton import Decoder
from stages.decoder.stream import Stream
from stages.yes import Yes
from stages.yes.block import Weights, cast, installed
from stages.yes.descent import descend
from stages.yes.fitting import stored_dtype
from stages.yes.parts import Parts, generator_of, rows

LOGIT_BYTES = 1 << 27  # logits of as many tokens at a time as fit in this
WINDOWS = 8  # that the positions of one step are taken from
HELD_OUT = 4  # times the positions of a step, which the held-out loss is taken over


def own_head(decoder: Decoder, kind: str) -> Weights:
    """Copies, float32, of all tensors behind the last block that logits depend on; with kind "norm" without the output matrix.

    A tied matrix is there as the head's own. Needs `decoder.trunk(head=True)`.
    """
    inside = set(decoder.blocks.modules())
    inputs, output = decoder.model.get_input_embeddings(), decoder.model.get_output_embeddings()
    places = [
        (f"{path}.{name}" if path else name, module, name, parameter)
        for path, module in decoder.model.named_modules()
        if module not in inside and module is not inputs and not (kind == "norm" and module is output)
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    leaves = [parameter.detach().float().clone().requires_grad_() for *_, parameter in places]
    copies = {place: leaf for (place, *_), leaf in zip(places, leaves, strict=True)}
    with decoder.gradients(), installed(decoder.model, cast(copies, decoder.dtype)):
        out = decoder.logits(torch.ones(1, 1, decoder.width, dtype=decoder.dtype, device=decoder.device))
        reached = torch.autograd.grad(out.float().sum(), leaves, allow_unused=True)
    return {name: copies[name].detach() for name, gradient in zip(copies, reached, strict=True) if gradient is not None}


def fit_head(decoder: Decoder, start: Weights, final: Stream, ids: Tensor, parts: Parts, wanted: Yes) -> tuple[Weights, int]:
    """The head refitted to a net's final stream, in the dtypes of the checkpoint, and the steps taken.

    Args:
        ids: [window, token], of all windows. Needs `decoder.trunk(head=True)`.
    """
    names, leaves = list(start), [value.clone().requires_grad_() for value in start.values()]
    many = min(WINDOWS, parts.fit)
    each = max(1, min(wanted.head_positions // many, final.length - 1))

    def now() -> Weights:
        return cast(dict(zip(names, leaves, strict=True)), decoder.dtype)

    def cross_entropy(head: Weights, windows: Sequence[int], positions: Tensor) -> Tensor:
        hidden = rows(final, windows).gather(1, positions[..., None].expand(-1, -1, decoder.width)).to(decoder.device)
        behind = ids[list(windows)].long().gather(1, positions + 1).to(decoder.device)
        with installed(decoder.model, head):
            logits = decoder.logits(hidden)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), behind.flatten())

    def loss(step: int) -> Tensor:
        generator = generator_of(wanted.seed, "positions", step)
        windows = torch.randperm(parts.fit, generator=generator)[:many].tolist()
        positions = torch.randint(0, final.length - 1, (many, each), generator=generator)
        with decoder.gradients():
            return cross_entropy(now(), windows, positions)

    held = range(parts.fit, parts.calibration)
    spread = max(1, min(HELD_OUT * wanted.head_positions // len(held), final.length - 1))
    places = torch.linspace(0, final.length - 2, spread).round().long()[None]

    @torch.no_grad()
    def heldout() -> float:
        head = now()
        return sum(float(cross_entropy(head, [window], places)) for window in held) / len(held)

    found = descend(
        leaves,
        loss,
        heldout,
        steps=wanted.head_steps,
        learning_rate=wanted.head_learning_rate,
        optimiser=wanted.optimiser,
        check=wanted.check,
        patience=wanted.patience,
        what="head of a reference",
    )
    return {name: value.to(_dtype(decoder, name)) for name, value in zip(names, found.best, strict=True)}, found.steps


@torch.inference_mode()
def window_losses(
    decoder: Decoder, head: Weights, final: Stream, ids: Tensor, windows: Sequence[int], what: str
) -> NDArray[np.float64]:
    """Mean loss in nats of each window over its length - 1 predicted tokens. Needs `decoder.trunk(head=True)`.

    Args:
        head: what stands for the model's own tensors of these names; empty for the model's own head.

    Raises PalimpsestError naming `what` if a loss is not finite.
    """
    vocabulary = decoder.checkpoint.config.get_text_config().vocab_size
    step = max(1, LOGIT_BYTES // (vocabulary * 4))
    on_device = {name: value.to(decoder.device) for name, value in cast(head, decoder.dtype).items()}
    losses = []
    with installed(decoder.model, on_device):
        for window in windows:
            hidden = final.read(window, window + 1).to(decoder.device)[:, :-1]
            targets = ids[window, 1:].long().to(decoder.device)
            parts = [
                nn.functional.cross_entropy(
                    decoder.logits(hidden[:, at : at + step])[0].float(), targets[at : at + step], reduction="sum"
                ).double()
                for at in range(0, len(targets), step)
            ]
            losses.append(float(torch.stack(parts).sum()) / len(targets))
    if not np.isfinite(losses).all():
        raise PalimpsestError(f"{what}: a loss that is not finite; lower yes.head_learning_rate, or try compute.dtype: float32")
    return np.array(losses)


def _dtype(decoder: Decoder, name: str) -> torch.dtype:
    """Of a tensor of the head as it is kept; a tied output matrix has the dtype of the embedding it leaves."""
    if name in decoder.stored:
        return stored_dtype(decoder, name)
    inputs = decoder.model.get_input_embeddings()
    (path,) = [path for path, module in decoder.model.named_modules() if module is inputs]
    return stored_dtype(decoder, f"{path}.weight")
