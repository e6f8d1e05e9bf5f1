"""The rise in loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from stages.decoder.divergence import LOGIT_BYTES
from stages.decoder.skeleton import Decoder


def loss_rise(
    decoder: Decoder,
    dense: Float[Tensor, "prompt token channel"],
    others: Sequence[Tensor],
    ids: Int[Tensor, "prompt token"],
) -> Float[Tensor, "other prompt"]:
    """Mean loss per predicted token of each other stream less that of the dense one, nats, float64.

    `dense` and `others` are streams that leave the last block; `ids` the prompts they belong to. Needs
    `decoder.trunk(head=True)`.
    """
    losses = torch.stack([_mean_losses(decoder, stream, ids) for stream in (dense, *others)])
    return losses[1:] - losses[0]


def _mean_losses(decoder: Decoder, stream: Tensor, ids: Tensor) -> Float[Tensor, " prompt"]:
    step = max(1, LOGIT_BYTES // (decoder.checkpoint.config.get_text_config().vocab_size * 4))
    predicted = ids.shape[1] - 1
    sums = torch.zeros(len(ids), dtype=torch.float64)
    for prompt in range(len(ids)):
        targets = ids[prompt, 1:].long().to(decoder.device)
        for start in range(0, predicted, step):
            part = slice(start, min(start + step, predicted))
            logits = decoder.logits(stream[prompt : prompt + 1, part].to(decoder.device))[0].float()
            sums[prompt] += float(nn.functional.cross_entropy(logits, targets[part], reduction="none").sum(dtype=torch.float64))
    return sums / predicted
