"""Compare the residual stream at every pair of boundaries, from the tape."""

from __future__ import annotations

from itertools import combinations

import pandas as pd
import torch

from pipeline.artifacts import write_table
from pipeline.console import plan, progress, say
from pipeline.files import Files
from pipeline.tensors import write_tensors
from stages.decoder.tape import Tape
from stages.redundancy import Params
from stages.redundancy.cosine import token_cosines


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write the cosine of all boundary pairs (`redundancy_pairs.csv`), the influence of each block
    (`redundancy_blocks.csv`), and both per window (`redundancy.safetensors`: `cosine` float32 [window, boundary, boundary]).
    """
    tape, device = Tape(inputs["tape.safetensors"]), params.compute.resolve_device()
    chunk = max(1, min(tape.length, params.compute.batch_tokens // tape.boundaries))
    plan(
        memory=tape.boundaries * (tape.length + 3 * chunk) * tape.width * 4,
        disk=tape.windows * tape.boundaries**2 * 4,
        folder=outputs["redundancy_pairs.csv"].parent,
        memory_key="tokens.length or compute.batch_tokens",
        disk_key="tokens.calibration_windows",
    )
    cosine = torch.zeros(tape.windows, tape.boundaries, tape.boundaries, dtype=torch.float64)
    for window in progress(range(tape.windows), "window"):
        stream = [tape.read(boundary, window, window + 1)[0] for boundary in range(tape.boundaries)]
        for start in range(0, tape.length, chunk):
            tokens = torch.stack([one[start : start + chunk] for one in stream]).to(device)
            cosine[window] += token_cosines(tokens).sum(0, dtype=torch.float64).cpu()
        cosine[window] /= tape.length

    mean = cosine.mean(0)
    pairs = [{"i": i, "j": j, "cosine": float(mean[i, j])} for i, j in combinations(range(tape.boundaries), 2)]
    blocks = [_influence(cosine[:, block, block + 1], block) for block in range(tape.boundaries - 1)]
    write_table(outputs["redundancy_pairs.csv"], pd.DataFrame(pairs))
    write_table(outputs["redundancy_blocks.csv"], pd.DataFrame(blocks))
    write_tensors(outputs["redundancy.safetensors"], {"cosine": cosine.float()}, {"axes": ["window", "boundary", "boundary"]})
    least = min(blocks, key=lambda row: row["influence"])
    say(f"least influence: block {least['block']} ({least['influence']:.4f} ± {least['influence_error']:.4f})")


def _influence(cosine: torch.Tensor, block: int) -> dict[str, float]:
    """1 - mean cosine over windows, with its standard error (0 for a single window)."""
    error = float(cosine.std() / len(cosine) ** 0.5) if len(cosine) > 1 else 0.0
    return {"block": block, "influence": float(1 - cosine.mean()), "influence_error": error}
