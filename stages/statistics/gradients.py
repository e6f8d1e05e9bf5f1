"""The gradient of the calibration loss in each weight, streamed block by block from the tape.

The gradient at the last boundary comes from the head; from there each block's backward pass needs the stream that entered
it, which is on the tape, and the gradient at its output. So one block and its gradients are in memory at a time, and the
gradient of the stream lies in a scratch file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from pipeline.console import progress
from stages.decoder.matrices import Matrix, prunable_matrices, watch
from stages.decoder.skeleton import Decoder
from stages.decoder.stream import Stream, finite_or_stop
from stages.decoder.tape import Tape

LOGIT_BYTES = 1 << 27  # logits of as many tokens at a time as fit in this

Means = dict[tuple[int, str], dict[str, float]]


def gradient_means(decoder: Decoder, tape: Tape, ids: Tensor, batch_tokens: int, scratch: Path) -> Means:
    """(block, matrix) -> mean |∂L/∂W| and mean |W · ∂L/∂W|; under the name "" over all prunable weights of the block.

    An expert that no token of the windows was routed to is not there: no gradient is not a gradient of zero.
    L is the mean loss per predicted token over the windows `ids` [window, token], the first ones of the tape.

    Args:
        scratch: folder of the scratch file.
    """
    means: Means = {}
    scored = len(ids) * (ids.shape[1] - 1)
    ranges = list(tape.batches(batch_tokens, 0, len(ids)))
    for start, stop in ranges:  # asked now, since asking loads weights, which sets what needs a gradient
        decoder.calls(stop - start, tape.length)
    with Stream(scratch, (*ids.shape, decoder.width), torch.float32) as stream, decoder.gradients():
        _from_the_head(decoder, tape, ids, stream)
        for index in progress(reversed(range(len(decoder))), "gradients of block", len(decoder)):
            with decoder.block(index) as block:
                matrices = prunable_matrices(block)
                reached: set[str] = set()
                with watch(block, matrices, lambda name, _: reached.add(name)):  # noqa: B023 (used within the turn)
                    found = _through_block(decoder, tape, index, matrices, stream, ranges)
                each = _means(block, matrices, found, scored)
                means |= {(index, name): one for name, one in each.items() if not name or name in reached or one["gradient"] > 0}
    return means


def _from_the_head(decoder: Decoder, tape: Tape, ids: Tensor, stream: Stream) -> None:
    """Write the gradient at the last boundary of the summed loss: that of its mean might be too small for half precision."""
    step = max(1, LOGIT_BYTES // (decoder.checkpoint.config.get_text_config().vocab_size * 4))
    with decoder.trunk(head=True):
        for window in range(len(ids)):
            hidden = tape.read(tape.boundaries - 1, window, window + 1).to(decoder.device)
            gradient = torch.zeros(hidden.shape)
            targets = ids[window, 1:].long().to(decoder.device)
            for start in range(0, len(targets), step):
                some = hidden[:, start : min(start + step, len(targets))].detach().requires_grad_()
                logits = decoder.logits(some)[0].float()
                loss = nn.functional.cross_entropy(logits, targets[start : start + step], reduction="sum")
                gradient[:, start : start + some.shape[1]] = torch.autograd.grad(loss, some)[0].cpu()
            stream.write(window, gradient)


def _through_block(
    decoder: Decoder, tape: Tape, index: int, matrices: Sequence[Matrix], stream: Stream, ranges: Sequence[tuple[int, int]]
) -> dict[nn.Parameter, Tensor]:
    """Turn the gradient at the output of the loaded block into that at its input; return that in its parameters, float32."""
    parameters = list(dict.fromkeys(matrix.stored(decoder.blocks[index]) for matrix in matrices))
    sums = {one: torch.zeros_like(one, dtype=torch.float32) for one in parameters}
    for one in parameters:
        one.requires_grad_()
    for start, stop in ranges:
        hidden = tape.read(index, start, stop).to(decoder.device).requires_grad_()
        out = decoder.call(index, hidden)
        above = stream.read(start, stop).to(out)
        below, *found = torch.autograd.grad(out, [hidden, *parameters], above, allow_unused=True)
        finite_or_stop(below, f"gradient at the input of block {index}", start)
        stream.write(start, below)
        for one, gradient in zip(parameters, found, strict=True):
            if gradient is not None:  # None: a batch that reached no expert
                sums[one] += gradient
    return {one: total.requires_grad_(False) for one, total in sums.items()}


@torch.no_grad()
def _means(
    block: nn.Module, matrices: Sequence[Matrix], found: dict[nn.Parameter, Tensor], scored: int
) -> dict[str, dict[str, float]]:
    sums = torch.zeros(2, dtype=torch.float64)
    means, size = {}, 0
    for matrix in matrices:
        gradient = matrix.take(found[matrix.stored(block)])
        both = (gradient, gradient * matrix.view(block).float())
        own = torch.stack([one.abs().sum(dtype=torch.float64).cpu() / scored for one in both])
        means[matrix.name] = _named(own / gradient.numel())
        sums += own
        size += gradient.numel()
    return {"": _named(sums / size), **means}


def _named(means: Tensor) -> dict[str, float]:
    return {"gradient": float(means[0]), "weighted_gradient": float(means[1])}
