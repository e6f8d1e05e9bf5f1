"""Which windows are what, in every stream: those of the fits, those held out of them, and the evaluation windows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.decoder.skeleton import Decoder
from stages.decoder.stream import Stream

SHORT = 256  # tokens: beyond, the plain form's memory, which grows with their square, is not worth it


@dataclass(frozen=True)
class Parts:
    """Numbers of windows. The first `fit` and the `held_out` behind them are windows of the tape."""

    fit: int
    held_out: int
    evaluation: int

    @property
    def calibration(self) -> int:
        """Windows of the tape."""
        return self.fit + self.held_out

    @property
    def total(self) -> int:
        """All windows of a stream."""
        return self.calibration + self.evaluation

    def train(self, scored: int | None) -> list[int]:
        """So many windows of the fit, evenly spread; None: all."""
        count = min(scored or self.fit, self.fit)
        return [place * self.fit // count for place in range(count)]

    def test(self, which: str) -> range:
        """The windows of `yes.test`."""
        first = self.calibration if which == "evaluation" else self.fit
        return range(first, self.calibration if which == "held_out" else self.total)

    def batches(self, length: int, batch_tokens: int) -> Iterator[tuple[int, int]]:
        """Ranges of windows of at most so many tokens (but at least one window), none of which holds windows of two kinds."""
        step, first = max(1, batch_tokens // length), 0
        for count in (self.fit, self.held_out, self.evaluation):
            for start in range(first, first + count, step):
                yield start, min(start + step, first + count)
            first += count


def rows(stream: Stream, windows: Sequence[int]) -> Tensor:
    """Any windows of a stream, [window, token, channel]."""
    return torch.cat([stream.read(one, one + 1) for one in windows])


def seed_of(seed: int, *what: object) -> int:
    """A seed for one purpose: equal for equal arguments, whatever else is drawn, so that an order of work changes nothing."""
    text = "/".join(map(str, (seed, *what)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def generator_of(seed: int, *what: object) -> torch.Generator:
    """A generator on the CPU with the seed for one purpose."""
    return torch.Generator().manual_seed(seed_of(seed, *what))


def batch_order(windows: int, batch: int, steps: int, generator: torch.Generator) -> list[list[int]]:
    """The windows of every step: passes over all of them, each in an order of its own, cut into batches."""
    batch = min(batch, windows)
    drawn: list[int] = []
    while len(drawn) < batch * steps:
        drawn += torch.randperm(windows, generator=generator).tolist()
    return [drawn[step * batch : (step + 1) * batch] for step in range(steps)]


def ask_calls(decoder: Decoder, parts: Parts, length: int, *batch_tokens: int) -> None:
    """Have the decoder learn how blocks are called for all batches there will be: later it would disturb a fit.

    On a CPU, short windows get the plain form of attention, whose backward pass takes half the time there.
    """
    if decoder.device == "cpu" and length <= SHORT and hasattr(decoder.model, "set_attn_implementation"):
        decoder.model.set_attn_implementation("eager")
    counts = {stop - start for tokens in batch_tokens for start, stop in parts.batches(length, tokens)}
    for count in sorted(counts | {1}):
        decoder.calls(count, length)
