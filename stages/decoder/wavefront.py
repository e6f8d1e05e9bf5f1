"""Many variants of a model in one sweep over its weights: slots that run another block, none, a changed one, or a function.

All variants of a chunk of prompts go through the network together. A variant starts at the first slot in which it differs,
from the stream on the tape, since its prefix is the dense model's. Each block is read from disk once per chunk and stays for
as long as a variant may still want it: for pairs up to a gap of g that is g + 1 blocks. Variants that want the same block are
stacked into one batch, and those that have run the same blocks so far (say, slot i runs block j, and blocks i and j
interchanged) are one stream until they part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pipeline.console import progress
from stages.decoder.divergence import LOGIT_BYTES, output_divergence
from stages.decoder.skeleton import Decoder
from stages.decoder.tape import Tape


@dataclass(frozen=True, eq=False)
class Changed:
    """Block `block` as `change(module)` makes it: a context that alters the loaded block and puts it back when it ends."""

    block: int
    change: Callable[[nn.Module], AbstractContextManager[object]]


# What a slot runs: a block of the model by its index, a changed block, a function of the stream [prompt, token, channel]
# (say, a ghost operator), or nothing: None hands the stream on.
Step = int | Changed | Callable[[Tensor], Tensor] | None


@dataclass(frozen=True)
class Variant:
    """The dense model except for `slots`: slot -> what runs there. No slots: the dense model itself."""

    slots: Mapping[int, Step] = field(default_factory=dict)

    def start(self, blocks: int) -> int:
        """First slot in which a model of `blocks` blocks differs; `blocks` if none does."""
        return min((slot for slot, step in self.slots.items() if step != slot), default=blocks)

    def steps(self, blocks: int) -> tuple[Step, ...]:
        """What is run from `start` on, one after another."""
        from_start = range(self.start(blocks), blocks)
        return tuple(step for step in (self.slots.get(slot, slot) for slot in from_start) if step is not None)


@dataclass(frozen=True)
class Prompts:
    """The first `count` windows of a tape, cut to their first `length` tokens: attention is causal, so the cut is exact."""

    tape: Tape
    count: int
    length: int

    def read(self, boundary: int, start: int, stop: int) -> Tensor:
        """Prompts `start:stop` at `boundary`: [prompt, token, channel]."""
        return self.tape.read(boundary, start, stop)[:, : self.length]


def chunks(variants: int, prompts: Prompts, itemsize: int, memory: int) -> tuple[int, int]:
    """(prompts, variants) at a time so that the streams of all those variants take at most `memory` bytes; at least one each.

    Prompts are split first, since every chunk of variants reads the weights again as well.
    """
    streams = memory // (prompts.length * prompts.tape.width * itemsize)
    together = min(variants, max(1, streams))
    return max(1, min(prompts.count, streams // max(1, together))), max(1, together)


def sweep_memory(decoder: Decoder, variants: Sequence[Variant], prompts: Prompts, memory: int, batch_tokens: int) -> int:
    """Bytes a sweep holds at its peak: the streams, the blocks that stay, one batch, and at the end the head's logits."""
    stream = prompts.length * decoder.width * decoder.dtype.itemsize
    many, together = chunks(len(variants), prompts, decoder.dtype.itemsize, memory)
    resident = max((_blocks_kept(variant, len(decoder)) for variant in variants), default=0) + 1
    batch = max(batch_tokens, many * prompts.length) * decoder.width * decoder.dtype.itemsize
    weights = max(resident * decoder.block_bytes() + 16 * batch, decoder.trunk_bytes() + 5 * LOGIT_BYTES)
    return (together + 1) * many * stream + weights


def measure(
    decoder: Decoder,
    variants: Sequence[Variant],
    prompts: Prompts,
    *,
    batch_tokens: int,
    memory: int,
    positions: str = "all",
) -> Tensor:
    """KL(dense || variant) of the next-token distributions in nats, float64 [variant, prompt].

    Args:
        variants: what to compare with the dense model.
        batch_tokens: tokens pushed through a block at once.
        memory: bytes for the streams of the variants; prompts are taken in chunks that fit.
        positions: "all" = the mean over all positions of a prompt, "last" = its last position.

    A variant whose logits are not finite has a KL that is not finite: it is for the caller to say so.
    """
    many, together = chunks(len(variants), prompts, decoder.dtype.itemsize, memory)
    found = torch.zeros(len(variants), prompts.count, dtype=torch.float64)
    work = [
        (start, min(start + many, prompts.count), first, min(first + together, len(variants)))
        for start in range(0, prompts.count, many)
        for first in range(0, len(variants), together)
    ]
    for start, stop, first, last in progress(work, "chunk of prompts"):
        finals = sweep(decoder, variants[first:last], prompts, start, stop, batch_tokens)
        dense = prompts.read(len(decoder), start, stop)
        with decoder.trunk(head=True):
            found[first:last, start:stop] = output_divergence(decoder, dense, finals, positions)
    return found


