"""Peak resident memory of every stage against depth and tokens, on random checkpoints.

`python -m tests.bench.memory` (about 1B parameters, and half as deep; some ten minutes on two cores, 7 GB of disk);
`--blocks 8 16 --windows 4 16` adds fourfold tokens.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path

from tests.bench.process import REPOSITORY, make_apart, run_apart

STAGES = (
    "capture", "statistics", "redundancy", "search", "sensitivity", "allocation", "masking", "removal", "ghost", "peeling",
    "compress", "evaluation@dense", "evaluation@compressed",
)  # fmt: skip
HEADER = "blocks  tokens  checkpoint   block  stage                  seconds     peak  less libraries  /checkpoint  /block"
ROW = "{:6d}  {:6d}  {:7.2f} GB  {:6.2f}  {:21s}  {:7.1f}  {:7.2f}  {:14.2f}  {:11.2f}  {:6.2f}"


def main() -> None:
    """Print a row per stage, depth and number of windows: peak memory without that of the libraries, also as shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--windows", type=int, nargs="+", default=[4])
    parser.add_argument("--length", type=int, default=256)
    wanted = parser.parse_args()
    _, idle = run_apart(["-c", "import stages.decoder.skeleton"], REPOSITORY)
    print(f"libraries alone: {idle / 1e9:.2f} GB; a block is counted in float32, the checkpoint is bfloat16")
    print(HEADER, flush=True)
    for blocks, windows in itertools.product(wanted.blocks, wanted.windows):
        with tempfile.TemporaryDirectory(dir=".") as folder:
            root = Path(folder).resolve()
            block = make_apart(root, wanted.width, blocks, windows, wanted.length)
            size = sum(file.stat().st_size for file in (root / "data/model").glob("*.safetensors"))
            for stage in STAGES:
                seconds, peak = run_apart(["-m", "pipeline.runner", stage], root)
                own = peak - idle
                row = seconds, peak / 1e9, own / 1e9, own / size, own / block
                print(ROW.format(blocks, windows * wanted.length, size / 1e9, block / 1e9, stage, *row), flush=True)


if __name__ == "__main__":
    main()
