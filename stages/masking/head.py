"""The logits' matrix, pruned after the blocks where `masking.head` asks for it; the allocation is of the blocks alone."""

from __future__ import annotations

from typing import Any

from pipeline.errors import PalimpsestError
from pipeline.tensors import TensorWriter
from stages.decoder.masks import HEAD
from stages.decoder.skeleton import Decoder
from stages.decoder.stream import Stream
from stages.masking import Masking
from stages.masking.budget import Budget
from stages.masking.file import check_weights, mask_row, write_mask
from stages.masking.inputs import collect_head
from stages.masking.methods import NEEDS_GRAMS, prune
from stages.masking.shares import OF_HEAD


def head_budget(decoder: Decoder, wanted: Masking) -> Budget | None:
    """What the head gives up; None if nothing was asked of it.

    Raises PalimpsestError naming the key if the head is the embedding too, or its inputs do not fit the pattern.
    """
    if not wanted.head:
        return None
    key = f"params.yaml: masking.head = {wanted.head:g}"
    if decoder.is_tied():
        raise PalimpsestError(f"{key}: this model's output head is its embedding too, which would change with it; allowed: 0")
    columns = decoder.head_weight.shape[1]
    if wanted.group and columns % wanted.group[1]:
        raise PalimpsestError(f"{key}: its {columns} inputs do not fit masking.pattern = {wanted.pattern!r}; allowed: 0")
    return Budget(wanted.head, wanted.group, wanted.compared, wanted.rounding == "exact")


def mask_head(
    source: Decoder,
    decoder: Decoder,
    stream: Stream | None,
    budget: Budget,
    wanted: Masking,
    batch_tokens: int,
    file: TensorWriter,
) -> dict[str, Any]:
    """Prune the head of `source`, the model as stored, by what leaves `decoder`'s last block; write its mask, return its row.

    Args:
        stream: leaves the last block; None for methods that need no inputs.
        file: has a place for it.
    """
    seen = None if stream is None else collect_head(decoder, stream, batch_tokens, wanted.method in NEEDS_GRAMS)
    with source.trunk(head=True):
        weight = source.head_weight
        check_weights(weight, "the output head")
        method, (one,) = prune(wanted, [weight], seen, [budget], stream.windows if stream else 0, "the output head")
        row = mask_row(*OF_HEAD, weight, one, seen, method)
        write_mask(file, HEAD, weight, one)
    return row
