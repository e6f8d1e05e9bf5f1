"""Fit one operator per run of removed blocks (or per block), from the dense tape or from the student's own stream."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pandas as pd
import torch

from pipeline.artifacts import write_table
from pipeline.console import plan, progress, say
from pipeline.errors import PalimpsestError
from pipeline.files import Files
from pipeline.tensors import TensorFile, write_tensors
from stages.decoder.gram import condition_number
from stages.decoder.operators import Operator, operator_name, read_removed, runs_of, spell, write_operators
from stages.decoder.skeleton import Decoder
from stages.decoder.stream import read_windows
from stages.decoder.tape import Tape, split_held_out
from stages.ghost import Ghost, Params
from stages.ghost.antisymmetry import antisymmetric_share
from stages.ghost.diagnosis import errors_apart, growth
from stages.ghost.fitting import Apart, fit_operator, identity, with_options
from stages.ghost.ghost import ghost
from stages.ghost.ghost_affine import ghost_affine
from stages.ghost.ghost_lowrank import ghost_lowrank
from stages.ghost.hadamard import hadamard
from stages.ghost.least_squares_diag import least_squares_diag
from stages.ghost.least_squares_rotate import least_squares_rotate
from stages.ghost.linearpatch_diag import linearpatch_diag
from stages.ghost.linearpatch_rotate import linearpatch_rotate
from stages.ghost.replaceme import replaceme
from stages.ghost.sinks import find_sinks, sink_rule, token_norms
from stages.ghost.student import Student
from stages.ghost.symmetric import symmetric

# A method takes the sums of a run, the relative ridge and a name for errors, and returns its fit.
METHODS: dict[str, Any] = {
    "linearpatch_diag": linearpatch_diag,
    "linearpatch_rotate": linearpatch_rotate,
    "least_squares_diag": least_squares_diag,
    "least_squares_rotate": least_squares_rotate,
    "symmetric": symmetric,
    "ghost": ghost,
    "ghost_affine": ghost_affine,
    "ghost_lowrank": ghost_lowrank,
    "replaceme": replaceme,
}
ROTATED = {"linearpatch_rotate", "least_squares_rotate"}
COLUMNS = [
    "start", "stop", "operator", "ridge", "train_error", "heldout_error", "condition", "antisymmetric_share", "norm",
    "ridge_absolute", "sinks", "sink_error", "rest_error",
]  # fmt: skip
GROWTH = ["boundary", "restored", "removed", "restored_rest", "removed_rest"]


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write `ghost.safetensors` (the operators, see stages/decoder/operators.py), `ghost.csv` and `ghost_growth.csv`."""
    wanted, compute = params.ghost, params.compute
    tape = Tape(inputs["tape.safetensors"])
    removed = read_removed(inputs["removal.json"], tape.boundaries - 1)
    pieces = runs_of(removed) if wanted.per == "run" else [(block, block + 1) for block in sorted(removed)]
    if wanted.method == "none" and wanted.sinks != "restore":
        pieces = []
    _check(wanted, pieces, tape.width)
    split = split_held_out(tape.windows, wanted.held_out, "ghost.held_out") if pieces else tape.windows
    decoder = Decoder(inputs["model"], compute.resolve_dtype(), compute.resolve_device())
    tape.check_model(len(decoder), decoder.width)
    ids = read_windows(TensorFile(inputs["tokens.safetensors"]), "calibration", decoder)
    tape.check_windows(*ids.shape)
    masks = TensorFile(inputs["masks.safetensors"])  # for the sequential fit, and for the growth of the error in the export
    sequential = wanted.fit == "sequential"
    folder = outputs["ghost.csv"].parent
    batch_bytes = 4 * min(compute.batch_tokens, ids.numel()) * tape.width
    passes = (ids.numel() if sequential else 0) + 2 * (tape.windows - split) * tape.length * wanted.growth
    plan(
        memory=14 * tape.width**2 * 8 + 8 * batch_bytes + (3 * decoder.block_bytes() if pieces else 0),
        disk=len(pieces) * tape.width**2 * 4 + (passes * tape.width * decoder.dtype.itemsize if pieces else 0),
        folder=folder,
        memory_key="compute.batch_tokens",
        disk_key="removal.count",
    )
    operators, rows = {}, []
    with Student(decoder, tape, ids, masks if sequential else None, compute.batch_tokens, sequential) as student:
        if pieces:
            student.begin(pieces[0][0] - (wanted.method == "replaceme"), folder)
        for start, stop in progress(pieces, "run of removed blocks"):
            operator, row = fit_run(student, wanted, start, stop, split)
            if operator.does_nothing:  # method none, and no sink to restore
                say(f"{spell(start, stop)}: no sink that a rule tells, so no operator")
                continue
            student.repair(start, stop, operator)
            operators[start, stop] = operator
            rows.append(row)
    tensors, details = write_operators(operators)
    shown = ["per", "fit", "ridge_rule", "ridge_grid" if wanted.ridge_rule == "held_out" else "ridge", "held_out", "sinks"]
    shown += [*(["sink_threshold"] if wanted.sinks != "keep" else []), *(["sink_weight"] if wanted.sinks == "weight" else [])]
    shown += [*(["rank"] if wanted.method == "ghost_lowrank" else []), "accumulate"]
    metadata = {
        "convention": "row vectors: x + x M",
        "operator": wanted.method,
        "runs": list(operators),
        "operators": details,
        "accumulate": wanted.accumulate,
        "settings": {name: getattr(wanted, name) for name in shown},  # these two for the model card of the export
        "ridges": {operator_name(row["start"], row["stop"]): row["ridge"] for row in rows},  # used, relative
    }
    grown = []
    if operators and wanted.growth:
        grown = growth(decoder, tape, ids, split, removed, operators, masks, wanted.sink_threshold, compute.batch_tokens, folder)
    write_table(outputs["ghost.csv"], pd.DataFrame(rows, columns=COLUMNS))
    write_table(outputs["ghost_growth.csv"], pd.DataFrame(grown, columns=GROWTH))
    write_tensors(outputs["ghost.safetensors"], tensors, metadata)
    if not operators:
        say("nothing to restore")


