"""Per-token cosine between boundaries: ShortGPT's block influence (arXiv 2403.03853), Streamline's window (arXiv 2403.19135)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn


def token_cosines(stream: Float[Tensor, "boundary token channel"]) -> Float[Tensor, "token boundary boundary"]:
    """Cosine of one token's vectors at each pair of boundaries.

    The mean over tokens of entry (l, l + n) is Streamline's similarity of the window of n blocks from l on; one minus it,
    with n = 1, is ShortGPT's block influence. A zero vector has cosine 0 with everything.
    """
    unit = nn.functional.normalize(stream.float(), dim=-1, eps=1e-12).transpose(0, 1)
    return (unit @ unit.transpose(1, 2)).clamp(-1, 1)