def sweep(
    decoder: Decoder, variants: Sequence[Variant], prompts: Prompts, start: int, stop: int, batch_tokens: int
) -> list[Tensor]:
    """The stream that leaves each variant's last block, [prompt, token, channel], for the prompts `start:stop`."""
    blocks, rows = len(decoder), stop - start
    stack = max(1, batch_tokens // (rows * prompts.length))  # streams in one batch
    _prime(decoder, rows, prompts.length, min(stack, len(variants)))
    plans = [variant.steps(blocks) for variant in variants]
    wanted = {block for plan in plans for step in plan if (block := block_of(step)) is not None}
    kept = max((_blocks_kept(variant, blocks) for variant in variants), default=0)
    finals: list[Tensor | None] = [None] * len(variants)
    streams = _first_streams(variants, blocks)

    def run(step: Step, parts: list[tuple[_Stream, list[int]]]) -> None:
        """Push the streams of `parts` through one step, a batch at a time; what they were is let go before the step."""
        block = block_of(step)
        with ExitStack() as changes:
            if isinstance(step, Changed):
                changes.enter_context(step.change(decoder.blocks[step.block]))
            while parts:
                some, parts[:] = parts[:stack], parts[stack:]
                batch = torch.cat([hidden(one).to(decoder.device) for one, _ in some])
                for one, members in some:
                    one.members = [member for member in one.members if member not in members]
                    if not one.members:
                        streams.remove(one)
                        one.hidden = None
                out = step(batch) if block is None else decoder.call(block, batch)  # type: ignore[operator,misc]
                for (one, members), part in zip(some, out.split(rows), strict=True):
                    # A view would keep the whole batch alive for as long as any stream of it waits.
                    streams.append(_Stream(one.base, members, one.done + 1, part.clone() if len(some) > 1 else part))

    def hidden(one: _Stream) -> Tensor:
        return prompts.read(one.base, start, stop) if one.hidden is None else one.hidden

    with ExitStack() as outer:
        resident: dict[int, ExitStack] = {}
        for front in range(blocks):
            if front in wanted:
                resident[front] = outer.enter_context(ExitStack())
                resident[front].enter_context(decoder.block(front))
            while ready := _ready(streams, plans, front):
                run(*ready)
            if front - kept in resident:
                resident.pop(front - kept).close()
    for one in streams:
        for member in one.members:
            finals[member] = hidden(one)
    return [final for final in finals if final is not None]


@dataclass(eq=False)
class _Stream:
    """Variants that have run the same steps so far, and what came of it."""

    base: int  # the boundary of the dense model they left it at
    members: list[int]  # variants
    done: int  # steps
    hidden: Tensor | None  # [prompt, token, channel]; None: still the dense stream, on the tape


def _first_streams(variants: Sequence[Variant], blocks: int) -> list[_Stream]:
    streams: dict[int, _Stream] = {}
    for index, variant in enumerate(variants):
        base = variant.start(blocks)
        streams.setdefault(base, _Stream(base, [], 0, None)).members.append(index)
    return list(streams.values())


def _ready(
    streams: list[_Stream], plans: list[tuple[Step, ...]], front: int
) -> tuple[Step, list[tuple[_Stream, list[int]]]] | None:
    """The step that most streams wait for and that can be run with blocks up to `front`: (step, [(stream, variants)])."""
    found: dict[Step, list[tuple[_Stream, list[int]]]] = {}
    for one in streams:
        parts: dict[Step, list[int]] = {}
        for member in one.members:
            if one.done < len(plans[member]):
                parts.setdefault(plans[member][one.done], []).append(member)
        for step, members in parts.items():
            block = block_of(step)
            if (one.base if block is None else block) <= front:
                found.setdefault(step, []).append((one, members))
    return max(found.items(), key=lambda item: len(item[1]), default=None)


def block_of(step: Step) -> int | None:
    """The block whose weights a step needs."""
    return step.block if isinstance(step, Changed) else step if isinstance(step, int) else None


def _blocks_kept(variant: Variant, blocks: int) -> int:
    """How many blocks behind the front a variant may still want: it waits for a later block, and then runs what it missed."""
    front, behind = variant.start(blocks), 0
    for block in map(block_of, variant.steps(blocks)):
        if block is not None:
            front = max(front, block)
            behind = max(behind, front - block)
    return behind


def _prime(decoder: Decoder, rows: int, length: int, stack: int) -> None:
    """Ask the model once how its blocks are called, for every size of batch there will be."""
    sizes = [rows * count for count in range(1, stack + 1)]
    if any((size, length) not in decoder._calls for size in sizes):
        with decoder.trunk():
            for size in sizes:
                decoder.embed(torch.zeros(size, length, dtype=torch.long))
