"""What the other stages found, read from their tables and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.artifacts import ArtifactError, producer, read_json, read_table
from pipeline.drawing.notation import MISSING, plain, runs
from stages.report.answers import Answers, read_answers
from stages.report.columns import Columns, Floats
from stages.report.comparison import Variant

VARIANTS = ("dense", "masked", "removed", "compressed")


@dataclass(frozen=True)
class Results:
    """All that the page is made of. Tables as their stages wrote them; columns beyond the named ones may be missing."""

    variants: Mapping[str, Variant]
    statistics: Columns  # block, place, …
    importance: Columns  # block, matrix, …
    sensitivity: Columns  # block, rise, error; rise empty where it was not measured
    allocation: Columns  # block, matrix, parameters, score, sparsity
    masks: Columns  # block, matrix, sparsity, kept_magnitude, …
    head: Columns  # the same of the output head; no row where it was not asked for
    influence: Columns  # block, influence, …
    pairs: Columns  # i, j, cosine, …
    regime: Mapping[str, Any]  # the verdict of redundancy.json
    choices: Columns  # criterion, count, block, score
    ghost: Columns  # start, stop, operator, …; no rows where nothing was fitted
    growth: Columns  # boundary, restored, removed, …: how the operators' error grows; no rows where nothing was fitted
    peeling: Columns  # block, target, train_error, heldout_error, own_error; no rows where no target lies in the model
    yes: Columns  # net, role, train, test, …; no rows where no reference was fitted
    yes_layers: Columns  # block, gap, …; no rows where no reference was fitted
    verdict: Mapping[str, Any]  # of yes.json; only maps = 0 where no reference was fitted
    removed: tuple[int, ...]
    removal_method: str
    orders: Mapping[str, list[tuple[int, float]]]  # criterion -> blocks and scores, the first to go first
    answers: tuple[Answers, ...]  # of the tasks that were measured, if any

    @property
    def blocks(self) -> int:
        """Blocks of the dense model."""
        return max(self.influence.whole("block")) + 1

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Runs `[start, stop)` of removed blocks."""
        return runs(self.removed)


def read_results(files: Mapping[str, Path]) -> Results:
    """Read and check every input. Raises ArtifactError naming the file and what is wrong with it."""
    names, removal = files["removal.json"], _object(files["removal.json"], ("removed",))
    scores = _object(files["removal_scores.json"], ("method", "order"))
    masks, head = _masks(files["masks.csv"])
    results = Results(
        variants={name: read_variant(files[f"evaluation/{name}.json"]) for name in VARIANTS},
        statistics=_table(files["statistics.csv"], ("block", "place"), ("block",)),
        importance=_table(files["importance.csv"], ("block", "matrix"), ("block",)),
        sensitivity=_table(files["sensitivity.csv"], ("block", "rise"), ("block",)),
        allocation=_table(files["allocation.csv"], ("block", "sparsity"), ("block", "sparsity")),
        masks=masks,
        head=head,
        influence=_table(files["redundancy_blocks.csv"], ("block", "influence"), ("block", "influence")),
        pairs=_table(files["redundancy_pairs.csv"], ("i", "j", "cosine"), ("i", "j")),
        regime=_object(files["redundancy.json"], ("regime",)),
        choices=_table(files["removal_choices.csv"], ("criterion", "count", "block"), ("count", "block"), empty=True),
        ghost=_table(files["ghost.csv"], ("start", "stop", "train_error", "heldout_error"), ("start", "stop"), empty=True),
        growth=_table(files["ghost_growth.csv"], ("boundary", "restored", "removed"), ("boundary",), empty=True),
        peeling=_table(files["peeling.csv"], ("block", "target", "heldout_error"), ("block", "target"), empty=True),
        yes=_table(files["yes.csv"], ("net", "role", "train", "test"), ("train", "test"), empty=True),
        yes_layers=_table(files["yes_layers.csv"], ("block", "gap"), ("block",), empty=True),
        verdict=_object(files["yes.json"], ("maps",)),
        removed=tuple(sorted(removal["removed"])),
        removal_method=str(scores["method"]),
        orders={name: [(int(block), float(score)) for block, score in order] for name, order in scores["order"].items()},
        answers=tuple(
            one for name in VARIANTS for one in read_answers(name, files[f"zeroshot/{name}.json"], files[f"zeroshot/{name}.csv"])
        ),
    )
    beyond = [index for index in results.removed if not 0 <= index < results.blocks]
    if beyond:
        raise ArtifactError(f"{names}: removed block {beyond[0]}, but the model has {results.blocks} blocks; {producer(names)}")
    return results


