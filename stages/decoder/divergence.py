"""How far the next-token distribution of a variant is from the dense model's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from stages.decoder.skeleton import Decoder

LOGIT_BYTES = 1 << 24  # float32 logits of as many positions at a time as fit in this: larger ones only cost page faults


def divergence(
    p: Float[Tensor, "... position vocabulary"],
    log_p: Float[Tensor, "... position vocabulary"],
    logits: Float[Tensor, "... position vocabulary"],
) -> Float[Tensor, "... position"]:
    """KL(p || q) in nats at each position, q = softmax(logits), in float32.

    Args:
        p, log_p: probabilities of the base and their logarithms, float32.
        logits: of the other, not normalised.
    """
    difference = log_p - torch.log_softmax(logits.float(), -1)
    return torch.linalg.vecdot(p, difference).clamp_min(0)  # below zero by rounding alone


def output_divergence(
    decoder: Decoder, dense: Float[Tensor, "prompt token channel"], others: Sequence[Tensor], positions: str = "all"
) -> Float[Tensor, "other prompt"]:
    """KL(dense || other) in nats per prompt, float64: the mean over its positions ("all"), or its last one ("last").

    `dense` and `others` are streams that leave the last block. Needs `decoder.trunk(head=True)`. Memory is that of the
    logits of a chunk of positions, so of `LOGIT_BYTES` whatever the prompts, the variants and the vocabulary.
    """
    last = positions == "last"
    if last:
        dense, others = dense[:, -1:], [other[:, -1:] for other in others]
    count, length, _ = dense.shape
    fits = max(1, LOGIT_BYTES // (decoder.checkpoint.config.get_text_config().vocab_size * 4))
    tokens = min(length, fits)
    rows = max(1, fits // tokens)
    total = torch.zeros(len(others), count, dtype=torch.float64)
    for first in range(0, count, rows):
        for start in range(0, length, tokens):
            part = slice(first, first + rows), slice(start, start + tokens)
            log_p = torch.log_softmax(decoder.logits(dense[part].to(decoder.device)).float(), -1)
            p = log_p.exp()
            for index, other in enumerate(others):
                kl = divergence(p, log_p, decoder.logits(other[part].to(decoder.device)))
                total[index, part[0]] += kl.sum(-1, dtype=torch.float64).cpu()
    return total / length
