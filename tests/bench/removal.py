"""What each removal criterion really costs, on the demo: run `make run` first, then `python -m tests.bench.removal`.

Every criterion that the saved scores allow, at n = 1, 3 and 5, on the evaluation windows under one contract; the loss of each
removal, bare and with ghosts (sinks kept out and restored) in the gaps. All of it is one wavefront from a tape of the
evaluation windows, so that a removal costs only the blocks behind its first gap. For iterative and recoverable, set
search.steps: 5 and search.windows: [1, 3, 5] before. `--data` is the folder with the stages' results.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.errors import PalimpsestError
from pipeline.files import Files
from pipeline.tensors import TensorFile, write_tensors
from stages.capture import Params as CaptureParams
from stages.capture.run import run as capture
from stages.decoder.compute import Compute
from stages.decoder.divergence import LOGIT_BYTES
from stages.decoder.operators import runs_of
from stages.decoder.skeleton import Decoder
from stages.decoder.tape import Tape
from stages.decoder.wavefront import Prompts, Step, Variant, chunks, sweep
from stages.redundancy.swaps import spearman
from stages.removal import Removal
from stages.removal.run import METHODS
from stages.removal.scores import Scores, read_scores
from stages.search.recoverable import recover

COUNTS = (1, 3, 5)
SETTINGS: dict[str, dict[str, Any]] = {
    "streamline": {},
    "streamline, channels": {"method": "streamline", "axis": "channel"},
    "shortgpt": {},
    "replacement": {},
    "replacement, spaced": {"method": "replacement", "spacing": 1},
    "interchange": {},
    "interchange, spaced": {"method": "interchange", "spacing": 1},
    "deletion": {},
    "iterative": {},
    "recoverable": {},
    **{f"random, seed {seed}": {"method": "random", "seed": seed} for seed in range(3)},
}
FORM = "{:>2}  {:22s}  {:18s}  {:>9s}  {:>18s}  {:>25s}  {:>11s}"
HEADS = ("n", "criterion", "blocks", "dppl", "interval", "to the best, nats", "with ghosts")


def main() -> None:
    """Print the table, the rank correlations, and what each criterion thinks of the block that makes the sink."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--length", type=int, default=128, help="tokens of each evaluation window")
    wanted = parser.parse_args()
    data: Path = wanted.data
    saved = read_scores(
        *(data / f"{name}.csv" for name in ("redundancy_blocks", "redundancy_pairs", "search_steps", "search_windows"))
    )
    protected = {0, saved.blocks - 1}
    choices = {(name, count): _choose(saved, name, count, protected) for name in SETTINGS for count in COUNTS}
    chosen = sorted({blocks for blocks in choices.values() if blocks})
    calibration = Tape(data / "tape.safetensors")
    compute = Compute(dtype=str(calibration.read(0, 0, 1).dtype).removeprefix("torch."))  # type: ignore[arg-type]
    decoder = Decoder(data / "model", compute.resolve_dtype(), compute.resolve_device())
    with tempfile.TemporaryDirectory(dir=data) as folder:
        ids = TensorFile(data / "tokens.safetensors").read("evaluation")[:, : wanted.length].contiguous()
        prompts = _record(Path(folder), data / "model", ids, compute)
        singles = [(block,) for block in range(1, saved.blocks - 1)]
        bare: dict[tuple[int, ...], Variant] = {one: Variant(dict.fromkeys(one)) for one in {*chosen, *singles}}
        ghosts = {one: _with_ghosts(one, calibration, compute, decoder) for one in chosen}
        losses = _losses(decoder, [Variant(), *bare.values(), *ghosts.values()], prompts, ids, compute.batch_tokens)
    dense, rest = losses[0], losses[1:]
    bare_losses, ghost_losses = dict(zip(bare, rest, strict=False)), dict(zip(ghosts, rest[len(bare) :], strict=True))
    _table(choices, dense, bare_losses, ghost_losses, ids)
    _ranks(saved, {block: bare_losses[block,] - dense for block in range(1, saved.blocks - 1)}, protected)


def _choose(saved: Scores, name: str, count: int, protected: set[int]) -> tuple[int, ...]:
    """The blocks of one criterion; none where its scores were not measured."""
    settings = {"method": name, "count": count, **SETTINGS[name]}
    try:
        return tuple(METHODS[settings["method"]](saved, Removal(**settings), protected)[0])
    except PalimpsestError as error:
        print(f"{name}, n = {count}: left out ({error})")
        return ()


def _with_ghosts(blocks: tuple[int, ...], tape: Tape, compute: Compute, decoder: Decoder) -> Variant:
    """The blocks removed, each run of them with an operator in its place, fitted on the calibration windows."""
    slots: dict[int, Step] = dict.fromkeys(blocks)
    for start, stop in runs_of(list(blocks)):
        slots[start] = recover(tape, start, stop, 0, 1e-4, 10.0, compute.batch_tokens, decoder.device).apply
    return Variant(slots)


def _record(root: Path, model: Path, ids: Tensor, compute: Compute) -> Prompts:
    """A tape of the evaluation windows, by stage capture."""
    (root / "data").mkdir()
    (root / "data/model").symlink_to(model.resolve())
    write_tensors(root / "data/tokens.safetensors", {"calibration": ids})
    outputs = Files("capture", "outs", ("tape.safetensors",), root)
    capture(CaptureParams(compute=compute), Files("capture", "deps", ("model", "tokens.safetensors"), root), outputs)
    tape = Tape(outputs["tape.safetensors"])
    return Prompts(tape, tape.windows, tape.length)


