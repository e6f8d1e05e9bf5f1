"""Cosines between boundaries, along the channels of a token or along the tokens of a channel.

Per token: ShortGPT's block influence (arXiv 2403.03853), LLM-Streamline's window (arXiv 2403.19135). Per channel: what
LinearPatch's and Ghosted Layers' published code computes in its place (arXiv 2605.15491, repository).
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn


def token_cosines(stream: Float[Tensor, "boundary token channel"]) -> Float[Tensor, "token boundary boundary"]:
    """Cosine of one token's vectors at each pair of boundaries.

    The mean over tokens of entry (l, l + n) is Streamline's similarity of the window of n blocks from l on; one minus it,
    with n = 1, is ShortGPT's block influence. A zero vector has cosine 0 with everything.
    """
    unit = nn.functional.normalize(stream.float(), dim=-1, eps=1e-12).transpose(0, 1)
    return (unit @ unit.transpose(1, 2)).clamp(-1, 1)


def channel_cosines(stream: Float[Tensor, "boundary token channel"]) -> Float[Tensor, "channel boundary boundary"]:
    """Cosine of one channel's values over the tokens of a window, at each pair of boundaries."""
    return token_cosines(stream.transpose(1, 2))


def sink_tokens(stream: Float[Tensor, "boundary token channel"], threshold: float) -> Bool[Tensor, "boundary token"]:
    """Where a token's norm is above `threshold` times the median over the window's tokens at that boundary."""
    norms = stream.float().norm(dim=-1)
    return norms > threshold * norms.median(dim=1, keepdim=True).values


def sink_blocks(
    peaks: Float[Tensor, " boundary"], sinks: Bool[Tensor, " boundary"], threshold: float
) -> tuple[int | None, int | None]:
    """The block that makes the sink and the one that ends it: of the blocks behind which there are sink tokens, the one where
    the largest |channel| of all tokens grows most; and where behind that it falls most.

    None where it does not by a factor of at least the square root of `threshold`.

    Args:
        peaks: the largest |channel| at each boundary.
        sinks: whether any token is a sink there: a peak that all tokens share makes none.
    """
    steps = torch.log(peaks[1:].double().clamp_min(1e-30)) - torch.log(peaks[:-1].double().clamp_min(1e-30))
    least = 0.5 * float(torch.log(torch.tensor(threshold, dtype=torch.float64)))
    grows = steps.masked_fill(~sinks[1:], -torch.inf)
    makes = int(grows.argmax())
    if float(grows[makes]) < least:
        return None, None
    ends = makes + int(steps[makes:].argmin())
    return makes, (ends if float(steps[ends]) <= -least else None)
