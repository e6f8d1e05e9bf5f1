"""Compare the stream at all boundaries, from the tape, and the model's output with blocks deleted, replaced, interchanged."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from pipeline.artifacts import write_json, write_table
from pipeline.console import plan, progress, say
from pipeline.files import Files
from pipeline.tensors import write_tensors
from stages.decoder.skeleton import Decoder
from stages.decoder.tape import Tape
from stages.decoder.wavefront import Prompts, measure, sweep_memory
from stages.redundancy import Params, Redundancy
from stages.redundancy.cka import block_ckas
from stages.redundancy.cosine import channel_cosines, sink_blocks, sink_tokens, token_cosines
from stages.redundancy.swaps import Pair, half_against_all, intervals, pairs_within, swap_variants
from stages.redundancy.verdict import verdict

SWAPS = ("replacement_ij", "replacement_ji", "interchange")


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write what was found per pair (`redundancy_pairs.csv`), per block (`redundancy_blocks.csv`), per window and prompt
    (`redundancy.safetensors`), and the verdict (`redundancy.json`).

    Row (i, j) of the pairs: cosines and angular distance between boundaries i and j, that is, across the blocks i to j - 1;
    replacement and interchange of the blocks i and j. KL(dense || variant), nats.
    """
    wanted, compute = params.redundancy, params.compute
    tape, device = Tape(inputs["tape.safetensors"]), compute.resolve_device()
    prompts = _prompts(tape, wanted)
    decoder = Decoder(inputs["model"], compute.resolve_dtype(), device)
    tape.check_model(len(decoder), decoder.width)
    types = decoder.block_types()
    pairs, unlike = pairs_within(types, wanted.gap) if wanted.swaps else ([], [])
    variants = swap_variants(len(decoder), pairs) if wanted.swaps else []
    chunk = max(1, min(tape.length, compute.batch_tokens // tape.boundaries))
    streams = tape.boundaries * (2 * tape.length + 3 * chunk) * tape.width * 4
    plan(
        memory=max(streams, 7 * tape.width**2 * 8, sweep_memory(decoder, variants, prompts, wanted.memory, compute.batch_tokens)),
        disk=tape.windows * tape.boundaries**2 * 4,
        folder=outputs["redundancy_pairs.csv"].parent,
        memory_key="redundancy.memory, tokens.length or compute.batch_tokens",
        disk_key="tokens.calibration_windows",
    )
    alike = _compare_streams(tape, chunk, wanted.sink_threshold, device)
    kl = measure(decoder, variants, prompts, batch_tokens=compute.batch_tokens, memory=wanted.memory, positions=wanted.positions)
    deletion, swapped = kl[: len(decoder)], kl[len(decoder) :].unflatten(0, (-1, 3)) if pairs else kl.new_zeros(0, 3, len(kl.T))

    table = _pair_rows(alike, tape.boundaries, pairs, swapped.numpy(), wanted)
    blocks = _block_rows(alike, types, deletion.numpy(), block_ckas(tape, compute.batch_tokens, device), wanted)
    write_table(outputs["redundancy_pairs.csv"], table)
    write_table(outputs["redundancy_blocks.csv"], blocks)
    tensors = {"cosine": alike["windows"].float()}
    if wanted.swaps:
        tensors |= {"deletion": deletion, **{name: swapped[:, place] for place, name in enumerate(SWAPS)}}
        tensors["pairs"] = torch.tensor(pairs, dtype=torch.int32).reshape(-1, 2)
    axes = {"cosine": ["window", "boundary", "boundary"], "deletion": ["block", "prompt"], "others": ["pair", "prompt"]}
    write_tensors(outputs["redundancy.safetensors"], tensors, {"axes": axes, "unit": "nats"})
    write_json(
        outputs["redundancy.json"],
        {
            **_verdict(table, blocks, deletion.numpy(), swapped.numpy(), unlike, types, prompts, wanted),
            "contract": {
                "prompts": prompts.count,
                "length": prompts.length,
                "positions": wanted.positions,
                "dtype": str(decoder.dtype).removeprefix("torch."),
            },
        },
    )
    least = blocks.loc[blocks.influence.idxmin()]
    say(f"least influence: block {least.block} ({least.influence:.4f} ± {least.influence_error:.4f})")


def _prompts(tape: Tape, wanted: Redundancy) -> Prompts:
    """As many prompts, as long, as the tape has; says so where that is less than what was asked for."""
    count, length = min(wanted.prompts, tape.windows), min(wanted.length, tape.length)
    if wanted.swaps and (count, length) != (wanted.prompts, wanted.length):
        say(f"{count} prompts of {length} tokens: the tape has no more (tokens.calibration_windows, tokens.length)")
    return Prompts(tape, count, length)


def _compare_streams(tape: Tape, chunk: int, threshold: float, device: str) -> dict[str, Tensor]:
    """Means over tokens per pair of boundaries, float64: `windows` [window, boundary, boundary] and the others without
    the window; and `peaks` [boundary], the largest |channel| of all tokens, `sinks` [boundary], whether one is a sink there."""
    square = tape.boundaries, tape.boundaries
    found = {name: torch.zeros(square, dtype=torch.float64) for name in ("sinkless", "angular", "channel")}
    found["windows"] = torch.zeros(tape.windows, *square, dtype=torch.float64)
    found["peaks"] = torch.zeros(tape.boundaries)
    found["sinks"] = torch.zeros(tape.boundaries, dtype=torch.bool)
    others = 0
    for window in progress(range(tape.windows), "window"):
        stream = torch.stack([tape.read(boundary, window, window + 1)[0] for boundary in range(tape.boundaries)])
        sinks = sink_tokens(stream, threshold)
        found["sinks"] |= sinks.any(1)
        rest = ~sinks.any(0)
        others += int(rest.sum())
        found["peaks"] = torch.maximum(found["peaks"], stream.abs().amax((1, 2)).float())
        for start in range(0, tape.length, chunk):
            cosines = token_cosines(stream[:, start : start + chunk].to(device)).double().cpu()
            found["windows"][window] += cosines.sum(0) / tape.length
            found["sinkless"] += cosines[rest[start : start + chunk]].sum(0)
            found["angular"] += cosines.arccos().sum(0) / torch.pi
        width = max(1, chunk * tape.width // tape.length)
        for first in range(0, tape.width, width):
            found["channel"] += channel_cosines(stream[:, :, first : first + width].to(device)).sum(0, dtype=torch.float64).cpu()
    found["sinkless"] /= max(1, others)
    found["angular"] /= tape.windows * tape.length
    found["channel"] /= tape.windows * tape.width
    return found


def _pair_rows(
    alike: dict[str, Tensor], boundaries: int, pairs: list[Pair], swapped: np.ndarray, wanted: Redundancy
) -> pd.DataFrame:
    i, j = np.array(list(combinations(range(boundaries), 2))).T
    cosine = alike["windows"].mean(0)
    columns: dict[str, Any] = {"i": i, "j": j, "cosine": cosine[i, j].numpy()}
    columns["cosine_sinkless"] = alike["sinkless"][i, j].numpy()
    columns["cosine_channel"] = alike["channel"][i, j].numpy()
    columns["angular"] = alike["angular"][i, j].numpy()
    table = pd.DataFrame(columns)
    measured = pd.DataFrame(pairs, columns=["i", "j"])
    means = dict(zip(SWAPS, swapped.mean(-1).T, strict=True)) if pairs else dict.fromkeys(SWAPS, np.zeros(0))
    measured["replacement_ij"], measured["replacement_ji"] = means["replacement_ij"], means["replacement_ji"]
    measured["replacement"] = np.maximum(means["replacement_ij"], means["replacement_ji"])
    measured["replacement_mean"] = (means["replacement_ij"] + means["replacement_ji"]) / 2
    measured["interchange"] = means["interchange"]
    measured["gap"] = measured.replacement - measured.interchange
    measured["ratio"] = measured.interchange / measured.replacement.where(measured.replacement > 0)
    larger = np.where((means["replacement_ij"] >= means["replacement_ji"])[:, None], swapped[:, 0], swapped[:, 1])
    larger = np.where(np.isfinite(measured.replacement.to_numpy())[:, None], larger, np.nan)  # no interval of half a pair
    for name, values in (("replacement", larger), ("interchange", swapped[:, 2])):
        measured[f"{name}_low"], measured[f"{name}_high"] = intervals(values, wanted.confidence, wanted.resamples, wanted.seed)
    return table.merge(measured, on=["i", "j"], how="left")


def _block_rows(
    alike: dict[str, Tensor], types: list[str], deletion: np.ndarray, ckas: list[float], wanted: Redundancy
) -> pd.DataFrame:
    steps = alike["windows"].diagonal(1, 1, 2)  # [window, block]
    error = steps.std(0) / len(steps) ** 0.5 if len(steps) > 1 else torch.zeros(len(types))
    makes, ends = sink_blocks(alike["peaks"], alike["sinks"], wanted.sink_threshold)
    table = pd.DataFrame({"block": range(len(types)), "influence": 1 - steps.mean(0).numpy(), "influence_error": error.numpy()})
    table["influence_sinkless"] = 1 - alike["sinkless"].diagonal(1).numpy()
    table["angular"] = alike["angular"].diagonal(1).numpy()
    table["cka"] = ckas
    table["deletion"] = deletion.mean(1) if len(deletion) else np.nan
    low_high = intervals(deletion, wanted.confidence, wanted.resamples, wanted.seed) if len(deletion) else (np.nan, np.nan)
    table["deletion_low"], table["deletion_high"] = low_high
    table["peak"] = alike["peaks"][1:].numpy()
    table["sink"] = ["makes" if block == makes else "ends" if block == ends else "" for block in range(len(types))]
    table["type"] = types
    return table


def _verdict(
    table: pd.DataFrame,
    blocks: pd.DataFrame,
    deletion: np.ndarray,
    swapped: np.ndarray,
    unlike: list[Pair],
    types: list[str],
    prompts: Prompts,
    wanted: Redundancy,
) -> dict[str, Any]:
    """The regime, how far the prompts suffice, what was left out, and what was not finite; said as well as returned."""
    last = len(types) - 1
    apart = np.array([pair in set(unlike) for pair in zip(table.i, table.j, strict=True)], dtype=bool)
    inner = table[(table.j - table.i == 1) & (table.i > 0) & (table.j < last) & ~apart]
    found = (
        verdict(inner.replacement.to_numpy(), inner.interchange.to_numpy(), wanted.tied, wanted.divergent)
        if wanted.swaps
        else {"regime": "not measured (redundancy.swaps: false)", "pairs": 0}
    )
    items = {name: swapped[:, place] for place, name in enumerate(SWAPS)} | {"deletion": deletion}
    ranks = {name: half_against_all(values) for name, values in items.items() if len(values) > 1 and prompts.count > 1}
    found["half_against_all"] = {name: rank for name, rank in ranks.items() if np.isfinite(rank)}
    found |= {"positions": wanted.positions, "prompts": prompts.count, "length": prompts.length, "measured": wanted.swaps}
    found["sink_made_by"] = [int(block) for block in blocks.block[blocks.sink == "makes"]]
    found["sink_ended_by"] = [int(block) for block in blocks.block[blocks.sink == "ends"]]
    found["unlike_pairs"] = [{"i": i, "j": j, "types": [types[i], types[j]]} for i, j in unlike]
    broken = sorted(name for name, values in items.items() if not np.isfinite(values).all())
    found["not_finite"] = broken
    if broken:
        say(f"not finite for some variants, and left empty: {', '.join(broken)}; try compute.dtype: float32")
    if unlike:
        some = "; ".join(f"{i}-{j}: {types[i]} and {types[j]}" for i, j in unlike[:3])
        say(f"{len(unlike)} pairs of unlike blocks not measured ({some})")
    if "note" in found:
        say(found["note"])
    say(f"regime: {found['regime']}" + (f", interchange / replacement {found['ratio']:.2f}" if "ratio" in found else ""))
    return found
