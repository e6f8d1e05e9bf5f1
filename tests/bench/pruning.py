"""Seconds and peak memory of `statistics` and of `masking` with each method, against published code on the whole model.

`python -m tests.bench.pruning --demo` (after `make run`) and `python -m tests.bench.pruning --sizes 0.1 0.4 1` (random
checkpoints; 3 for 3B takes 6 GB of disk and 12 GB of memory for the plain implementation). The plain side runs float32, the
stages run float32 and, where `compute.dtype: auto` is another one, that too; on the same tokens, each in a process of its own,
one after the other; seconds are without the start-up of the libraries. The singular values of a 3B model alone take most of an
hour on two cores: `--no-spectra` leaves them out of `statistics`.

`python -m tests.bench.pruning --dtypes --data data` counts instead the mask entries that forward passes in bfloat16 decide other
than those in float32 do, on the demo's first `--windows` windows at half the weights, and says what that does to the perplexity:
both sets of masks (with SparseGPT its weights too) run in float32 on the first `--evaluation-windows` windows.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ruamel.yaml import YAML

from pipeline.tensors import TensorFile, write_tensors
from stages.decoder.checkpoint import Checkpoint
from stages.decoder.compute import Compute
from stages.evaluation.bootstrap import mean_interval
from tests.bench.process import REPOSITORY, make_apart, run_apart

SHAPES = {0.1: (768, 9), 0.4: (1024, 24), 1.0: (2048, 15), 3.0: (2560, 30)}  # billions of parameters -> width, blocks
WAYS = [
    ("magnitude", "unstructured"),
    ("magnitude", "2:4"),
    ("wanda", "unstructured"),
    ("wanda", "2:4"),
    ("sparsegpt", "unstructured"),
    ("sparsegpt", "2:4"),
]
HEADER = (
    "model   what                              seconds   plain  speed-up   peak GB  plain  share   of the float32 matrix rate"
)
ROW = "{:6s}  {:32s}  {:7.1f}  {:6.1f}  {:7.2f}x  {:8.2f}  {:5.2f}  {:5.2f}  {:6.0%}"


def main() -> None:
    """Print a row per stage and method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("--sizes", type=float, nargs="*", default=[], choices=list(SHAPES))
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--data", type=Path, default=Path("data"), help="the demo's data folder")
    parser.add_argument("--dtypes", action="store_true", help="what of the masks depends on the precision")
    parser.add_argument("--evaluation-windows", type=int, default=8, help="with --dtypes: for the perplexity")
    methods, patterns = (sorted(set(names)) for names in zip(*WAYS, strict=True))
    parser.add_argument("--methods", nargs="*", default=methods, choices=methods)
    parser.add_argument("--patterns", nargs="*", default=patterns, choices=patterns)
    parser.add_argument("--no-spectra", action="store_true", help="statistics without singular values")
    wanted = parser.parse_args()
    if wanted.evaluation_windows < 2:
        parser.error("--evaluation-windows: an interval needs at least 2")
    if wanted.dtypes:
        compare_dtypes(wanted.data, wanted.windows, wanted.evaluation_windows, wanted.methods)
        return
    ways = [(method, pattern) for method, pattern in WAYS if method in wanted.methods and pattern in wanted.patterns]
    start, idle = run_apart(["-c", "import stages.decoder.skeleton"], REPOSITORY)
    print(
        f"start-up {start:.1f} s and {idle / 1e9:.2f} GB, taken off below; sgemm {matrix_rate() / 1e9:.0f} GFLOP/s\n{HEADER}",
        flush=True,
    )
    if wanted.demo:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder).resolve()
            lay_out(root)
            for name in ("model", "tokens.safetensors"):
                (root / "data" / name).symlink_to((wanted.data / name).resolve())
            measure(root, "demo", idle, start, ways, not wanted.no_spectra)
    for size in wanted.sizes:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder).resolve()
            width, blocks = SHAPES[size]
            make_apart(root, width, blocks, wanted.windows, wanted.length)
            measure(root, f"{size:g}B", idle, start, ways, not wanted.no_spectra)


def lay_out(root: Path) -> None:
    """A project in `root` without data."""
    for name in ("pipeline", "stages"):
        (root / name).symlink_to(REPOSITORY / name)
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copy(REPOSITORY / name, root)
    (root / "data").mkdir()


