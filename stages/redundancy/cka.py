"""Linear centred kernel alignment of two boundaries (arXiv 1905.00414, equation 5), from Grams streamed over the tape."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from stages.decoder.tape import Tape


def linear_cka(
    xx: Float[Tensor, "channel channel"], xy: Float[Tensor, "channel channel"], yy: Float[Tensor, "channel channel"]
) -> float:
    """||XᵀY||² / (||XᵀX|| ||YᵀY||) (Frobenius) of column-centred X and Y; 0 where one of them does not vary."""
    scale = float(xx.norm() * yy.norm())
    return float(xy.square().sum()) / scale if scale > 0 else 0.0


def block_ckas(tape: Tape, batch_tokens: int, device: str) -> list[float]:
    """CKA of the input and the output of each block over all tokens of the tape. Memory: six Grams, whatever the tokens."""
    found, before = [], _gram(tape, 0, 0, batch_tokens, device)
    for block in range(tape.boundaries - 1):
        after = _gram(tape, block + 1, block + 1, batch_tokens, device)
        found.append(linear_cka(before, _gram(tape, block, block + 1, batch_tokens, device), after))
        before = after
    return found


def _gram(tape: Tape, one: int, other: int, batch_tokens: int, device: str) -> Tensor:
    """Centred XᵀY in float64; products of a batch are float32."""
    total = torch.zeros(tape.width, tape.width, dtype=torch.float64, device=device)
    sums = torch.zeros(2, tape.width, dtype=torch.float64, device=device)
    for span in tape.batches(batch_tokens):
        x = tape.read(one, *span).flatten(0, 1).to(device).float()
        y = x if other == one else tape.read(other, *span).flatten(0, 1).to(device).float()
        total += x.T @ y
        sums += torch.stack([x.sum(0, dtype=torch.float64), y.sum(0, dtype=torch.float64)])
    return total - torch.outer(sums[0], sums[1]) / (tape.windows * tape.length)
