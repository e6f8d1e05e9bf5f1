"""How far a block's own output is from a later boundary."""

from __future__ import annotations

import torch

from stages.decoder.tape import Tape, split_held_out


def own_errors(tape: Tape, block: int, targets: list[int], held_out: float, batch_tokens: int) -> dict[int, float]:
    """target -> ||Y - output of the block|| / ||Y - input of the block|| over the held-out windows, Y the stream at the target.

    0 if the target is the block's output; 1 if the block brought the stream no nearer to the target.
    """
    left, whole = dict.fromkeys(targets, 0.0), dict.fromkeys(targets, 0.0)
    first = split_held_out(tape.windows, held_out, "peeling.held_out")
    for start, stop in tape.batches(batch_tokens, first):
        before, after = tape.read(block, start, stop).float(), tape.read(block + 1, start, stop).float()
        for target in targets:
            goal = tape.read(target, start, stop).float()
            left[target] += float((goal - after).square().sum(dtype=torch.float64))
            whole[target] += float((goal - before).square().sum(dtype=torch.float64))
    return {target: (left[target] / whole[target]) ** 0.5 if whole[target] else 0.0 for target in targets}
