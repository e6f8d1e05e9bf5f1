"""Fit one operator per run of removed blocks, from the dense tape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import torch

from pipeline.artifacts import write_table
from pipeline.console import plan, progress, say
from pipeline.files import Files
from pipeline.tensors import write_tensors
from stages.decoder.gram import Fit, Grams, condition_number, relative_errors
from stages.decoder.operators import operator_name, read_removed, runs_of
from stages.decoder.tape import Tape, tape_grams
from stages.ghost import Params
from stages.ghost.antisymmetry import antisymmetric_share
from stages.ghost.ghost import ghost

# A method takes the Grams of a run's input and step, the relative ridge and a name for errors, and returns its fit.
METHODS: dict[str, Callable[[Grams, float, str], Fit]] = {"ghost": ghost}
COLUMNS = ["start", "stop", "operator", "ridge", "train_error", "heldout_error", "condition", "antisymmetric_share", "norm"]


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write `ghost.safetensors` (per run M float32 [channel, channel], for row vectors x + x M) and `ghost.csv`."""
    wanted, device = params.ghost, params.compute.resolve_device()
    tape = Tape(inputs["tape.safetensors"])
    runs = runs_of(read_removed(inputs["removal.json"], tape.boundaries - 1))
    if wanted.method == "none":
        runs = []
    plan(
        memory=10 * tape.width**2 * 8 + 4 * min(params.compute.batch_tokens, tape.windows * tape.length) * tape.width * 8,
        disk=len(runs) * tape.width**2 * 4,
        folder=outputs["ghost.csv"].parent,
        memory_key="compute.batch_tokens",
        disk_key="removal.count",
    )
    rows: list[dict[str, Any]] = []
    operators: dict[str, torch.Tensor] = {}
    for start, stop in progress(runs, "run of removed blocks"):
        train, held_out = tape_grams(
            tape, start, [stop], wanted.held_out, params.compute.batch_tokens, device, torch.float64, "ghost.held_out"
        )
        fit = METHODS[wanted.method](train, wanted.ridge, f"ghost of blocks {start} to {stop - 1}")
        operators[operator_name(start, stop)] = fit.m[0].float().cpu()
        rows.append(
            {
                "start": start,
                "stop": stop,
                "operator": wanted.method,
                "ridge": fit.ridge,
                "train_error": relative_errors(train, fit.m)[0],
                "heldout_error": relative_errors(held_out, fit.m)[0],
                "condition": condition_number(fit.damped),
                "antisymmetric_share": antisymmetric_share(fit.m[0]),
                "norm": float(fit.m[0].norm()),
            }
        )
        errors = f"error {rows[-1]['train_error']:.3f} train, {rows[-1]['heldout_error']:.3f} held out"
        raised = f", ridge raised from {wanted.ridge:g} to {fit.ridge:g}" if fit.ridge != wanted.ridge else ""
        say(f"blocks {start} to {stop - 1}: {errors}{raised}")
    write_table(outputs["ghost.csv"], pd.DataFrame(rows, columns=COLUMNS))
    write_tensors(
        outputs["ghost.safetensors"], operators, {"convention": "row vectors: x + x M", "operator": wanted.method, "runs": runs}
    )
    if not runs:
        say("nothing to restore")
