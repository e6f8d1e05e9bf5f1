"""The rise in the loss of each token."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor, nn


def loss_rise(
    dense: Float[Tensor, "token vocabulary"], pruned: Float[Tensor, "token vocabulary"], targets: Int[Tensor, " token"]
) -> Float[Tensor, " token"]:
    """Negative log-likelihood of each target by the pruned logits less that by the dense ones, nats."""
    losses = [nn.functional.cross_entropy(logits.float(), targets, reduction="none") for logits in (pruned, dense)]
    return losses[0] - losses[1]