def _losses(decoder: Decoder, variants: Sequence[Variant], prompts: Prompts, ids: Tensor, batch_tokens: int) -> np.ndarray:
    """Mean loss per scored token, nats, [variant, window]."""
    many, together = chunks(len(variants), prompts, decoder.dtype.itemsize, 2 * 10**9)
    found = np.zeros((len(variants), prompts.count))
    for first in range(0, len(variants), together):
        for start in range(0, prompts.count, many):
            stop = min(start + many, prompts.count)
            finals = sweep(decoder, variants[first : first + together], prompts, start, stop, batch_tokens)
            with decoder.trunk(head=True):
                for index, final in enumerate(finals):
                    found[first + index, start:stop] = _window_losses(decoder, final, ids[start:stop])
    return found


def _window_losses(decoder: Decoder, final: Tensor, ids: Tensor) -> np.ndarray:
    vocabulary = decoder.checkpoint.config.get_text_config().vocab_size
    rows = max(1, LOGIT_BYTES // (4 * vocabulary * final.shape[1]))
    parts = []
    for start in range(0, len(final), rows):
        logits = decoder.logits(final[start : start + rows].to(decoder.device))[:, :-1].float()
        targets = ids[start : start + rows, 1:].long().to(decoder.device)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        parts.append(loss.view(targets.shape).mean(1, dtype=torch.float64).cpu())
    return torch.cat(parts).numpy()


def _table(
    choices: dict[tuple[str, int], tuple[int, ...]],
    dense: np.ndarray,
    bare: dict[tuple[int, ...], np.ndarray],
    ghosts: dict[tuple[int, ...], np.ndarray],
    ids: Tensor,
) -> None:
    base = float(np.exp(dense.mean()))
    scored = ids.shape[0] * (ids.shape[1] - 1)
    print(f"\nevaluation: {ids.shape[0]} windows of {ids.shape[1]} tokens, {scored:,} tokens scored; dense perplexity {base:.2f}")
    print("dppl: perplexity less the dense one; intervals: 95%, paired bootstrap over windows")
    print(FORM.format(*HEADS))
    for count in COUNTS:
        rows = {name: blocks for (name, n), blocks in choices.items() if n == count and blocks}
        best = min(rows.values(), key=lambda blocks: bare[blocks].mean())
        for name, blocks in sorted(rows.items(), key=lambda item: bare[item[1]].mean()):
            mean, low, high = _interval(bare[blocks] - dense)
            rise, least, most = (base * (np.exp(value) - 1) for value in (mean, low, high))
            gap = "best" if blocks == best else "{:+.3f} ({:+.3f} to {:+.3f})".format(*_interval(bare[blocks] - bare[best]))
            repaired = base * (np.exp((ghosts[blocks] - dense).mean()) - 1)
            cells = f"{rise:+.2f}", f"{least:+.2f} to {most:+.2f}", gap, f"{repaired:+.2f}"
            print(FORM.format(count, name, " ".join(map(str, blocks)), *cells))


def _interval(values: np.ndarray) -> tuple[float, float, float]:
    draws = np.random.default_rng(0).integers(0, len(values), (1000, len(values)))
    low, high = np.quantile(values[draws].mean(1), [0.025, 0.975])
    return float(values.mean()), float(low), float(high)


def _ranks(saved: Scores, cost: dict[int, np.ndarray], protected: set[int]) -> None:
    """Spearman of each score of a block with the rise in loss when it alone is removed, and the rank of the sink's maker."""
    blocks = sorted(cost)
    truth = np.array([cost[block].mean() for block in blocks])
    table = saved.block_table
    scores = {name: np.asarray(table[name], dtype=float)[blocks] for name in ("influence", "influence_sinkless", "angular")}
    scores["CKA, 1 -"] = 1 - np.asarray(table["cka"], dtype=float)[blocks]
    channel = saved.cosines("channel")
    scores["cosine along tokens, 1 -"] = np.array([1 - channel[block, block + 1] for block in blocks])
    for name in ("replacement", "interchange", "deletion", "recoverable"):
        try:
            found = METHODS[name](saved, Removal(method=name, count=1), protected)[1]  # type: ignore[arg-type]
            scores[name] = np.array([found.get(block, np.nan) for block in blocks])
        except PalimpsestError:
            continue
    marks = dict(zip(saved.block_table["block"].tolist(), saved.block_table["sink"].tolist(), strict=True))
    makers = [block for block in blocks if marks[block] == "makes"]
    print(
        "\nSpearman with the true cost of removing one block; rank of the block that makes the sink "
        f"(1 of {len(blocks)} goes first)"
    )
    for name, values in scores.items():
        ranks = "".join(f"  block {one}: {1 + int((values < values[blocks.index(one)]).sum())}" for one in makers)
        print(f"{name:26s}  {spearman(values, truth):+.2f}{ranks}")
    print(
        f"{'the truth':26s}      "
        + "".join(f"  block {one}: {1 + int((truth < truth[blocks.index(one)]).sum())}" for one in makers)
    )


if __name__ == "__main__":
    main()
