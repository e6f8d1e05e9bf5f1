"""Every operator on the demo, judged by perplexity: run `make run` first, then `python -m tests.bench.recovery`.

The dense stream of the evaluation windows is recorded once, so that a cell costs the blocks behind the gap and the head.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from pipeline.tensors import TensorFile, write_tensors
from stages.decoder.operators import Operator, runs_of
from stages.decoder.skeleton import Decoder
from stages.decoder.stream import read_windows
from stages.decoder.tape import Tape, boundary_name, split_held_out
from stages.evaluation.bootstrap import mean_interval
from stages.evaluation.losses import token_losses
from stages.ghost import Ghost
from stages.ghost.run import fit_run
from stages.ghost.student import Student, fold_block, operators_at
from stages.removal.streamline import streamline

Operators = dict[tuple[int, int], Operator]
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "LinearPatch, diagonal": {"method": "linearpatch_diag"},
    "LinearPatch, rotated": {"method": "linearpatch_rotate"},
    "least squares, diagonal": {"method": "least_squares_diag"},
    "least squares, rotated": {"method": "least_squares_rotate"},
    "symmetric": {"method": "symmetric"},
    "ReplaceMe": {"method": "replaceme"},
    "ghost": {},
    "ghost, affine": {"method": "ghost_affine"},
    "ghost, low rank": {"method": "ghost_lowrank"},
    "ghost, ridge held out": {"ridge_rule": "held_out"},
    "ghost, per block": {"per": "block"},
    "ghost, sequential": {"fit": "sequential"},
    "sinks restored alone": {"method": "none", "sinks": "restore"},
    "ghost, sinks restored": {"sinks": "restore"},
    "ghost, affine, sinks restored": {"method": "ghost_affine", "sinks": "restore"},
    "ghost, low rank, sinks restored": {"method": "ghost_lowrank", "sinks": "restore"},
    "ghost, sinks bypassed": {"sinks": "bypass"},
    "ghost, sinks restored, sequential": {"sinks": "restore", "fit": "sequential"},
}
ROW = "{:34s} {:>9s}  {:>18s}  {:>9s}  {:>9s}  {:>11s}  {:>8s}"


class Bench:
    """The demo's files, and the dense stream of its evaluation windows."""

    def __init__(self, data: Path, folder: Path, windows: int):
        self.data, self.folder = data, folder
        self.decoder = Decoder(data / "model", torch.float32)
        tokens = TensorFile(data / "tokens.safetensors")
        self.calibration = read_windows(tokens, "calibration", self.decoder)
        self.ids = read_windows(tokens, "evaluation", self.decoder)[:windows]
        self.tape = Tape(data / "tape.safetensors")
        self.split = split_held_out(self.tape.windows, 0.125, "")
        stream, tensors = self._embedded(), {}
        for index in range(len(self.decoder)):
            tensors[boundary_name(index)] = stream
            stream = self._push(index, stream)
        write_tensors(folder / "evaluation.safetensors", {**tensors, boundary_name(len(self.decoder)): stream})
        self.dense = Tape(folder / "evaluation.safetensors")

    def _embedded(self) -> Tensor:
        with self.decoder.trunk():
            return torch.cat([self.decoder.embed(self.ids[i : i + 4].long()) for i in range(0, len(self.ids), 4)])

    def _push(self, index: int, stream: Tensor, fold: Operator | None = None) -> Tensor:
        with self.decoder.block(index) as block:
            if fold is not None:
                fold_block(block, fold)
            return torch.cat([self.decoder.call(index, stream[i : i + 4]) for i in range(0, len(stream), 4)])

    def losses(self, removed: Iterable[int], operators: Mapping[tuple[int, int], Operator]) -> np.ndarray:
        """Mean loss of each evaluation window, nats."""
        gone = set(removed)
        folds = {start - 1: one for (start, _), one in operators.items() if one.fold is not None}
        first = min([*gone, *folds, len(self.decoder)])
        stream = self.dense.read(first, 0, len(self.ids))
        for index in range(first, len(self.decoder)):
            if index not in gone:
                stream = self._push(index, stream, folds.get(index))
                continue
            for operator in operators_at(operators, index):
                stream = operator.apply(stream, self.ids)
        found = []
        with self.decoder.trunk(head=True):
            for hidden, ids in zip(stream, self.ids.long(), strict=True):
                logits = self.decoder.logits(hidden[None, :-1])[0]
                found.append(float(token_losses(logits, ids[1:]).mean(dtype=torch.float64)))
        return np.array(found)

    def fit(self, removed: list[int], setting: Mapping[str, Any]) -> tuple[Operators, list[dict[str, Any]], float]:
        """Operators, rows of ghost.csv, seconds."""
        wanted = Ghost(**setting)
        pieces = runs_of(removed) if wanted.per == "run" else [(block, block + 1) for block in removed]
        operators, rows = {}, []
        begin = time.monotonic()
        if wanted.method != "none" or wanted.sinks == "restore":
            student = Student(self.decoder, self.tape, self.calibration, None, 4096, wanted.fit == "sequential")
            with redirect_stdout(StringIO()), student:
                student.begin(pieces[0][0] - (wanted.method == "replaceme"), self.folder)
                for start, stop in pieces:
                    operators[start, stop], row = fit_run(student, wanted, start, stop, self.split)
                    student.repair(start, stop, operators[start, stop])
                    rows.append(row)
        return operators, rows, time.monotonic() - begin


