"""Fit linear references to each block, from the tape: how much of its work, and of what lies behind it, is linear?"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch

from pipeline.artifacts import write_table
from pipeline.console import plan, progress, say
from pipeline.files import Files
from pipeline.tensors import write_tensors
from stages.decoder.gram import relative_errors, solve_ridge
from stages.decoder.tape import Tape, tape_grams
from stages.peeling import Params
from stages.peeling.own import own_errors

COLUMNS = ["block", "target", "train_error", "heldout_error", "own_error", "ridge"]


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write `peeling.csv`, a row per block and target boundary, and `peeling.safetensors`.

    With D the step from the block's input to the target, errors are relative to ||D||: `train_error` and `heldout_error`
    of the best linear map, and `own_error` of the block itself on the held-out windows (0 where its output is the target).
    Tensors: `own` and `heldout` float32 [block, reach] (-1 where the target lies behind the last block), and with
    `peeling.keep` the maps M float32 [channel, channel], `maps.{block}.{target}`, for which x + x M is the reference.
    """
    wanted, device = params.peeling, params.compute.resolve_device()
    tape = Tape(inputs["tape.safetensors"])
    blocks = tape.boundaries - 1
    reach = sorted(set(wanted.reach))
    maps = blocks * len(reach) if wanted.keep else 0
    plan(
        memory=(4 + 4 * len(reach)) * tape.width**2 * 8 + maps * tape.width**2 * 4,
        disk=maps * tape.width**2 * 4,
        folder=outputs["peeling.csv"].parent,
        memory_key="peeling.reach (fewer targets) or peeling.keep: false",
        disk_key="peeling.keep: false",
    )
    rows: list[dict[str, Any]] = []
    tensors = {name: torch.full((blocks, len(reach)), -1.0) for name in ("own", "heldout")}
    for block in progress(range(blocks), "block"):
        targets = [block + step for step in reach if block + step <= blocks]
        if not targets:
            continue
        train, held_out = tape_grams(
            tape, block, targets, wanted.held_out, params.compute.batch_tokens, device, torch.float32, "peeling.held_out"
        )
        own = own_errors(tape, block, targets, wanted.held_out, params.compute.batch_tokens)
        fit = solve_ridge(train, wanted.ridge, f"peeling of block {block}")
        if fit.ridge != wanted.ridge:
            say(f"block {block}: ridge raised from {wanted.ridge:g} to {fit.ridge:g}")
        train_errors, heldout_errors = relative_errors(train, fit.m), relative_errors(held_out, fit.m)
        for column, target in enumerate(targets):
            errors = {"train_error": train_errors[column], "heldout_error": heldout_errors[column], "own_error": own[target]}
            rows.append({"block": block, "target": target, **errors, "ridge": fit.ridge})
            tensors["own"][block, column], tensors["heldout"][block, column] = own[target], heldout_errors[column]
            if wanted.keep:
                tensors[f"maps.{block}.{target}"] = fit.m[column].float().cpu()
    write_table(outputs["peeling.csv"], pd.DataFrame(rows, columns=COLUMNS))
    write_tensors(outputs["peeling.safetensors"], tensors, {"reach": reach, "convention": "row vectors: x + x M"})
    nearest = [row for row in rows if row["target"] == row["block"] + 1]
    if nearest:
        least = min(nearest, key=lambda row: row["heldout_error"])
        say(f"most linear block: {least['block']} (a linear map leaves {least['heldout_error']:.3f} of its step unexplained)")