def _check(wanted: Ghost, pieces: list[tuple[int, int]], width: int) -> None:
    """Refuse what cannot be fitted, before any work."""
    if wanted.method == "ghost_lowrank" and (wanted.rank or 1) > width:
        raise PalimpsestError(f"params.yaml: ghost.rank = {wanted.rank}: the stream has {width} channels; allowed: 1 to {width}")
    if wanted.method in ROTATED and pieces:
        hadamard(width)
    if wanted.method == "replaceme" and pieces and pieces[0][0] == 0:
        raise PalimpsestError(
            "params.yaml: ghost.method = 'replaceme': block 0 is removed, and no block before it is there to fold into; "
            "keep block 0 (removal.protect), or use ghost"
        )


def fit_run(student: Student, wanted: Ghost, start: int, stop: int, split: int) -> tuple[Operator, dict[str, Any]]:
    """The operator in place of blocks [start, stop), and its row of ghost.csv."""
    tape, ids, what = student.tape, student.ids, f"ghost of {spell(start, stop)}"
    apart = _apart(student, wanted, start, stop, split)
    with ExitStack() as stack:
        into = ""
        if wanted.method == "replaceme":
            source, into = stack.enter_context(student.mlp_rows(start, stop))
        else:
            source = student.rows(start, stop)
        method = identity if wanted.method == "none" else with_options(METHODS[wanted.method], wanted, tape.width)
        rotation = hadamard(tape.width) if wanted.method == "linearpatch_rotate" else None
        fitted, figures = fit_operator(method, source, apart, split, wanted, rotation, tape.width, student.decoder.device, what)
        operator = replace(fitted.operator, into=into).to(torch.float32)
        on_device = operator.to(torch.float32, student.decoder.device)
        sink_error, rest_error = errors_apart(source(split, tape.windows), on_device, ids, apart.tokens)
    m = fitted.operator.matrix(tape.width)
    row = {
        "start": start,
        "stop": stop,
        "operator": wanted.method,
        **figures,
        "condition": condition_number(fitted.damped),
        "antisymmetric_share": antisymmetric_share(m),
        "norm": float(m.norm()),
        "sinks": int(apart.tokens.sum()),
        "sink_error": sink_error,
        "rest_error": rest_error,
    }
    say(f"{spell(start, stop)}: error {row['train_error']:.3f} train, {row['heldout_error']:.3f} held out{_raised(wanted, row)}")
    if wanted.sinks == "restore" and sink_error > 1:
        say(
            f"{spell(start, stop)}: restored sinks are off by {sink_error:.3f} of the step on held-out windows, more than "
            "if they were left alone (1); their targets differ too much to be one vector each: try ghost.sinks: bypass"
        )
    return operator, row


def _raised(wanted: Ghost, row: dict[str, Any]) -> str:
    """Says that a ridge was too small to solve with, in the units it was asked in."""
    used, asked, unit = row["ridge"], row["ridge_asked"], ""
    if wanted.ridge_rule == "absolute":
        scale = row["ridge_absolute"] / used if used else 1.0
        used, asked, unit = used * scale, asked * scale, " (absolute)"
    return f", ridge raised from {asked:g} to {used:g}{unit}" if used > asked * (1 + 1e-6) else ""


def _apart(student: Student, wanted: Ghost, start: int, stop: int, split: int) -> Apart:
    """The sinks of the dense stream before or behind the gap, and the rule for them, made from the windows below `split`."""
    found = torch.zeros(student.ids.shape, dtype=torch.bool)
    for boundary in (start, stop):
        found |= find_sinks(token_norms(student.tape, boundary, student.batch_tokens), wanted.sink_threshold)
    rule = sink_rule(found[:split], student.ids[:split], wanted.sinks) if wanted.sinks in ("bypass", "restore") else None
    kinds = torch.full(student.ids.shape, -1) if rule is None else rule.kinds(student.ids)
    apart = Apart(found, rule, kinds)
    if not int(found.sum()) and wanted.sinks != "keep":
        say(
            f"{spell(start, stop)}: no token is beyond ghost.sink_threshold = {wanted.sink_threshold:g}, so there is no sink to "
            f"{wanted.sinks}"
        )
    if int(found.sum()):
        told = "" if rule is None else apart.told(student.ids)
        say(f"{spell(start, stop)}: {int(found.sum())} sink tokens ({wanted.sinks}){told}")
    return apart
