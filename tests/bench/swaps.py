"""The wavefront against plain forward passes, on the demo: run `make run` first, then `python -m tests.bench.swaps`.

All adjacent pairs in both directions and interchanged, and all deletions, in one sweep; the same by the plain model with its
list of blocks rewired, run in full for each variant. Then what the sweep costs against depth and gap, and how often it reads
the weights of a checkpoint larger than the memory it is allowed, both on random checkpoints. `--data` is the folder with the
stages' results, `--sample` how many variants the plain side runs (its total is extrapolated; 0: all of them).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from pipeline.tensors import TensorFile
from stages.capture.run import run as capture
from stages.decoder.compute import Compute
from stages.decoder.skeleton import Decoder, find_blocks
from stages.decoder.tape import Tape
from stages.decoder.wavefront import Prompts, Variant, chunks, measure
from stages.redundancy.swaps import pairs_within, swap_variants
from tests.bench.process import make_apart
from tests.bench.project import llama_config, make_project

REPOSITORY = Path(__file__).parents[2]
MEMORY, BATCH = 10**9, 4096


def main() -> None:
    """Print three tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--sample", type=int, default=8)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.child:
        _child(wanted.child)
        return
    _against_plain(wanted.data, wanted.prompts, wanted.length, wanted.sample)
    _depth_and_gap()
    _larger_than_memory()


