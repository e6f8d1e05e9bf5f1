"""The loss of each predicted token."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn


def token_losses(logits: Float[Tensor, "token vocabulary"], targets: Int[Tensor, " token"]) -> Float[Tensor, " token"]:
    """Negative log-likelihood of each target in nats, from a float32 log-softmax."""
    return nn.functional.cross_entropy(logits.float(), targets, reduction="none")
