"""masks.safetensors as it is written (`stages.decoder.masks` reads it), and the rows of masks.csv."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import PalimpsestError
from pipeline.tensors import Spec, TensorWriter
from stages.decoder.masks import kept_name, pack_mask, packed_shape, weight_name
from stages.masking.budget import Budget, Pruned, kept_share
from stages.masking.inputs import Inputs


def open_masks(path: Path, planned: Mapping[str, tuple[tuple[int, ...], Budget]], mended: torch.dtype | None) -> TensorWriter:
    """The file of masks; with `mended`, the checkpoint's dtype, also of the weights that the method changes.

    Args:
        planned: name of a mask -> the shape (out, in) of its matrix, and what that gives up.
    """
    specs: dict[str, Spec] = {}
    for name, (size, wish) in planned.items():
        specs |= {name: (packed_shape(size), torch.uint8), kept_name(name): ((1,), torch.int64)}
        if mended is not None and wish.share > 0:
            specs[weight_name(name)] = (size, mended)
    return TensorWriter(path, specs, {"bits": "1 = kept; least significant bit first, along the inputs"})


def write_mask(file: TensorWriter, name: str, weight: Tensor, one: Pruned) -> None:
    """Write a mask, and the weights where they are to be changed; leave in `weight` what the export will hold.

    `weight` is as precise as the checkpoint or more so, never less: what is written was rounded to the checkpoint's dtype alone.
    """
    file.write(name, pack_mask(one.keep))
    file.write(kept_name(name), one.keep.sum().view(1))
    if weight_name(name) in file.specs:
        stored = file.specs[weight_name(name)][1]
        if one.weight is not None:
            weight.copy_(one.weight.to(stored))
        weight.masked_fill_(~one.keep, 0.0)
        file.write(weight_name(name), weight.to(stored))
    else:
        weight.masked_fill_(~one.keep, 0.0)


def check_weights(weight: Tensor, what: str) -> None:
    """Raise PalimpsestError naming `what` if a weight is not finite."""
    if not torch.isfinite(weight.sum(dtype=torch.float32)) and not torch.isfinite(weight).all():
        raise PalimpsestError(f"{what}: NaN or infinite weights; check the checkpoint that stage model made")


def mask_row(block: int, name: str, weight: Tensor, one: Pruned, seen: Inputs | None, method: str) -> dict[str, Any]:
    """Its row of masks.csv, but for the share that was asked for; `weight` as it was before it was pruned."""
    kept = int(one.keep.sum())
    return {
        "block": block,
        "matrix": name,
        "parameters": weight.numel(),
        "tokens": seen.tokens if seen is not None else None,
        "sparsity": 1 - kept / weight.numel(),
        "kept_magnitude": kept_share(weight.float().abs(), one.keep),
        "kept_score": one.score,
        "damping": one.damping,
        "dead_inputs": one.dead,
        "method": method,
    }