def measure(root: Path, name: str, idle: int, start: float, ways: list[tuple[str, str]], spectra: bool) -> None:
    """Print the rows of one model."""
    yaml = YAML(typ="safe", pure=True)
    params = yaml.load(root / "params.yaml")
    params["statistics"]["spectra"] = spectra
    work = forward_work(root)
    dtypes = ["float32", *(["auto"] if Compute().resolve_dtype() != torch.float32 else [])]

    def stage(stage: str, dtype: str) -> tuple[float, float]:
        """Seconds without start-up, GB without that of the libraries. The tape has the same precision, as in the pipeline."""
        params["compute"]["dtype"] = dtype
        yaml.dump(params, root / "params.yaml")
        tape, recorded = root / "data/tape.safetensors", root / f"data/tape-{dtype}.safetensors"
        if not recorded.exists():
            tape.unlink(missing_ok=True)
            run_apart(["-m", "pipeline.runner", "capture"], root)
            tape.rename(recorded)
        tape.unlink(missing_ok=True)
        tape.symlink_to(recorded.name)
        seconds, peak = run_apart(["-m", "pipeline.runner", stage], root)
        return seconds - start, (peak - idle) / 1e9

    for dtype in dtypes:
        seconds, memory = stage("statistics", dtype)
        nothing = float("nan")
        row = seconds, nothing, nothing, memory, nothing, nothing, work / seconds / matrix_rate()
        print(ROW.format(name, f"statistics {dtype}", *row), flush=True)
    allocate_half(root)
    for method, pattern in ways:
        params["masking"].update(method=method, pattern=pattern)
        plain, plain_peak = run_apart(["-m", "tests.bench.published", str(root), method, pattern, "0.5"], REPOSITORY)
        plain, plain_peak = plain - start, (plain_peak - idle) / 1e9
        passes = 0 if method == "magnitude" else 2
        for dtype in dtypes if passes else dtypes[:1]:
            seconds, memory = stage("masking", dtype)
            row = (
                seconds,
                plain,
                plain / seconds,
                memory,
                plain_peak,
                memory / plain_peak,
                passes * work / seconds / matrix_rate(),
            )
            print(ROW.format(name, f"{method} {pattern} {dtype}", *row), flush=True)


def allocate_half(root: Path) -> None:
    """An allocation of half of every block's weights."""
    parameters = sum(torch.Size(shape).numel() for shape, _ in Checkpoint(root / "data/model").specs.values())
    blocks = Checkpoint(root / "data/model").config.num_hidden_layers
    uniform = "block,matrix,parameters,score,sparsity\n"
    uniform += "".join(f"{block},,{parameters // blocks},,0.5\n" for block in range(blocks))
    (root / "data/allocation.csv").write_text(uniform)


def compare_dtypes(data: Path, windows: int, evaluated: int, methods: list[str]) -> None:
    """Print for each method, unstructured, how many mask entries differ between bfloat16 and float32 forward passes, and the
    perplexity of either set of masks, both run in float32."""
    dtypes = "float32", "bfloat16"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder).resolve()
        lay_out(root)
        (root / "data/model").symlink_to((data / "model").resolve())
        tokens = TensorFile(data / "tokens.safetensors")
        counts = {"calibration": windows, "evaluation": evaluated, "scored": evaluated}
        some = {name: tokens.read(name)[: counts[name]].clone() for name in tokens.names()}
        write_tensors(root / "data/tokens.safetensors", some, tokens.metadata)
        (root / "data/statistics.safetensors").touch()  # has to be there; inputs behind the pruned blocks need none of it
        allocate_half(root)
        yaml = YAML(typ="safe", pure=True)
        params = yaml.load(root / "params.yaml")

        def stage(name: str, dtype: str) -> None:
            params["compute"]["dtype"] = dtype
            yaml.dump(params, root / "params.yaml")
            run_apart(["-m", "pipeline.runner", name], root)

        print(
            f"masks from {len(some['calibration'])} windows; perplexity in float32 on {len(some['evaluation'])} windows of "
            f"{some['evaluation'].shape[1]} tokens\n"
            "method       differ      of entries      share   perplexity: float32  bfloat16   difference in nats per token",
            flush=True,
        )
        for method in methods:
            params["masking"].update(method=method, pattern="unstructured")
            found: list[dict[str, Any]] = []
            for dtype in dtypes:
                stage("masking", dtype)
                stage("evaluation@masked", "float32")
                found.append(json.loads((root / "data/evaluation/masked.json").read_text()))
                (root / "data/masks.safetensors").rename(root / f"data/{dtype}.safetensors")
            differ, entries = differing_entries(*(TensorFile(root / f"data/{dtype}.safetensors") for dtype in dtypes))
            one, other = found
            low, high = mean_interval(np.subtract(other["windows"], one["windows"]), one["confidence"], 1000, 0)
            print(
                f"{method:10s}  {differ:7d}  {entries:14d}  {differ / entries:9.4%}   {one['perplexity']:19.2f}  "
                f"{other['perplexity']:8.2f}   {other['loss'] - one['loss']:+.4f} ({low:+.4f} to {high:+.4f})",
                flush=True,
            )


def differing_entries(one: TensorFile, other: TensorFile) -> tuple[int, int]:
    """(entries that differ, entries) of two files of masks; rows are filled up to whole bytes, which never differs."""
    differ = entries = 0
    for name in one.names():
        if name.startswith("blocks."):
            a, b = (np.unpackbits(file.read(name).numpy()) for file in (one, other))
            differ, entries = differ + int((a != b).sum()), entries + a.size
    return differ, entries


def forward_work(root: Path) -> float:
    """Operations of the linears of one forward pass over the calibration tokens: two per weight and token."""
    tokens = TensorFile(root / "data/tokens.safetensors").read("calibration").numel()
    weights = sum(
        torch.Size(shape).numel() for name, (shape, _) in Checkpoint(root / "data/model").specs.items() if ".layers." in name
    )
    return 2.0 * weights * tokens


def matrix_rate() -> float:
    """Operations a second of a float32 product of 1536 by 1536 matrices, the best of five."""
    a = torch.randn(1536, 1536)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(a, a)
        best = min(best, time.perf_counter() - start)
    return 2 * 1536**3 / best


if __name__ == "__main__":
    main()