def published(bench: Bench, start: int, stop: int) -> Tensor:
    """The published closed form: all activations at once, 1e-6 on the diagonal, LU, float64."""
    x, y = (bench.tape.read(boundary, 0, bench.split).flatten(0, 1).double() for boundary in (start, stop))
    return torch.linalg.solve(x.T @ x + 1e-6 * torch.eye(x.shape[1], dtype=torch.float64), x.T @ (y - x))


def scattered(influence: np.ndarray, count: int) -> list[int]:
    """The blocks of least influence of which no two are adjacent; never the first or the last."""
    chosen: list[int] = []
    for block in np.argsort(influence, kind="stable").tolist():
        if 0 < block < len(influence) - 1 and all(abs(block - one) > 1 for one in chosen) and len(chosen) < count:
            chosen.append(block)
    return sorted(chosen)


def main() -> None:
    """Print a table per set of removed blocks, then what was to be shown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data"), help="where the stages wrote")
    parser.add_argument("--windows", type=int, default=16, help="evaluation windows scored")
    parser.add_argument("--only", nargs="*", default=[], help="these settings, by their names in the table")
    parser.add_argument("--removed", nargs="*", default=[], help="sets of blocks, as 13-15 or 4,9,13; default: the demo's five")
    wanted = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        bench = Bench(wanted.data, Path(folder), wanted.windows)
        dense = bench.losses([], {})
        print(f"dense {np.exp(dense.mean()):.3f}; {len(dense)} windows of {bench.ids.shape[1]} tokens, float32")
        print(f"fitted on {bench.split} of {bench.tape.windows} calibration windows of {bench.tape.length} tokens")
        for removed in [_blocks(text) for text in wanted.removed] or _demo_sets(wanted.data):
            _table(bench, removed, wanted.only)


def _table(bench: Bench, removed: list[int], only: list[str]) -> None:
    runs = runs_of(removed)
    print("\nremoved " + ", ".join(f"{a}-{b - 1}" if b > a + 1 else str(a) for a, b in runs), flush=True)
    print(ROW.format("operator", "ppl", "95% interval", "held out", "rest", "parameters", "fit, s"))
    for name, setting in SETTINGS.items():
        if only and name not in only:
            continue
        if (setting.get("fit") == "sequential" and len(runs) == 1) or (
            setting.get("per") == "block" and len(runs) == len(removed)
        ):
            continue  # the same as at once, or as per run
        operators, rows, seconds = bench.fit(removed, setting)
        losses = bench.losses(removed, operators)
        low, high = mean_interval(losses, 0.95, 1000, 0)
        added = sum(value.numel() for one in operators.values() if one.fold is None for value in one.tensors().values())
        errors = ["/".join(f"{row[key]:.2f}" for row in rows[:3]) for key in ("heldout_error", "rest_error")]
        interval = f"{np.exp(low):.2f} to {np.exp(high):.2f}"
        print(ROW.format(name, f"{np.exp(losses.mean()):.2f}", interval, *errors, f"{added:,}", f"{seconds:.1f}"), flush=True)
        if name == "ghost":
            exact, _, _ = bench.fit(removed, {"ridge": 1e-6, "ridge_rule": "absolute", "growth": False})
            gaps = []
            for (start, stop), operator in exact.items():
                form = published(bench, start, stop)
                gaps.append(float((operator.matrix(bench.tape.width).double() - form).abs().max() / form.abs().max()))
            print(f"    absolute ridge 1e-6 against the published closed form: largest relative gap {max(gaps):.1e}", flush=True)


def _demo_sets(data: Path) -> list[list[int]]:
    pairs, blocks = (pd.read_csv(data / f"redundancy_{name}.csv") for name in ("pairs", "blocks"))
    influence = blocks.sort_values("block").influence.to_numpy()
    cosine = np.eye(len(influence) + 1)
    cosine[pairs.i, pairs.j] = pairs.cosine
    adjacent = [streamline(cosine, count, {0, len(influence) - 1})[0] for count in (3, 5, 8)]
    return [*adjacent, *(scattered(influence, count) for count in (3, 5))]


def _blocks(text: str) -> list[int]:
    ends = [list(map(int, part.split("-"))) for part in text.split(",")]
    return sorted({block for end in ends for block in range(end[0], end[-1] + 1)})


if __name__ == "__main__":
    main()
