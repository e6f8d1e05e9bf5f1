"""What operators cost, as ratios from one run: run `make run` first, then `python -m tests.bench.operators`.

Parameters, bytes, prefill and decode speed of the exported model; and the fit from the tape against a forward pass that
collects all activations and one solve.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from pipeline.files import Files
from pipeline.graph import read_graph
from pipeline.params import read_params, stage_params
from pipeline.tensors import TensorFile, write_tensors
from stages.compress.run import run as compress
from stages.decoder.compute import Compute
from stages.decoder.masks import kept_name, mask_name, pack_mask
from stages.decoder.matrices import prunable_matrices
from stages.decoder.operators import read_removed, runs_of
from stages.decoder.skeleton import Decoder, find_blocks
from stages.ghost.run import run as ghost
from tests.bench.project import REPOSITORY

VARIANTS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "removed": {"method": "none"},
    "diagonal": {"method": "linearpatch_diag"},
    "ghost": {},
    "ghost, float32": {"accumulate": "float32"},
    "ghost, affine": {"method": "ghost_affine"},
    "ghost, low rank": {"method": "ghost_lowrank"},
    "ghost, sinks restored": {"sinks": "restore"},
    "ReplaceMe": {"method": "replaceme"},
}
ROW = "{:22s} {:>12s} {:>8s}  {:>14s} {:>6s}  {:>13s} {:>6s}"


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prefill")
    parser.add_argument("--made", type=int, default=24, help="tokens decoded")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="auto", help="of the timed models: auto as stages run, or bfloat16, float32")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, redirect_stderr(StringIO()):
        root = _project(Path(folder), wanted.data)
        _fits(root, wanted.repeats)
        _costs(root, wanted)


def _project(root: Path, data: Path) -> Path:
    """A folder with the demo's files, in which stages can run."""
    (root / "data").mkdir()
    for name in ("model", "tape.safetensors", "tokens.safetensors", "removal.json"):
        (root / "data" / name).symlink_to((data / name).resolve())
    masks: dict[str, torch.Tensor] = {}  # zeros take as long as other weights, so nothing is masked
    for index, block in enumerate(Decoder(data / "model").blocks):
        for matrix in prunable_matrices(block):
            keep = torch.ones(matrix.view(block).shape, dtype=torch.bool)
            masks[mask_name(index, matrix.name)] = pack_mask(keep)
            masks[kept_name(mask_name(index, matrix.name))] = torch.tensor(keep.numel())
    write_tensors(root / "data/masks.safetensors", masks)
    return root


def _run(root: Path, stage: str, run: Callable[..., None], **sections: Any) -> float:
    """Run a stage there with the defaults but for `sections`; seconds."""
    node, raw = read_graph(REPOSITORY / "dvc.yaml")[stage], read_params(REPOSITORY / "params.yaml")
    changed = {name: {**raw[name], **values} for name, values in sections.items()}
    params = stage_params(stage, {**raw, **changed}, list(node.params))
    begin = time.monotonic()
    with redirect_stdout(StringIO()):
        run(params, Files(stage, "deps", node.reads, root), Files(stage, "outs", node.writes, root))
    return time.monotonic() - begin


def _fits(root: Path, repeats: int) -> None:
    """The stage from the tape, against collecting all activations by hooks on the whole model and solving at once."""
    ids = TensorFile(root / "data/tokens.safetensors").read("calibration").long()
    removed = read_removed_run(root)
    model: Any = AutoModelForCausalLM.from_pretrained(root / "data/model", dtype=torch.float32).eval()
    blocks = find_blocks(model)[1]

    def collect() -> None:
        seen: dict[int, list[torch.Tensor]] = {at: [] for at in removed}
        hooks = [blocks[at].register_forward_pre_hook(_keep(some)) for at, some in seen.items()]
        with torch.inference_mode():
            for start in range(0, len(ids), 8):
                model.base_model(input_ids=ids[start : start + 8], use_cache=False)
        for hook in hooks:
            hook.remove()
        x, y = (torch.cat(some).double() for some in seen.values())
        torch.linalg.solve(x.T @ x + 1e-6 * torch.eye(x.shape[1], dtype=torch.float64), x.T @ (y - x))

    slow, quick = [], []
    for _ in range(min(repeats, 3)):
        begin = time.monotonic()
        collect()
        slow.append(time.monotonic() - begin)
        quick.append(_run(root, "ghost", ghost, ghost={"growth": False}))
    a, b = statistics.median(slow), statistics.median(quick)
    print(
        f"collect all activations and solve {a:.2f} s; stage ghost from the tape, with its diagnosis {b:.2f} s; ratio {a / b:.1f}"
    )


def _keep(some: list[torch.Tensor]) -> Any:
    return lambda module, args: some.append(args[0].flatten(0, 1))


def read_removed_run(root: Path) -> tuple[int, int]:
    """The first removed run [start, stop), which must not be at the end of the model."""
    return runs_of(read_removed(root / "data/removal.json", 10**6))[0]


def _costs(root: Path, wanted: argparse.Namespace) -> None:
    """Every variant exported and loaded, then timed in turn."""
    dtype = Compute(dtype=wanted.dtype).resolve_dtype()
    models: dict[str, Any] = {}
    for name, setting in VARIANTS.items():
        if setting is None:
            models[name] = AutoModelForCausalLM.from_pretrained(root / "data/model", dtype=dtype).eval()
            continue
        _run(root, "ghost", ghost, ghost={**setting, "growth": False})
        _run(root, "compress", compress)
        models[name] = AutoModelForCausalLM.from_pretrained(root / "data/compressed", dtype=dtype, trust_remote_code=True).eval()
    ids = TensorFile(root / "data/tokens.safetensors").read("calibration").long()[:1, : wanted.prompt]
    prefill: dict[str, list[float]] = {name: [] for name in models}
    decode: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(wanted.repeats):
        for name, model in models.items():
            once = _generate(model, ids, 1)
            prefill[name].append(once)
            decode[name].append((_generate(model, ids, 1 + wanted.made) - once) / wanted.made)
    how = f"prompt of {wanted.prompt} tokens, {wanted.made} decoded, {torch.get_num_threads()} threads"
    print(f"{str(dtype).removeprefix('torch.')}, {how}")
    print(ROW.format("variant", "parameters", "MB", "prefill tok/s", "ratio", "decode tok/s", "ratio"))
    base = statistics.median(prefill["dense"]), statistics.median(decode["dense"])
    for name, model in models.items():
        first, each = statistics.median(prefill[name]), statistics.median(decode[name])
        count = sum(p.numel() for p in model.parameters())
        size = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6
        speeds = [f"{wanted.prompt / first:.0f}", f"{base[0] / first:.2f}", f"{1 / each:.1f}", f"{base[1] / each:.2f}"]
        print(ROW.format(name, f"{count:,}", f"{size:.0f}", *speeds), flush=True)


def _generate(model: Any, ids: torch.Tensor, count: int) -> float:
    """Seconds to make `count` tokens with a cache."""
    begin = time.monotonic()
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=count, max_new_tokens=count, do_sample=False, pad_token_id=0
        )
    return time.monotonic() - begin


if __name__ == "__main__":
    main()
