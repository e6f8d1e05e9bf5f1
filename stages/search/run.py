"""Measure removals by what they do to the output: greedily, block after block, and windows with a ghost in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from pipeline.artifacts import write_table
from pipeline.console import plan, progress, say
from pipeline.errors import PalimpsestError
from pipeline.files import Files
from stages.decoder.skeleton import Decoder
from stages.decoder.tape import Tape
from stages.decoder.wavefront import Prompts, Step, Variant, measure, sweep_memory
from stages.search import Params, Search
from stages.search.iterative import greedy
from stages.search.recoverable import recover

STEPS = ["step", "block", "divergence", "removed"]
WINDOWS = ["start", "stop", "divergence", "divergence_bare", "error", "cosine", "ridge"]


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write `search_steps.csv`, a row per step and candidate, and `search_windows.csv`, a row per window [start, stop).

    `divergence` is KL(dense || variant) in nats, the mean over the prompts: of a step, with the candidate and all blocks
    removed before it gone; of a window, with its ghost, and `divergence_bare` without. `error` and `cosine` after the fit,
    on the tokens it was made from, are the proxies one might choose by instead.
    """
    wanted, compute = params.search, params.compute
    tape, device = Tape(inputs["tape.safetensors"]), compute.resolve_device()
    steps, windows = pd.DataFrame(columns=STEPS), pd.DataFrame(columns=WINDOWS)
    if wanted.steps or wanted.windows:
        decoder = Decoder(inputs["model"], compute.resolve_dtype(), device)
        tape.check_model(len(decoder), decoder.width)
        candidates, places = _check(wanted, len(decoder), tape)
        prompts = _prompts(tape, wanted)
        first = [Variant({block: None}) for block in candidates] if wanted.steps else []
        later = _variants(places, [lambda hidden: hidden for _ in places])
        sweeps = [sweep_memory(decoder, some, prompts, wanted.memory, compute.batch_tokens) for some in (first, later) if some]
        plan(
            memory=max(sweeps) + (len(places) * 4 + 8 * 8) * tape.width**2,
            disk=0,
            folder=outputs["search_steps.csv"].parent,
            memory_key="search.memory, search.windows or compute.batch_tokens",
            disk_key="",
        )

        def cost(variants: list[Variant]) -> list[float]:
            found = measure(decoder, variants, prompts, batch_tokens=compute.batch_tokens, memory=wanted.memory)
            return found.mean(1).tolist()

        steps = _steps(greedy(candidates, wanted.steps, cost, wanted.spacing))
        recoveries = {
            (start, stop): recover(
                tape, start, stop, prompts.count, wanted.ridge, wanted.sink_threshold, compute.batch_tokens, device
            )
            for start, stop in progress(places, "ghost of a window")
        }
        costs = np.array(cost(_variants(places, [one.apply for one in recoveries.values()]))).reshape(-1, 2)
        rows = [
            [start, stop, *pair, one.error, one.cosine, one.ridge]
            for ((start, stop), one), pair in zip(recoveries.items(), costs.tolist(), strict=True)
        ]
        windows = pd.DataFrame(rows, columns=WINDOWS)
        _tell(windows)
    write_table(outputs["search_steps.csv"], steps)
    write_table(outputs["search_windows.csv"], windows)
    if not len(steps) and not len(windows):
        say("nothing to measure (search.steps, search.windows)")


def _check(wanted: Search, blocks: int, tape: Tape) -> tuple[list[int], list[tuple[int, int]]]:
    """The blocks that may go and the windows of them. Refuses what cannot be measured."""
    wrong = [one for one in wanted.protect if not -blocks <= one < blocks]
    if wrong:
        raise PalimpsestError(f"params.yaml: search.protect = {wrong[0]}: the model has {blocks} blocks")
    protected = {one % blocks for one in wanted.protect}
    candidates = [block for block in range(blocks) if block not in protected]
    most = min(len(candidates), blocks - 1)
    if wanted.steps > most:
        raise PalimpsestError(f"params.yaml: search.steps = {wanted.steps}: allowed: 0 to {most} (search.protect)")
    places = []
    for length in wanted.windows:
        here = [(start, start + length) for start in range(blocks - length + 1)]
        here = [window for window in here if protected.isdisjoint(range(*window)) and length < blocks]
        if not here:
            raise PalimpsestError(
                f"params.yaml: search.windows = {length}: no {length} adjacent blocks are free of search.protect"
            )
        places += here
    if places and tape.windows <= wanted.prompts:
        raise PalimpsestError(
            f"params.yaml: search.prompts = {wanted.prompts}: no calibration window is left to fit ghosts on; allowed: 1 to "
            f"{tape.windows - 1}, or raise tokens.calibration_windows"
        )
    return candidates, places


def _prompts(tape: Tape, wanted: Search) -> Prompts:
    """As many prompts, as long, as the tape has; says so where that is less than what was asked for."""
    count, length = min(wanted.prompts, tape.windows), min(wanted.length, tape.length)
    if (count, length) != (wanted.prompts, wanted.length):
        say(f"{count} prompts of {length} tokens: the tape has no more (tokens.calibration_windows, tokens.length)")
    return Prompts(tape, count, length)


def _variants(places: list[tuple[int, int]], ghosts: Sequence[Callable[[Tensor], Tensor]]) -> list[Variant]:
    """Per window: its blocks replaced by its ghost, then by nothing."""
    found: list[Variant] = []
    for (start, stop), ghost in zip(places, ghosts, strict=True):
        bare: dict[int, Step] = dict.fromkeys(range(start, stop))
        found += [Variant({**bare, start: ghost}), Variant(bare)]
    return found


def _steps(found: list[tuple[dict[int, float], int]]) -> pd.DataFrame:
    rows: list[dict[str, Any]] = []
    for step, (costs, best) in enumerate(found, 1):
        lost = [block for block, value in costs.items() if not np.isfinite(value)]
        some = f"; not finite without block {', '.join(map(str, lost))} (try compute.dtype: float32)" if lost else ""
        say(f"step {step}: block {best} goes, KL {costs[best]:.4f}{some}")
        rows += [{"step": step, "block": one, "divergence": value, "removed": int(one == best)} for one, value in costs.items()]
    return pd.DataFrame(rows, columns=STEPS)


def _tell(windows: pd.DataFrame) -> None:
    """The best window of each length, and how well each cheap proxy orders the windows."""
    for length, every in windows.groupby(windows.stop - windows.start):
        rows = every.loc[np.isfinite(every["divergence"].to_numpy(np.float64))]
        if len(rows) < len(every):
            lost = f"{len(every) - len(rows)} of {len(every)}"
            say(f"windows of {length}: KL not finite for {lost} with their ghosts, left empty (try compute.dtype: float32)")
        if not len(rows):
            continue
        best = rows.loc[rows.divergence.idxmin()]
        order = rows[["error", "divergence_bare"]].assign(cosine=-rows.cosine).rank().corrwith(rows.divergence.rank())
        by = ", ".join(f"{name} {value:+.2f}" for name, value in order.items() if np.isfinite(value))
        say(
            f"windows of {length}: best {int(best.start)} to {int(best.stop) - 1}, KL {best.divergence:.4f} with its ghost; "
            f"Spearman with the proxies: {by or 'too few windows'}"
        )