def read_variant(path: Path) -> Variant:
    """One `evaluation/<variant>.json`. Raises ArtifactError naming the file if a key is missing or makes no sense."""
    raw = _object(path, ("variant", "perplexity", "interval", "tokens", "windows", "contract", "sparsity", "parameters", "bytes"))
    try:
        low, high = raw["interval"]
        return Variant(
            name=str(raw["variant"]),
            perplexity=float(raw["perplexity"]),
            low=float(low),
            high=float(high),
            confidence=float(raw.get("confidence", 0.95)),
            tokens=int(raw["tokens"]),
            windows=_losses(raw["windows"]),
            scored=_losses(raw.get("scored", [1.0] * len(raw["windows"]))),
            protocol=_protocol(raw),
            sparsity=float(raw["sparsity"]),
            parameters=int(raw["parameters"]),
            bytes=int(raw["bytes"]),
            **{key: int(raw[key]) for key in ("zeros", "prunable", "blocks") if isinstance(raw.get(key), int)},
        )
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"{path}: {error}; {producer(path)}") from None


def _protocol(raw: Mapping[str, Any]) -> dict[str, str]:
    """Everything that two perplexities must share to be compared, as text."""
    contract = raw["contract"]
    if not isinstance(contract, dict):
        raise TypeError(f"contract: expected an object, found {type(contract).__name__}")
    stated = {key: _stated(value) for key, value in contract.items()}
    return {**stated, "windows": f"{len(raw['windows']):,}", "tokens_scored": f"{int(raw['tokens']):,}"}


def _stated(value: Any) -> str:
    if value is None:
        return MISSING
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else plain(value)


def _losses(windows: Any) -> Floats:
    losses = np.asarray(windows, dtype=np.float64)
    if losses.ndim != 1 or not len(losses) or not np.isfinite(losses).all():
        raise ValueError("windows: expected one finite mean loss per window")
    return losses


def _object(path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    raw = read_json(path)
    missing = [key for key in keys if not isinstance(raw, dict) or key not in raw]
    if missing:
        raise ArtifactError(f"{path}: no key '{missing[0]}'; {producer(path)}")
    return raw


def _table(path: Path, columns: tuple[str, ...], numeric: tuple[str, ...], empty: bool = False) -> Columns:
    table = Columns.of(read_table(path, columns))
    if not len(table) and not empty:
        raise ArtifactError(f"{path}: a table without rows; {producer(path)}")
    _check_numbers(path, table, numeric)
    return table


def _check_numbers(path: Path, table: Columns, names: tuple[str, ...]) -> None:
    for name in names:
        if not np.isfinite(table.numbers(name)).all():
            raise ArtifactError(f"{path}: column '{name}' has empty or non-numeric cells; {producer(path)}")


def _masks(path: Path) -> tuple[Columns, Columns]:
    """The rows of the blocks' matrices, and that of the output head, which lies in no block."""
    table = _table(path, ("block", "matrix", "sparsity"), ("sparsity",))
    of_head = np.array([name == "head" for name in table.words("matrix")]) & np.isnan(table.numbers("block"))
    masks = table.pick(~of_head)
    _check_numbers(path, masks, ("block",))
    return masks, table.pick(of_head)
