"""The tables and the verdict, from the losses of all nets on the same windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from stages.yes.chain import Fit
from stages.yes.maps import Map, spell
from stages.yes.verdict import Losses, difference, layers, light, mean_and_error

NETS = [
    "net", "role", "blocks", "targets", "train", "train_error", "test", "test_error", "gain", "gain_error", "test_gain",
    "test_gain_error", "head_steps",
]  # fmt: skip
LAYERS = ["block", "gap", "gap_error", "alternative", "skipped", "skipped_best", "stepping_stone", "error"]
BLOCKS = ["prefix", "block", "target", "train_error", "heldout_error", "steps"]


@dataclass(frozen=True)
class Net:
    """A net and its losses. `role`: model, control, bound (of the model's class) or reference (not of it)."""

    name: str
    role: str
    targets: Map
    train: Losses
    test: Losses
    head_steps: int


def net_table(nets: Sequence[Net]) -> pd.DataFrame:
    """A row per net; `gain` is the loss of the control, the model with its head refitted, less the net's, on the same windows."""
    control = nets[1]
    rows = []
    for net in nets:
        gains = [*difference(control.train, net.train), *difference(control.test, net.test)]
        losses = [*mean_and_error(net.train), *mean_and_error(net.test)]
        rows.append([net.name, net.role, len(net.targets) or None, spell(net.targets), *losses, *gains, net.head_steps])
    return pd.DataFrame(rows, columns=NETS).astype({"blocks": "Int64"})


def layer_table(nets: Sequence[Net], fits: Sequence[Fit], blocks: int, tolerance: float) -> pd.DataFrame:
    """A row per inner boundary, by the bounds; `error` is the held-out error of the fit to it in the direct map."""
    maps = {net.name: net.targets for net in nets if net.role == "bound"}
    found = layers(maps, {net.name: net.train for net in nets if net.role == "bound"}, blocks, tolerance)
    direct = {fit.prefix[-1]: fit.heldout_error for fit in fits if fit.prefix == tuple(range(1, len(fit.prefix) + 1))}
    rows = [[*(getattr(one, name) for name in LAYERS[:-1]), direct.get(one.block + 1)] for one in found]
    return pd.DataFrame(rows, columns=LAYERS)


def block_table(fits: Sequence[Fit]) -> pd.DataFrame:
    """A row per fit, in the order of the trie."""
    rows = [
        [spell(fit.prefix), len(fit.prefix) - 1, fit.prefix[-1], fit.train_error, fit.heldout_error, fit.steps] for fit in fits
    ]
    return pd.DataFrame(rows, columns=BLOCKS)


def summary(nets: Sequence[Net], tolerance: float) -> dict[str, Any]:
    """What `dvc metrics show` shows. Bounds come from nets of the model's class; the best map is chosen on the train windows.

    `verdict` judges the model with its head refitted, so that it speaks of the layers alone; `verdict_with_head` the model as
    it is, as published; `verdict_test` is `verdict` on the test windows, for the same map. Without YES0 (no map sends every
    block to the last boundary) there is no red; without any map of the class, or with a single window, there is no verdict.
    """
    model, control = nets[:2]
    bounds = [net for net in nets if net.role == "bound"]
    beside = {net.name.replace(", ", "_").replace(" ", "_"): net for net in nets if net.role == "control"}
    found: dict[str, Any] = {
        "maps": sum(net.role in ("bound", "reference") for net in nets),
        "tolerance": tolerance,
        "model_train": float(model.train.mean()),
        "model_test": float(model.test.mean()),
    }
    for name, net in beside.items():
        found |= {f"{name}_train": float(net.train.mean()), f"{name}_test": float(net.test.mean())}
    shallow = [net for net in nets if net.role == "reference"]
    if shallow:
        low = min(shallow, key=lambda net: float(net.train.mean()))
        found |= {"reference": low.name, "reference_train": float(low.train.mean()), "reference_test": float(low.test.mean())}
    if not bounds:
        return found | {"verdict": "none", "verdict_with_head": "none", "verdict_test": "none"}
    best = min(bounds, key=lambda net: float(net.train.mean()))
    zero = next((net for net in bounds if set(net.targets) == {len(net.targets)}), None)
    if zero:
        found |= {"yes0_train": float(zero.train.mean()), "yes0_test": float(zero.test.mean())}

    def judged(one: Net, part: str) -> str:
        losses, least = getattr(one, part), getattr(best, part)
        if zero is None:
            return light(losses, losses, least, tolerance)
        return light(losses, getattr(zero, part), least, tolerance)

    gains = {part: difference(getattr(control, part), getattr(best, part)) for part in ("train", "test")}
    errors = {part: None if math.isnan(error) else error for part, (_, error) in gains.items()}
    return found | {
        "best": best.name,
        "yes_train": float(best.train.mean()),
        "yes_test": float(best.test.mean()),
        "share_of_head": difference(model.train, control.train)[0],
        "gain": gains["train"][0],
        "gain_error": errors["train"],
        "gain_test": gains["test"][0],
        "gain_test_error": errors["test"],
        "verdict": judged(control, "train"),
        "verdict_with_head": judged(model, "train"),
        "verdict_test": judged(control, "test"),
    }
