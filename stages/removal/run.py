"""Choose the blocks that go."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pipeline.artifacts import ArtifactError, read_table, write_json
from pipeline.console import say
from pipeline.errors import PalimpsestError
from pipeline.files import Files
from stages.removal import Params, Removal
from stages.removal.shortgpt import shortgpt
from stages.removal.streamline import streamline

# A criterion takes the cosine of all boundaries [block + 1, block + 1], how many blocks to remove and the protected ones,
# and returns the chosen blocks and the score of each candidate (a block, or a window by its first block), most removable first.
Criterion = Callable[[np.ndarray, int, set[int]], tuple[list[int], dict[int, float]]]
METHODS: dict[str, Criterion] = {"streamline": streamline, "shortgpt": shortgpt}


def run(params: Params, inputs: Files, outputs: Files) -> None:
    """Write `removal.json`: the removed blocks as indices of the dense model, the scores, the method."""
    wanted = params.removal
    blocks = len(read_table(inputs["redundancy_blocks.csv"], numbers=("block", "influence")))
    protected = {_index(one, blocks, "removal.protect") for one in wanted.protect}
    scores: dict[int, float] = {}
    removed: list[int] = []
    if wanted.method == "list":
        removed = sorted({_index(one, blocks, "removal.blocks") for one in wanted.blocks})
    elif wanted.method != "none":
        _check_count(wanted, blocks, protected)
        pairs = read_table(inputs["redundancy_pairs.csv"], numbers=("i", "j", "cosine"))
        if len(pairs) != blocks * (blocks + 1) // 2:
            raise ArtifactError(
                f"{inputs['redundancy_pairs.csv']}: {len(pairs)} pairs are not those of the {blocks} blocks in "
                "redundancy_blocks.csv; run: dvc repro --force --single-item redundancy"
            )
        cosine = np.eye(blocks + 1)
        cosine[pairs.i, pairs.j] = pairs.cosine
        removed, scores = METHODS[wanted.method](cosine, wanted.count, protected)
    if len(removed) >= blocks:
        raise PalimpsestError(f"params.yaml: removal.blocks names all {blocks} blocks of the model; at least one has to stay")
    write_json(
        outputs["removal.json"],
        {"removed": removed, "scores": {str(block): score for block, score in scores.items()}, "method": wanted.method},
    )
    say(f"{wanted.method}: removes {removed or 'nothing'} of {blocks} blocks")


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
