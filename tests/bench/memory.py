"""Peak resident memory of every stage against the size of the checkpoint, on random checkpoints of two depths.

`python -m tests.bench.memory` (about 1B parameters and half as deep; some ten minutes on two cores, 7 GB of disk).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, LlamaConfig

from stages.decoder.skeleton import find_blocks
from tests.bench.project import idle_bytes, llama_config, make_project, run_stage

STAGES = (
    "capture", "statistics", "redundancy", "allocation", "masking", "removal", "ghost", "peeling", "compress",
    "evaluation@dense", "evaluation@compressed",
)  # fmt: skip


HEADER = "blocks  checkpoint   block  stage                  seconds     peak  less libraries  /checkpoint  /block"
ROW = "{:6d}  {:7.2f} GB  {:6.2f}  {:21s}  {:7.1f}  {:7.2f}  {:14.2f}  {:11.2f}  {:6.2f}"


def main() -> None:
    """Print a row per stage and depth: peak memory in GB, without the libraries, over the checkpoint and over one block."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    wanted = parser.parse_args()
    idle = idle_bytes()
    print(f"libraries alone: {idle / 1e9:.2f} GB; a block is counted in float32, the checkpoint is bfloat16\n{HEADER}")
    for blocks in wanted.blocks:
        config = llama_config(wanted.width, blocks)
        compute = {"dtype": "float32", "batch_tokens": wanted.length}
        with tempfile.TemporaryDirectory(dir=".") as folder:
            root = Path(folder).resolve()
            size = make_project(root, config, wanted.windows, wanted.length, compute=compute)
            block = block_parameters(config) * 4
            for stage in STAGES:
                used = run_stage(root, stage)
                own = used.peak_bytes - idle
                sizes = used.peak_bytes / 1e9, own / 1e9, own / size, own / block
                print(ROW.format(blocks, size / 1e9, block / 1e9, stage, used.seconds, *sizes), flush=True)


def block_parameters(config: LlamaConfig) -> int:
    """Parameters of one block."""
    with init_empty_weights():
        _, blocks = find_blocks(AutoModelForCausalLM.from_config(config))
    return sum(p.numel() for p in blocks[0].parameters())


if __name__ == "__main__":
    main()
