"""What the stage leaves behind: tables, losses, the verdict, and the best reference as a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from pipeline.artifacts import write_json, write_table
from pipeline.console import say
from pipeline.files import Files
from pipeline.tensors import write_tensors
from stages.decoder.skeleton import Decoder
from stages.yes import Yes
from stages.yes.block import Weights
from stages.yes.chain import Fit
from stages.yes.keep import keep_nothing, keep_reference
from stages.yes.maps import Map, spell
from stages.yes.resume import Kept
from stages.yes.summary import BLOCKS, LAYERS, NETS, Net, block_table, layer_table, net_table, summary


def write_results(outputs: Files, nets: list[Net], fits: list[Fit], blocks: int, wanted: Yes, contract: dict[str, Any]) -> None:
    """Write the tables, the losses under their contract and the verdict, and say the latter."""
    write_table(outputs["yes.csv"], net_table(nets))
    write_table(outputs["yes_layers.csv"], layer_table(nets, fits, blocks, wanted.tolerance))
    write_table(outputs["yes_blocks.csv"], block_table(fits))
    losses = {part: torch.from_numpy(np.stack([getattr(net, part) for net in nets])) for part in ("train", "test")}
    write_tensors(outputs["yes.safetensors"], losses, {"nets": [net.name for net in nets], "axes": ["net", "window"]})
    found = {**summary(nets, wanted.tolerance), "contract": contract}
    write_json(outputs["yes.json"], found)
    say(f"verdict {found['verdict']} after the head control ({found['verdict_with_head']} with the head's share)")


def keep_best(folder: Path, decoder: Decoder, kept: Kept, targets: Map, best: Net, wanted: Yes, scored: int) -> None:
    """Write the best reference as a checkpoint, or say in the folder that none was asked for.

    Args:
        scored: tokens of each window that losses are means over.
    """
    if wanted.keep == "none":
        keep_nothing(folder, "yes.keep: none")
        return

    def block(slot: int) -> Weights:
        return _there(kept, f"block {spell(targets[: slot + 1])}")

    note: dict[str, Any] = {
        "map": best.name,
        "targets": list(targets),
        "role": "bound" if best.role == "bound" else "reference, not bound",
        "train_loss": float(best.train.mean()),
        "test_loss": float(best.test.mean()),
        "dtype": str(decoder.dtype).removeprefix("torch."),  # of the forward passes that gave the losses
        "train_windows": len(best.train),
        "train_tokens": len(best.train) * scored,
        "test_windows": len(best.test),
        "test_tokens": len(best.test) * scored,
        "note": "Blocks fitted one after another to streams of the model it stands beside, then a head by cross-entropy.",
    }
    keep_reference(folder, decoder, len(targets), block, _there(kept, f"head {best.name}"), note)
    say(f"{best.name} kept in {folder}")


def _there(kept: Kept, name: str) -> Weights:
    found = kept.read(name)
    assert found is not None, name
    return found[0]


def write_nothing(outputs: Files) -> None:
    """Write every output as it is where nothing was fitted."""
    for name, columns in (("yes.csv", NETS), ("yes_layers.csv", LAYERS), ("yes_blocks.csv", BLOCKS)):
        write_table(outputs[name], pd.DataFrame(columns=columns))
    nothing = torch.zeros(0, 0, dtype=torch.float64)
    write_tensors(outputs["yes.safetensors"], {"train": nothing, "test": nothing})
    write_json(outputs["yes.json"], {"maps": 0})
    keep_nothing(outputs["yes_best"], "yes.maps: none")
