"""Choose the blocks that go, from the scores that were saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pandas as pd

from pipeline.artifacts import write_json, write_table
from pipeline.console import say
from pipeline.errors import PalimpsestError
from pipeline.files import Files
from stages.removal import Params, Removal
from stages.removal.measured import iterative, recoverable
from stages.removal.order import Order, by_block, by_window, greedy
from stages.removal.pairwise import pairwise, replacement_pairs
from stages.removal.random import random
from stages.removal.ranking import lowest
from stages.removal.scores import Scores, read_scores
from stages.removal.shortgpt import shortgpt
from stages.removal.streamline import streamline

WINDOWS = ("streamline", "recoverable")  # criteria that score windows of blocks, not blocks
PAIRWISE = ("replacement", "interchange")  # whose scores of adjacent blocks often tie
COUNTS = (1, 3, 5)  # how many blocks every criterion is asked for, beside removal.count, to be compared
SETTINGS = {  # what each criterion goes by, beside removal.protect
    "random": ("spacing", "seed"), "streamline": ("axis",), "shortgpt": ("axis", "spacing"), "replacement": ("credit", "spacing"),
    "interchange": ("credit", "spacing"), "deletion": ("spacing",),
}  # fmt: skip
Choice = tuple[list[int], dict[int, float]]


def _random(scores: Scores, wanted: Removal, protected: set[int]) -> Choice:
    return random(set(range(scores.blocks)) - protected, wanted.count, wanted.spacing, wanted.seed)


def _streamline(scores: Scores, wanted: Removal, protected: set[int]) -> Choice:
    return streamline(scores.cosines(wanted.axis), wanted.count, protected)


def _shortgpt(scores: Scores, wanted: Removal, protected: set[int]) -> Choice:
    return shortgpt(scores.cosines(wanted.axis), wanted.count, protected, wanted.spacing)


def _replacement(scores: Scores, wanted: Removal, protected: set[int]) -> Choice:
    both = {pair: (one, other) for pair, (one, other) in scores.swaps("replacement_ij", "replacement_ji").items()}
    return _pairwise(replacement_pairs(both, wanted.credit), scores, wanted, protected)


def _interchange(scores: Scores, wanted: Removal, protected: set[int]) -> Choice:
    return _pairwise({pair: value for pair, (value,) in scores.swaps("interchange").items()}, scores, wanted, protected)


def _pairwise(pairs: dict[tuple[int, int], float], scores: Scores, wanted: Removal, protected: set[int]) -> Choice:
    allowed = set(range(scores.blocks)) - protected
    return pairwise(pairs, wanted.count, allowed, wanted.credit, wanted.spacing, scores.deletions(needed=False))


def _deletion(scores: Scores, wanted: Removal, protected: set[int]) -> Choice:
    costs = {block: value for block, value in scores.deletions().items() if block not in protected}
    return lowest(costs, wanted.count, wanted.spacing), costs


def _iterative(scores: Scores, wanted: Removal, protected: set[int]) -> Choice:
    return iterative(scores.steps, wanted.count, protected, wanted.spacing)


def _recoverable(scores: Scores, wanted: Removal, protected: set[int]) -> Choice:
    return recoverable(scores.windows, wanted.count, protected)


# A criterion takes the saved scores, the section and the protected blocks, and returns the chosen blocks and the score of each
# candidate (a block, or a window by its first block).
METHODS: dict[str, Callable[[Scores, Removal, set[int]], Choice]] = {
    "random": _random,
    "streamline": _streamline,
    "shortgpt": _shortgpt,
    "replacement": _replacement,
    "interchange": _interchange,
    "deletion": _deletion,
    "iterative": _iterative,
    "recoverable": _recoverable,
}


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write `removal.json`: the removed blocks as indices of the dense model, and nothing else, so that what lies behind runs
    again only if they change; `removal_scores.json`: the method, its scores, and the `order` in which every criterion lets go
    of blocks; and `removal_choices.csv`: what every criterion would remove that the saved scores allow.
    """
    wanted = params.removal
    saved = read_scores(
        *(inputs[f"{name}.csv"] for name in ("redundancy_blocks", "redundancy_pairs", "search_steps", "search_windows"))
    )
    blocks = saved.blocks
    protected = {_index(one, blocks, "removal.protect") for one in wanted.protect}
    scores: dict[int, float] = {}
    removed: list[int] = []
    if wanted.method == "list":
        removed = sorted({_index(one, blocks, "removal.blocks") for one in wanted.blocks})
    elif wanted.method != "none":
        _check_count(wanted, blocks, protected)
        removed, scores = METHODS[wanted.method](saved, wanted, protected)
    if len(removed) >= blocks:
        raise PalimpsestError(f"params.yaml: removal.blocks names all {blocks} blocks of the model; at least one has to stay")
    write_json(outputs["removal.json"], {"removed": removed})
    write_json(
        outputs["removal_scores.json"],
        {
            "method": wanted.method,
            "settings": {name: getattr(wanted, name) for name in SETTINGS.get(wanted.method, ())},
            "scores": _keyed(scores.items()),
            "order": _orders(saved, wanted, protected),
        },
    )
    write_table(outputs["removal_choices.csv"], _choices(saved, wanted, protected))
    say(f"{wanted.method}: removes {removed or 'nothing'} of {blocks} blocks")


