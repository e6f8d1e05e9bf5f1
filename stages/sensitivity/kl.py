"""How far the predictions move, whatever the text says next."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor


def kl_divergence(
    dense: Float[Tensor, "token vocabulary"], pruned: Float[Tensor, "token vocabulary"], targets: Int[Tensor, " token"]
) -> Float[Tensor, " token"]:
    """KL(dense ‖ pruned) of each token's prediction, nats. `targets` is not used."""
    log_dense, log_pruned = dense.float().log_softmax(-1), pruned.float().log_softmax(-1)
    return (log_dense.exp() * (log_dense - log_pruned)).sum(-1)
