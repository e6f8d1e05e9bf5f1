"""All maps' chains of blocks, each block fitted on what the blocks before it make, what maps have in common fitted once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipeline.console import say
from stages.decoder.skeleton import Decoder
from stages.decoder.stream import Stream, finite_or_stop
from stages.yes import Yes
from stages.yes.block import Weights, cast, fresh_weights, installed, stored_weights
from stages.yes.fitting import Goal, fit_block, goal_energy, token_errors
from stages.yes.maps import Map, Node, build_trie, count_fits, spell
from stages.yes.parts import Parts, seed_of
from stages.yes.resume import Kept

Goals = Callable[[int, Sequence[int]], Tensor]  # boundary, windows -> the target stream [window, token, channel]


@dataclass(frozen=True)
class Fit:
    """One block of the trie. Errors are what was minimised, of the weights as they are kept."""

    prefix: Map
    train_error: float
    heldout_error: float
    steps: int


@dataclass
class Solver:
    """What all chains share."""

    decoder: Decoder
    wanted: Yes
    parts: Parts
    batch_tokens: int
    kept: Kept
    folder: Path  # of scratch files
    source: Decoder | None = None  # where `yes.initial` takes its weights from; None: fresh ones
    label: str = "block"  # under which fits are kept
    seconds: float = 0.0  # spent on fits
    fitted: int = 0  # not counting those that were there already

    def solve(self, maps: Mapping[str, Map], first: Stream, goals: Goals, keep: ExitStack) -> tuple[dict[str, Stream], list[Fit]]:
        """The final stream of every map, alive as long as `keep`, and all fits in the order of the trie.

        Args:
            first: the embedding of all windows.
            goals: of the calibration windows.
        """
        root, finals, fits = build_trie(maps), dict[str, Stream](), list[Fit]()
        total = count_fits(root)

        def grow(node: Node, source: Stream) -> None:
            for child in node.children:
                with ExitStack() as own:
                    out = own.enter_context(Stream(self.folder, (first.windows, *self._shape(first)), first.dtype))
                    fits.append(self._one(child.prefix, source, out, goals))
                    self._tell(fits[-1], len(fits), total)
                    finals.update(dict.fromkeys(child.names, out))
                    grow(child, out)
                    if child.names:
                        keep.push(own.pop_all())

        grow(root, first)
        return {name: finals[name] for name in maps}, fits

    def _shape(self, stream: Stream) -> tuple[int, int]:
        return stream.length, self.decoder.width

    def _one(self, prefix: Map, source: Stream, out: Stream, goals: Goals) -> Fit:
        """Fit the last block of `prefix`, or take it from what is kept, and push all windows through it."""
        boundary, slot = prefix[-1], len(prefix) - 1
        goal: Goal = lambda windows: goals(boundary, windows)  # noqa: E731
        energy = goal_energy(goal, self.parts) if self.wanted.error == "pooled" else None
        name = f"{self.label} {spell(prefix)}"
        there = self.kept.read(name)
        if there is None:
            begin = time.monotonic()
            seed = seed_of(self.wanted.seed, "block", slot)  # not the target: what differs between maps is the target alone
            made = fit_block(
                self.decoder,
                slot,
                self._start(slot, seed),
                source,
                goal,
                energy,
                self.parts,
                self.wanted,
                self.batch_tokens,
                seed,
            )
            self.kept.write(name, made[0], {"steps": made[1]})
            there = made[0], {"steps": made[1]}
            self.seconds, self.fitted = self.seconds + time.monotonic() - begin, self.fitted + 1
        train, heldout = self._push(slot, there[0], source, out, goal, energy)
        return Fit(prefix, train, heldout, int(there[1]["steps"]))

    def _start(self, slot: int, seed: int) -> Weights:
        if self.source is None:
            return fresh_weights(self.decoder, slot, seed)
        return stored_weights(self.source, slot, self.decoder.device)

    def _push(
        self, slot: int, weights: Weights, source: Stream, out: Stream, goal: Goal, energy: float | None
    ) -> tuple[float, float]:
        """Fill `out`; mean error over the windows of the fit and over those held out."""
        sums = [0.0, 0.0]
        on_device = {name: value.to(self.decoder.device) for name, value in cast(weights, self.decoder.dtype).items()}
        with installed(self.decoder.blocks[slot], on_device), torch.inference_mode():
            for start, stop in self.parts.batches(source.length, self.batch_tokens):
                made = self.decoder.call(slot, source.read(start, stop).to(self.decoder.device))
                finite_or_stop(made, f"reference block {slot}", start)
                out.write(start, made)
                if stop <= self.parts.calibration:
                    errors = token_errors(made, goal(range(start, stop)).to(self.decoder.device), energy)
                    sums[start >= self.parts.fit] += float(errors.sum(dtype=torch.float64))
        counts = self.parts.fit * source.length, self.parts.held_out * source.length
        return sums[0] / counts[0], sums[1] / counts[1]

    def _tell(self, fit: Fit, done: int, total: int) -> None:
        each = self.seconds / self.fitted if self.fitted else 0.0
        left = f", about {each * (total - done):.0f} s left" if each and done < total else ""
        where = f"{self.label} {len(fit.prefix) - 1} to boundary {fit.prefix[-1]}"
        say(f"{where}: error {fit.heldout_error:.4f} held out, {fit.steps} steps ({done}/{total}{left})")
