"""The logits' matrix, pruned after the blocks where `masking.head` asks for it; the allocation is of the blocks alone."""

from __future__ import annotations

from pipeline.console import say
from pipeline.errors import PalimpsestError
from pipeline.tensors import TensorWriter
from stages.decoder.masks import HEAD
from stages.decoder.skeleton import Decoder
from stages.decoder.stream import Stream
from stages.masking import Masking
from stages.masking.budget import Budget, kept_share
from stages.masking.file import check_weights, write_mask
from stages.masking.inputs import collect_head
from stages.masking.methods import NEEDS_GRAMS, prune


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
) -> None:
    """Prune the head of `source`, the model as stored, by what leaves the last block of `decoder`, and write its mask.

    Args:
        stream: leaves the last block; None for methods that need no inputs.
        file: has a place for it.
    """
    seen = None if stream is None else collect_head(decoder, stream, batch_tokens, wanted.method in NEEDS_GRAMS)
    with source.trunk(head=True):
        weight = source.head_weight
        check_weights(weight, "the output head")
        before = weight.float().abs()
        _, (one,) = prune(wanted, [weight], seen, [budget], stream.windows if stream else 0, "the output head")
        magnitude = kept_share(before, one.keep)
        write_mask(file, HEAD, weight, one)
    gone = 1 - int(one.keep.sum()) / one.keep.numel()
    say(
        f"the output head: {gone:.6f} of {one.keep.numel():,} weights masked, target {budget.share:.6f}; "
        f"{magnitude:.1%} of its magnitude stays"
    )