def _keyed(scores: Iterable[tuple[int, float]]) -> dict[str, float]:
    return {str(block): score for block, score in scores}


def _orders(saved: Scores, wanted: Removal, protected: set[int]) -> dict[str, list[list[float]]]:
    """criterion -> [block, score], the first to go first, for every criterion whose scores were measured; windows of
    `removal.count` blocks, where there are any."""
    orders: dict[str, Order] = {"iterative": greedy(saved.steps, protected)}
    for name in METHODS:
        if name in ("random", "iterative"):
            continue
        count = wanted.count if name in WINDOWS else 1  # a block's score does not depend on how many go
        asked = wanted.model_copy(update={"method": name, "count": count})
        try:
            _, scores = METHODS[name](saved, asked, protected)
        except PalimpsestError:
            continue
        if name in WINDOWS:
            orders[name] = by_window(scores, count, highest_first=name == "streamline")
        else:
            orders[name] = by_block(scores, ties=saved.deletions(needed=False) if name in PAIRWISE else None)
    return {name: [[block, score] for block, score in order] for name, order in sorted(orders.items()) if order}


def _choices(saved: Scores, wanted: Removal, protected: set[int]) -> pd.DataFrame:
    """criterion, count, block, score: a row per block that goes at each count; the score of the block, or of the window by
    its first block. A criterion whose scores were not measured, or that has no way to remove so many, has no rows."""
    rows = []
    for name in METHODS:
        for count in sorted({*COUNTS, wanted.count}):
            if count > saved.blocks - max(1, len(protected)):
                continue
            try:
                chosen, scores = METHODS[name](saved, wanted.model_copy(update={"method": name, "count": count}), protected)
            except PalimpsestError:
                continue
            rows += [[name, count, block, scores.get(block)] for block in chosen]
    return pd.DataFrame(rows, columns=["criterion", "count", "block", "score"])


def _index(block: int, blocks: int, key: str) -> int:
    """An index from 0, from one that may count from the end."""
    if not -blocks <= block < blocks:
        raise PalimpsestError(f"params.yaml: {key} = {block}: the model has {blocks} blocks; allowed: {-blocks} to {blocks - 1}")
    return block % blocks


def _check_count(wanted: Removal, blocks: int, protected: set[int]) -> None:
    most = blocks - max(1, len(protected))
    if wanted.count > most:
        raise PalimpsestError(
            f"params.yaml: removal.count = {wanted.count}: the model has {blocks} blocks, {len(protected)} of them protected; "
            + (f"allowed: 1 to {most}" if most else "none can go: set removal.method: none or protect fewer")
        )
