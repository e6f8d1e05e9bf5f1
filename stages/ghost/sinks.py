"""Sink tokens: found by their norm on the tape, at any position, and described by a rule that works when the model runs."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from stages.decoder.operators import Sinks
from stages.decoder.tape import Tape

LEAST = 2  # a token id has to be a sink this often to make a rule
NEARLY_ALL = 0.9  # and in this share of the places where it stands, as the first position has to be in this share of windows


def token_norms(tape: Tape, boundary: int, batch_tokens: int, first: int = 0) -> Float[Tensor, "window token"]:
    """Norm of every token of the windows from `first` on, float32: four bytes a token, as the token ids themselves."""
    return torch.cat([tape.read(boundary, *span).float().norm(dim=-1) for span in tape.batches(batch_tokens, first)])


def find_sinks(norms: Float[Tensor, "window token"], threshold: float) -> Bool[Tensor, "window token"]:
    """Tokens whose norm is above `threshold` times the median of all."""
    return norms > threshold * norms.median()


def sink_rule(sinks: Bool[Tensor, "window token"], ids: Int[Tensor, "window token"], action: str) -> Sinks:
    """The rule for the run: the first position if it nearly always is a sink, and token ids that nearly always are elsewhere.

    Every token that a rule tells is treated as a sink when the model runs, so a rule that tells others too would spoil those.
    Sinks that no rule tells beforehand are kept out of the fit all the same.
    """
    first = int(sinks[:, 0].sum()) >= NEARLY_ALL * len(sinks)
    elsewhere = sinks.clone()
    if first:
        elsewhere[:, 0] = False
    found = []
    for one in ids[elsewhere].unique().tolist():
        here = ids == one
        here[:, 0] &= not first
        if int(elsewhere[here].sum()) >= max(LEAST, NEARLY_ALL * int(here.sum())):
            found.append(int(one))
    return Sinks(action, first, tuple(found))
