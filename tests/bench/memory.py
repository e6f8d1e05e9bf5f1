"""Peak resident memory of every stage against the size of the checkpoint, on random checkpoints of two depths.

`python -m tests.bench.memory` (about 1B parameters and half as deep; some ten minutes on two cores, 7 GB of disk).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.bench.project import idle_bytes, llama_config, make_project, run_stage

STAGES = (
    "capture", "statistics", "redundancy", "allocation", "masking", "removal", "ghost", "peeling", "compress",
    "evaluation@dense", "evaluation@compressed",
)  # fmt: skip


def main() -> None:
    """Print a table: per stage and depth, peak memory as it is, without the libraries, and as a share of the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    wanted = parser.parse_args()
    idle = idle_bytes()
    print(f"libraries alone: {idle / 1e9:.2f} GB\n")
    print("blocks  checkpoint  block  stage                   seconds   peak  less libraries  /checkpoint  /block")
    for blocks in wanted.blocks:
        config = llama_config(wanted.width, blocks)
        with tempfile.TemporaryDirectory(dir=".") as folder:
            size = make_project(
                Path(folder).resolve(), config, wanted.windows, wanted.length, compute={"dtype": "float32", "batch_tokens": wanted.length}
            )
            block = _block_parameters(config) * 4
            for stage in STAGES:
                used = run_stage(Path(folder).resolve(), stage)
                own = used.peak_bytes - idle
                print(
                    f"{blocks:6d}  {size / 1e9:7.2f} GB  {block / 1e9:.2f}  {stage:22s}  {used.seconds:7.1f}  {used.peak_bytes / 1e9:5.2f}"
                    f"  {own / 1e9:14.2f}  {own / size:11.2f}  {own / block:6.2f}",
                    flush=True,
                )


def _block_parameters(config: object) -> int:
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    from stages.decoder.skeleton import find_blocks

    with init_empty_weights():
        _, blocks = find_blocks(AutoModelForCausalLM.from_config(config))
    return sum(p.numel() for p in blocks[0].parameters())


if __name__ == "__main__":
    main()
