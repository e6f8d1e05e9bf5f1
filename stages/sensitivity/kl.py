"""How far the predictions move, whatever the text says next."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float, Int
from torch import Tensor

from stages.decoder.divergence import output_divergence
from stages.decoder.skeleton import Decoder


def kl_divergence(
    decoder: Decoder,
    dense: Float[Tensor, "prompt token channel"],
    others: Sequence[Tensor],
    ids: Int[Tensor, "prompt token"],
) -> Float[Tensor, "other prompt"]:
    """KL(dense || other) of the next-token distributions, nats, the mean over all positions of each prompt. `ids` is not used."""
    return output_divergence(decoder, dense, others)