def _against_plain(data: Path, count: int, length: int, sample: int) -> None:
    tape = Tape(data / "tape.safetensors")
    dtype = tape.read(0, 0, 1).dtype
    decoder = Decoder(data / "model", dtype)
    prompts = Prompts(tape, count, length)
    variants = swap_variants(len(decoder), pairs_within(decoder.block_types(), 1)[0])
    start = time.monotonic(), time.process_time()
    found = measure(decoder, variants, prompts, batch_tokens=BATCH, memory=MEMORY).mean(1)
    sweep = time.monotonic() - start[0], time.process_time() - start[1]

    ids = TensorFile(data / "tokens.safetensors").read("calibration")[:count, :length].long()
    model = AutoModelForCausalLM.from_pretrained(data / "model", dtype=dtype).eval()
    some = range(len(variants)) if not sample else range(0, len(variants), max(1, len(variants) // sample))
    with torch.inference_mode():
        log_p = _log_probabilities(model, ids)
        p = log_p.exp()
        start = time.monotonic(), time.process_time()
        plain = [_plain(model, variants[index], ids, p, log_p) for index in some]
        whole = [
            (now - then) / len(some) * len(variants)
            for now, then in zip((time.monotonic(), time.process_time()), start, strict=True)
        ]
    gap = max(abs(value - float(found[index])) for index, value in zip(some, plain, strict=True))
    how = f"from {len(some)} of them" if sample else "all run"
    threads = torch.get_num_threads()
    print(f"\n{len(variants)} variants of {len(decoder)} blocks, {count} prompts of {length} tokens, {threads} threads")
    print(f"plain forward passes  wall {whole[0]:7.1f} s  processor {whole[1]:7.1f} s  ({how})")
    print(f"one wavefront         wall {sweep[0]:7.1f} s  processor {sweep[1]:7.1f} s")
    print(f"ratio                 wall {whole[0] / sweep[0]:7.2f}    processor {whole[1] / sweep[1]:7.2f}")
    print(f"largest difference of a KL that both measured: {gap:.1e} nats")
    many, together = chunks(len(variants), prompts, dtype.itemsize, MEMORY)
    print(f"chunks of {many} prompts and {together} variants for {MEMORY / 1e9:g} GB of streams", flush=True)


def _plain(model: Any, variant: Variant, ids: Tensor, p: Tensor, log_p: Tensor) -> float:
    """KL of one variant, by the whole model with its list of blocks rewired. Nothing is kept but the dense log-probabilities."""
    path, blocks = find_blocks(model)
    kept = [variant.slots.get(slot, slot) for slot in range(len(blocks))]
    parent = model.get_submodule(path.rpartition(".")[0])
    rewired = torch.nn.ModuleList([blocks[block] for block in kept if isinstance(block, int)])
    setattr(parent, path.rpartition(".")[2], rewired)
    layers, model.config.num_hidden_layers = model.config.num_hidden_layers, len(rewired)
    try:
        difference = log_p - _log_probabilities(model, ids)
    finally:
        setattr(parent, path.rpartition(".")[2], blocks)
        model.config.num_hidden_layers = layers
    return float(torch.linalg.vecdot(p, difference).mean(dtype=torch.float64))


def _log_probabilities(model: Any, ids: Tensor) -> Tensor:
    return torch.log_softmax(model(input_ids=ids, use_cache=False).logits.float(), -1)


def _depth_and_gap() -> None:
    """Seconds, reads of a block and products of a block, on random checkpoints: width 256, 4 prompts of 64 tokens."""
    print("\nblocks  gap  variants  seconds  reads/block  block products: wavefront  plain  ratio")
    for depth, gap in ((8, 1), (16, 1), (32, 1), (16, 2), (16, 4), (16, 15)):
        with tempfile.TemporaryDirectory(dir=".") as folder:
            decoder, prompts = _random(Path(folder).resolve(), 256, depth, 4, 64)
            variants = swap_variants(depth, pairs_within(decoder.block_types(), gap)[0])
            reads, products = _count(decoder, prompts.count)
            start = time.monotonic()
            measure(decoder, variants, prompts, batch_tokens=BATCH, memory=MEMORY)
            seconds, plain = time.monotonic() - start, len(variants) * depth
            row = depth, gap, len(variants), seconds, (len(reads) - 1) / depth, sum(products), plain, plain / sum(products)
            print("{:6d}  {:3d}  {:8d}  {:7.1f}  {:11.2f}  {:25d}  {:5d}  {:5.2f}".format(*row), flush=True)


def _larger_than_memory() -> None:
    """A checkpoint, and the peak of a process that sweeps it, as the operating system counts it."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        root = Path(folder).resolve()
        make_apart(root, 1024, 24, 2, 32)
        size = sum(file.stat().st_size for file in (root / "data/model").glob("*.safetensors"))
        idle, _ = _ask(["-c", "import stages.capture.run, tests.bench.swaps as bench; print(bench._peak())"])
        peak, said = _ask(["-m", "tests.bench.swaps", "--child", str(root)])
        print(f"\n24 blocks of width 1024, {size / 1e9:.2f} GB on disk, {2 * size / 1e9:.2f} GB in float32")
        print(f"peak memory {peak / 1e9:.2f} GB, of which libraries {idle / 1e9:.2f} GB; {said}")


def _child(root: Path) -> None:
    decoder, prompts = _open(root)
    variants = swap_variants(len(decoder), pairs_within(decoder.block_types(), 1)[0])
    memory = len(variants) * 32 * decoder.width * 4  # one prompt at a time
    reads, _ = _count(decoder, 1)
    measure(decoder, variants, prompts, batch_tokens=256, memory=memory)
    many, _ = chunks(len(variants), prompts, 4, memory)
    parts = -(-prompts.count // many)
    print(
        f"{len(variants)} variants in {parts} chunks, each block read {(len(reads) - 1) / len(decoder) / parts:.2f} times a chunk"
    )
    print(_peak())


def _count(decoder: Decoder, prompts: int) -> tuple[list[int], list[int]]:
    """Notes every block that is read (block 0 once more, to see what it returns), and how many streams each product takes."""
    reads: list[int] = []
    products: list[int] = []
    load, call = decoder._load, decoder.call

    def noted_load(group: int) -> None:
        reads.extend([group] if group >= 0 else [])
        load(group)

    def noted_call(index: int, hidden: Tensor) -> Tensor:
        products.append(len(hidden) // prompts)
        return call(index, hidden)

    decoder._load, decoder.call = noted_load, noted_call  # type: ignore[method-assign]
    return reads, products


def _random(root: Path, width: int, depth: int, count: int, length: int) -> tuple[Decoder, Prompts]:
    make_project(root, llama_config(width, depth, 4096), count, length)
    return _open(root)


def _open(root: Path) -> tuple[Decoder, Prompts]:
    """The decoder of a project's folder and prompts of its tape, recorded first."""
    from pipeline.files import Files
    from stages.capture import Params

    params = Params(compute=Compute(dtype="float32"))
    outputs = Files("capture", "outs", ("tape.safetensors",), root)
    capture(params, Files("capture", "deps", ("model", "tokens.safetensors"), root), outputs)
    tape = Tape(outputs["tape.safetensors"])
    return Decoder(root / "data/model"), Prompts(tape, tape.windows, tape.length)


def _ask(arguments: Sequence[str]) -> tuple[int, str]:
    """Run Python in a process of its own: the two last lines it prints, the first of them a number."""
    done = subprocess.run([sys.executable, *arguments], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    lines = ["", *done.stdout.strip().splitlines()]
    return int(lines[-1]), lines[-2]


def _peak() -> int:
    """Peak resident bytes of this process since it began, whatever its parent was (Linux)."""
    status = Path("/proc/self/status").read_text().split("VmHWM:")[1]
    return int(status.split()[0]) * 1024


if __name__ == "__main__":
    main()
