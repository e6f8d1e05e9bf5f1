"""Does peeling say which blocks are cheap to remove? On the demo: `python -m tests.bench.peeling`.

The cost of removing each block, with a ghost in its place and bare, as stage `search` measures it (KL of the output in nats, on
calibration prompts): set search.windows: [1] and run `dvc repro search peeling` before. Scores are those of stage `peeling`, and
the local errors of the direct chain of stage `yes` where it was run. `--data` is the folder with the stages' results.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import spearmanr

COSTS = {"divergence": "with a ghost", "divergence_bare": "bare"}


def main() -> None:
    """Print a rank correlation per score and cost, with and without the blocks around the sink."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("data"))
    data: Path = parser.parse_args().data
    windows = pd.read_csv(data / "search_windows.csv")
    singles = windows[windows.stop == windows.start + 1].set_index("start")
    if not len(singles):
        raise SystemExit(f"{data / 'search_windows.csv'}: no windows of length 1; set search.windows: [1], then dvc repro search")
    blocks = np.array(sorted(singles.index), dtype=np.int64)
    scores = _scores(data, blocks)
    marks = pd.read_csv(data / "redundancy_blocks.csv").set_index("block").sink
    sinks = [block for block in blocks.tolist() if isinstance(marks[block], str)]
    for some, words in ((blocks, "all"), (np.setdiff1d(blocks, sinks), f"without {sinks}, which make or end the sink")):
        print(f"\nn = {len(some)} blocks ({words}): Spearman of each score with the cost, p")
        print(f"{'':34s}" + "".join(f"{name:>22s}" for name in COSTS.values()))
        keep = np.isin(blocks, some)
        for name, values in scores.items():
            print(f"{name:34s}" + "".join(f"{_spearman(values[keep], singles.loc[some, cost]):>22s}" for cost in COSTS))


def _scores(data: Path, blocks: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
    table = pd.read_csv(data / "peeling.csv")
    table["reach"] = table.target - table.block
    scores = {}
    for reach in sorted(table.reach.unique()):
        rows = table[table.reach == reach].set_index("block").reindex(blocks)
        scores[f"linear held-out error, reach {reach}"] = rows.heldout_error.to_numpy()
        if reach > 1:
            scores[f"own error, reach {reach}"] = rows.own_error.to_numpy()
            scores[f"own less linear error, reach {reach}"] = (rows.own_error - rows.heldout_error).to_numpy()
    other = pd.read_csv(data / "redundancy_blocks.csv").set_index("block").reindex(blocks)
    scores["influence, to compare"] = other.influence.to_numpy()
    scores["deletion KL, to compare"] = other.deletion.to_numpy() if "deletion" in other else np.full(len(blocks), np.nan)
    path = data / "yes_blocks.csv"
    fits = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=["prefix", "block"])
    direct = {"-".join(map(str, range(1, block + 2))): block for block in range(int(max(blocks)) + 2)}
    local = fits[fits.prefix.isin(direct)].set_index("block")
    if len(local):
        scores["YES direct, local error"] = local.heldout_error.reindex(blocks).to_numpy()
    return scores


def _spearman(values: NDArray[np.float64], cost: pd.Series) -> str:
    known = np.isfinite(values)
    if known.sum() < 3:
        return "–"
    found: Any = spearmanr(values[known], cost.to_numpy()[known])
    count = "" if known.all() else f" (n {known.sum()})"
    return f"{found.statistic:+.2f}, {found.pvalue:.2g}{count}"


if __name__ == "__main__":
    main()
