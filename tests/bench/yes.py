"""What references cost, on random checkpoints: `python -m tests.bench.yes` (some minutes on two cores).

All staircases with what they share against each by itself, in one run; seconds per block and per head; heads stacked against
heads apart; the stage's peak memory at two depths.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.bench.process import REPOSITORY, make_apart, run_apart

STEPS = {"steps": 30, "check": 10, "patience": 0, "head_steps": 30, "batch_tokens": 1024, "test": "held_out"}


def main() -> None:
    """Print all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=4, help="of the model whose staircases are fitted")
    parser.add_argument("--deep-width", type=int, default=1024, help="of the models whose memory is measured")
    parser.add_argument("--deep", type=int, nargs=2, default=[8, 16])
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    wanted = parser.parse_args()
    _, idle = run_apart(["-c", "import stages.yes.run"], REPOSITORY)
    print(f"libraries alone: {idle / 1e9:.2f} GB")
    for blocks in wanted.deep:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            root = _project(Path(folder).resolve(), wanted.deep_width, blocks, wanted.windows, wanted.length, maps=["first_last"])
            run_apart(["-m", "pipeline.runner", "capture"], root)
            seconds, peak = run_apart(["-m", "pipeline.runner", "yes"], root)
            size = sum(file.stat().st_size for file in (root / "data/model").glob("*.safetensors"))
            own, whole = (peak - idle) / 1e9, size / 1e9
            print(f"{blocks} blocks, checkpoint {whole:.2f} GB: {own:.2f} GB above the libraries, {seconds:.0f} s", flush=True)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        root = _project(Path(folder).resolve(), wanted.width, wanted.blocks, wanted.windows, wanted.length, maps="staircases")
        run_apart(["-m", "pipeline.runner", "capture"], root)
        _trie_and_heads(root)
    _stacked_heads()


def _project(root: Path, width: int, blocks: int, windows: int, length: int, **yes: Any) -> Path:
    """A project around a random model, made in a process of its own, with the section `yes` set."""
    make_apart(root, width, blocks, windows, length)
    yaml = YAML(typ="safe", pure=True)
    params = yaml.load(root / "params.yaml")
    params["yes"].update(STEPS, **yes)
    yaml.dump(params, root / "params.yaml")
    return root


def _trie_and_heads(root: Path) -> None:
    from pipeline.params import read_params, stage_params
    from pipeline.tensors import TensorFile
    from stages.decoder.skeleton import Decoder
    from stages.decoder.stream import Stream
    from stages.decoder.tape import Tape
    from stages.yes.chain import Solver
    from stages.yes.judge import Judge, own_streams
    from stages.yes.maps import staircases
    from stages.yes.parts import Parts, ask_calls
    from stages.yes.resume import Kept

    params: Any = stage_params("yes", read_params(root / "params.yaml"), ["compute", "yes"])
    decoder, tape = Decoder(root / "data/model"), Tape(root / "data/tape.safetensors")
    ids = TensorFile(root / "data/tokens.safetensors").read("calibration")
    parts, batch = Parts(len(ids) - 2, 2, 0), params.compute.batch_tokens
    ask_calls(decoder, parts, tape.length, params.yes.batch_tokens, batch)
    maps = staircases(len(decoder))
    with ExitStack() as alive:
        shape = (*ids.shape, decoder.width)
        first, last = (alive.enter_context(Stream(root, shape, decoder.dtype)) for _ in range(2))
        own_streams(decoder, tape, ids, parts, first, last, batch)

        def solved(some: dict[str, Any], name: str) -> tuple[float, int, dict[str, Stream]]:
            solver = Solver(decoder, params.yes, parts, batch, Kept(root / name, name), root)
            begin = time.monotonic()
            finals, fits = solver.solve(some, first, lambda at, windows: _read(tape, at, windows), alive)
            return time.monotonic() - begin, len(fits), finals

        each = [solved({name: targets}, f"alone-{name}") for name, targets in maps.items()]
        shared, fits, finals = solved(maps, "together")
        apart, many = sum(one[0] for one in each), sum(one[1] for one in each)
        judge = Judge(decoder, ids, parts, params.yes, Kept(root / "heads", "heads"))
        for name, final in finals.items():
            judge.refitted(name, final, "bound", maps[name])
    together, alone = f"together {shared:.1f} s ({fits} fits)", f"each by itself {apart:.1f} s ({many} fits)"
    print(f"\n{len(maps)} maps: {together}, {alone}, ratio {shared / apart:.2f}")
    block, head, share = shared / fits, judge.seconds / judge.fitted, judge.seconds / (judge.seconds + shared)
    print(f"a block {block:.2f} s, a head {head:.2f} s; heads take {share:.0%} of all fits' time")


def _stacked_heads(vocabulary: int = 12_288, width: int = 576, positions: int = 256, heads: int = 3, steps: int = 3) -> None:
    """A step of several heads in one batched product, against as many steps of one; the time is the processor's."""
    import torch
    from torch import Tensor, nn

    from stages.yes.descent import OPTIMISERS

    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(heads, vocabulary, width, generator=generator) * 0.02
    hidden = torch.randn(heads, positions, width, generator=generator).bfloat16()
    behind = torch.randint(0, vocabulary, (positions,), generator=generator)

    def spent(parts: list[slice]) -> float:
        leaves = [matrices[part].clone().requires_grad_() for part in parts]
        rules = [OPTIMISERS["adamw"]([leaf], lr=1e-4) for leaf in leaves]

        def step(part: slice, leaf: Tensor, rule: torch.optim.Optimizer) -> None:
            rule.zero_grad(set_to_none=True)
            one = leaf.shape[0] == 1
            weight, some = (leaf[0], hidden[part][0]) if one else (leaf, hidden[part])
            logits = (some @ weight.bfloat16().mT).float().view(-1, vocabulary)
            nn.functional.cross_entropy(logits, behind.repeat(len(leaf))).mul(len(leaf)).backward()
            nn.utils.clip_grad_norm_([leaf], 1.0)
            rule.step()

        for count in (1, steps):
            begin = time.process_time()
            for _ in range(count):
                for part, leaf, rule in zip(parts, leaves, rules, strict=True):
                    step(part, leaf, rule)
        return (time.process_time() - begin) / steps

    apart, stacked = spent([slice(at, at + 1) for at in range(heads)]), spent([slice(0, heads)])
    print(f"a step of {heads} heads: stacked {stacked:.2f} s, one after another {apart:.2f} s, ratio {stacked / apart:.2f}")


def _read(tape: Any, boundary: int, windows: Any) -> Any:
    import torch

    return torch.cat([tape.read(boundary, one, one + 1) for one in windows])


if __name__ == "__main__":
    main()
