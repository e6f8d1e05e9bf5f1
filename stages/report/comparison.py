"""Variants of the model side by side: which may be compared at all, and by how much they differ, window by window."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.drawing.notation import listing
from stages.report.columns import Floats


@dataclass(frozen=True)
class Variant:
    """One evaluated variant. Losses in nats per scored token; `protocol` is all that must agree for a comparison."""

    name: str
    perplexity: float
    low: float
    high: float
    confidence: float
    tokens: int
    windows: Floats  # [window] mean loss per scored token
    scored: Floats  # [window] scored tokens
    protocol: Mapping[str, str]
    sparsity: float
    parameters: int
    bytes: int
    zeros: int | None = None
    prunable: int | None = None
    blocks: int | None = None


@dataclass(frozen=True)
class Difference:
    """Paired difference in nats per token: mean over scored tokens with a bootstrap interval (None for a single window)."""

    windows: Floats  # [window]
    mean: float
    low: float | None
    high: float | None

    @property
    def worse(self) -> int:
        """In how many windows the loss is higher."""
        return int((self.windows > 0).sum())


def paired_difference(
    windows: Floats, baseline: Floats, resamples: int, confidence: float, seed: int, scored: Floats | None = None
) -> Difference:
    """`windows - baseline`, with a percentile bootstrap over windows.

    Args:
        scored: tokens scored in each window, which it then counts by; None: as many in each.

    Raises ValueError if the two have not the same windows.
    """
    if windows.shape != baseline.shape:
        raise ValueError(f"paired windows: {windows.shape} against {baseline.shape}")
    differences = windows - baseline
    weights = np.ones(len(differences)) if scored is None else scored / scored.mean()
    mean = float((differences * weights).mean())
    if len(differences) < 2:
        return Difference(differences, mean, None, None)
    generator = np.random.default_rng(seed)
    means = np.empty(resamples)
    for index in range(resamples):  # one resample at a time: memory stays one row, whatever the number of windows
        drawn = generator.integers(0, len(differences), len(differences))
        means[index] = (differences * weights)[drawn].mean() / weights[drawn].mean()
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Difference(differences, mean, float(low), float(high))


def digest(protocol: Mapping[str, str]) -> str:
    """A short word that is equal for equal protocols, for places where the whole of it has no room."""
    return hashlib.sha256(json.dumps(dict(protocol), sort_keys=True).encode()).hexdigest()[:8]


def by_protocol(variants: Sequence[Variant]) -> list[list[Variant]]:
    """Variants in groups of equal protocol, in order of first appearance. Only within a group may numbers be compared."""
    groups: dict[tuple[tuple[str, str], ...], list[Variant]] = {}
    for variant in variants:
        groups.setdefault(tuple(sorted(variant.protocol.items())), []).append(variant)
    return list(groups.values())


def conflicts(groups: Sequence[Sequence[Variant]], labels: Mapping[str, str]) -> list[str]:
    """One line per protocol key that the groups do not share: `Precision: float32 (dense, masked), bfloat16 (compressed)`."""
    keys = sorted({key for group in groups for key in group[0].protocol})
    lines = []
    for key in keys:
        values: dict[str, list[str]] = {}
        for group in groups:
            values.setdefault(group[0].protocol.get(key, "not stated"), []).extend(variant.name for variant in group)
        if len(values) > 1:
            lines.append(
                f"{labels.get(key, key)}: " + ", ".join(f"{value} ({listing(names)})" for value, names in values.items())
            )
    return lines
