"""What the pipeline adds to the work itself, on the demo: run `make run` first, then `python -m tests.bench.speed`.

Capture against the model's plain forward pass; a stage's start-up; a `dvc repro` that finds nothing to do.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from pipeline.tensors import TensorFile
from stages.decoder.compute import Compute
from stages.decoder.skeleton import Decoder
from stages.decoder.stream import Stream, advance, batches, embed

REPEATS = 3


def main() -> None:
    """Print medians and ratios."""
    ids = TensorFile(Path("data/tokens.safetensors")).read("calibration")
    compute = Compute()
    dtype, tokens = compute.resolve_dtype(), compute.batch_tokens
    model = AutoModelForCausalLM.from_pretrained("data/model", dtype=dtype).eval().base_model

    def plain() -> None:
        with torch.inference_mode():
            for start, stop in batches(len(ids), ids.shape[1], tokens):
                model(input_ids=ids[start:stop].long(), use_cache=False)

    def streamed() -> None:
        decoder = Decoder(Path("data/model"), dtype)
        with Stream(Path("data"), (*ids.shape, decoder.width), dtype) as stream:
            embed(decoder, ids, stream, tokens)
            for index in range(len(decoder)):
                with decoder.block(index):
                    advance(decoder, index, stream, tokens)

    forward, blocks = _in_turn(plain, streamed)
    print(f"plain forward pass {forward:.2f} s, block by block from disk {blocks:.2f} s, ratio {blocks / forward:.2f}")
    for what, code in (
        ("a stage without torch", "import stages.removal.run, pipeline.runner"),
        ("a stage with torch", "import stages.ghost.run, pipeline.runner"),
        ("a stage that runs the model", "import stages.capture.run, pipeline.runner"),
        ("torch alone", "import torch"),
        ("torch and transformers alone", "import torch; from transformers import AutoModelForCausalLM as A; A.from_config"),
    ):
        print(f"start-up of {what:30s} {_seconds([sys.executable, '-c', code]):5.2f} s")
    print(f"dvc repro with nothing to do              {_seconds([sys.executable, '-m', 'dvc', 'repro']):5.2f} s")


def _in_turn(*calls: Callable[[], None]) -> list[float]:
    """Median seconds of each call, run in turn so that a machine that slows down slows all alike."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(REPEATS):
        for call, some in zip(calls, times, strict=True):
            start = time.monotonic()
            call()
            some.append(time.monotonic() - start)
    return [statistics.median(some) for some in times]


def _seconds(command: list[str]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.monotonic() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
