"""What the matrices of one block are multiplied with, added up over the calibration tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from stages.decoder.masks import HEAD
from stages.decoder.matrices import Matrix, Shared, watch
from stages.decoder.skeleton import Decoder
from stages.decoder.stream import Stream, finite_or_stop, read_batches

TILE = 512  # columns of a Gram that are one product; tiles above the diagonal mirror those below it


@dataclass
class Inputs:
    """Sums over the tokens that reached a matrix."""

    tokens: int
    squares: Float[Tensor, " in"]  # of x², float64
    gram: Float[Tensor, "in in"] | None = None  # XᵀX, float64, where asked for


class Collector:
    """Adds up the inputs of a block's matrices; those that are fed the same tensor share one sum."""

    def __init__(self, grams: bool):
        self._grams = grams
        self._sums: dict[str, Inputs] = {}
        self._shared = Shared()

    def see(self, name: str, x: Tensor) -> None:
        """Add x [..., in], the input of matrix `name`."""
        if not self._shared.is_first(name, x):
            return
        flat = x.reshape(-1, x.shape[-1]).float()
        if name not in self._sums:
            zeros = lambda *shape: torch.zeros(*shape, dtype=torch.float64, device=x.device)  # noqa: E731
            with torch.inference_mode(False):  # the passes run in that mode, the work on their sums outside of it
                self._sums[name] = Inputs(0, zeros(flat.shape[1]), zeros(flat.shape[1], flat.shape[1]) if self._grams else None)
        sums = self._sums[name]
        sums.tokens += len(flat)
        if sums.gram is not None:
            add_gram(sums.gram, flat)
        else:
            sums.squares += flat.square().sum(0)  # a batch in float32, the batches in float64

    def take(self, matrices: Iterable[Matrix]) -> list[tuple[list[Matrix], Inputs | None]]:
        """Matrices with the sums they share, None for those that no token reached; each is handed out, not kept."""
        groups: dict[str, list[Matrix]] = {}
        for matrix in matrices:
            groups.setdefault(self._shared.owner.get(matrix.name, matrix.name), []).append(matrix)
        self._shared.let_go()
        result = []
        for owner, members in groups.items():
            result.append((members, self.sums(owner) if owner in self._sums else None))
        return result

    def sums(self, name: str) -> Inputs:
        """What was seen under `name`, which is handed out, not kept."""
        sums = self._sums.pop(name)
        if sums.gram is not None:
            sums.gram = mirrored(sums.gram)
            sums.squares = sums.gram.diagonal().clone()
        return sums


def add_gram(gram: Float[Tensor, "in in"], x: Float[Tensor, "token in"]) -> None:
    """Add XᵀX to the lower triangle of `gram`, in place; products in float32, sums in float64."""
    for start in range(0, x.shape[1], TILE):
        stop = min(start + TILE, x.shape[1])
        gram[start:stop, :stop] += x[:, start:stop].T @ x[:, :stop]


def mirrored(gram: Float[Tensor, "in in"]) -> Float[Tensor, "in in"]:
    """`gram`, its upper triangle filled in from the lower one, in place."""
    for start in range(0, len(gram), TILE):
        stop = min(start + TILE, len(gram))
        tile = gram[start:stop, start:stop]
        tile.copy_(tile.tril() + tile.tril(-1).T)
        gram[start:stop, stop:] = gram[stop:, start:stop].T
    return gram


def collect_head(decoder: Decoder, stream: Stream, batch_tokens: int, grams: bool) -> Inputs:
    """What the logits' matrix is multiplied with, added up over a stream that leaves the last block; `grams` as for `collect`."""
    collector = Collector(grams)
    with decoder.trunk():
        for _, _, hidden in read_batches(stream, batch_tokens, decoder.device):
            collector.see(HEAD, decoder.head_inputs(hidden))
    return collector.sums(HEAD)


def collect(
    decoder: Decoder, index: int, matrices: list[Matrix], stream: Stream, batch_tokens: int, grams: bool, advance: bool
) -> Collector:
    """Run the stream through block `index`, which must be loaded, and add up what its matrices see.

    Args:
        grams: XᵀX instead of the squares alone.
        advance: leave the block's outputs on the stream.
    """
    collector = Collector(grams)
    with watch(decoder.blocks[index], matrices, collector.see):
        for start, _, hidden in read_batches(stream, batch_tokens, decoder.device):
            out = decoder.call(index, hidden)
            if advance:
                finite_or_stop(out, f"block {index}", start)
                stream.write(start, out)
    return collector
