"""Where an unfinished training stands: full weights, the optimiser's moments, the losses so far. One file, written whole."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.artifacts import ArtifactError
from pipeline.tensors import TensorFile, write_tensors

Rows = list[dict[str, Any]]


def fingerprint(settings: dict[str, Any], *windows: Tensor) -> str:
    """Of all that the training depends on: equal only where going on gives what one run would have given."""
    digest = hashlib.sha256(json.dumps([settings, torch.__version__], sort_keys=True).encode())
    for ids in windows:
        digest.update(ids.contiguous().numpy().tobytes())
    return digest.hexdigest()


def save_state(path: Path, model: nn.Module, optimiser: torch.optim.Optimizer, epoch: int, rows: Rows, of: str) -> None:
    """Write where the training stands after `epoch` epochs."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        moments = optimiser.state[parameter]
        tensors |= {f"weight.{name}": parameter, f"first.{name}": moments["exp_avg"], f"second.{name}": moments["exp_avg_sq"]}
        tensors[f"step.{name}"] = moments["step"]
    write_tensors(path, {name: value.detach() for name, value in tensors.items()}, {"epoch": epoch, "rows": rows, "of": of})


def load_state(path: Path, model: nn.Module, optimiser: torch.optim.Optimizer, of: str) -> tuple[int, Rows]:
    """Put `model` and `optimiser` where they stood; returns the epochs done and their losses.

    (0, []) and nothing changed if there is no whole file, or it is of another training than `of`.
    """
    try:
        file = TensorFile(path)
    except ArtifactError:
        return 0, []
    if file.metadata.get("of") != of:
        return 0, []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(file.read(f"weight.{name}"))
            moments = {key: file.read(f"{kind}.{name}") for kind, key in (("first", "exp_avg"), ("second", "exp_avg_sq"))}
            moments = {key: value.to(parameter.device) for key, value in moments.items()}
            optimiser.state[parameter] = {"step": file.read(f"step.{name}"), **moments}
    return int(file.metadata["epoch"]), list(file.metadata["rows"])
