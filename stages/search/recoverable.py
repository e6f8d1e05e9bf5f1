"""A ghost for each window of blocks that may go, fitted from the tape: the window itself is chosen by the output it gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from stages.decoder.gram import Grams, add_tokens, empty_grams, relative_errors, solve_ridge
from stages.decoder.tape import Tape

MOSTLY = 0.5  # the first position is restored where it is a sink in this share of the windows


@dataclass(frozen=True)
class Recovery:
    """An operator in place of a window of blocks, and how well it fits the tokens that are no sinks."""

    m: Float[Tensor, "channel channel"]  # float32; x + x M
    first: Float[Tensor, " channel"] | None  # what the first position becomes, where it is a sink
    ridge: float
    error: float  # ||X M - D|| / ||D||
    cosine: float  # mean per token, between x + x M and its target

    def apply(self, hidden: Float[Tensor, "prompt token channel"]) -> Float[Tensor, "prompt token channel"]:
        """What enters the block behind the window."""
        x = hidden.float()
        out = x + x @ self.m.to(x.device)
        if self.first is not None:
            out[:, 0] = self.first.to(x.device)
        return out.to(hidden.dtype)


def recover(
    tape: Tape, start: int, stop: int, first_window: int, ridge: float, threshold: float, batch_tokens: int, device: str
) -> Recovery:
    """Fit the step from boundary `start` to `stop` on the windows from `first_window` on, sinks left out.

    A sink is a token whose norm at either boundary is above `threshold` times the median of its window. The first position
    becomes its mean target where it mostly is one: left to the fit, that one token would rule it.
    Raises SingularGram naming the window of blocks.
    """
    grams, firsts, sinks = empty_grams(tape.width, 1, device), [], []
    for span in tape.batches(batch_tokens, first_window):
        x, y, rest = _read(tape, start, stop, span, threshold, device)
        add_tokens(grams, x[rest], [y[rest]], torch.float64)
        firsts.append(y[:, 0].double())
        sinks.append(~rest[:, 0])
    fit = solve_ridge(grams, ridge, f"recoverable window of blocks {start} to {stop - 1}")
    restored = float(torch.cat(sinks).double().mean()) >= MOSTLY
    first = torch.cat(firsts).mean(0).float() if restored else None
    cosine = _cosine(tape, start, stop, first_window, fit.m[0], threshold, batch_tokens, device)
    return Recovery(fit.m[0].float(), first, fit.ridge, _error(grams, fit.m), cosine)


def _error(grams: Grams, m: Tensor) -> float:
    return relative_errors(grams, m)[0]


def _cosine(tape: Tape, start: int, stop: int, first: int, m: Tensor, threshold: float, batch_tokens: int, device: str) -> float:
    total, count = 0.0, 0
    for span in tape.batches(batch_tokens, first):
        x, y, rest = _read(tape, start, stop, span, threshold, device)
        there = x[rest].float()
        alike = nn.functional.cosine_similarity(there + there @ m.float(), y[rest].float(), dim=-1)
        total, count = total + float(alike.sum(dtype=torch.float64)), count + len(alike)
    return total / max(1, count)


def _read(
    tape: Tape, start: int, stop: int, span: tuple[int, int], threshold: float, device: str
) -> tuple[Tensor, Tensor, Bool[Tensor, "window token"]]:
    """Streams [window, token, channel] at both boundaries, and which tokens are no sinks."""
    x, y = (tape.read(boundary, *span).to(device) for boundary in (start, stop))
    rest = torch.ones(x.shape[:2], dtype=torch.bool, device=device)
    for one in (x, y):
        norms = one.float().norm(dim=-1)
        rest &= norms <= threshold * norms.median(dim=1, keepdim=True).values
    return x, y, rest
