"""The scores that `redundancy` and `search` saved, read and checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from pipeline.artifacts import ArtifactError, read_table
from pipeline.errors import PalimpsestError
from stages.removal.ranking import Pair


@dataclass(frozen=True)
class Scores:
    """Tables as they were saved; measured columns may be empty."""

    block_table: pd.DataFrame
    pair_table: pd.DataFrame
    steps: pd.DataFrame
    windows: pd.DataFrame

    @property
    def blocks(self) -> int:
        """Blocks of the dense model."""
        return len(self.block_table)

    def cosines(self, axis: str) -> np.ndarray:
        """[boundary, boundary], upper triangle, along `axis`."""
        column = "cosine" if axis == "token" else "cosine_channel"
        square = np.eye(self.blocks + 1)
        square[self.pair_table.i, self.pair_table.j] = self._measured(self.pair_table, column, "removal.axis")[column]
        return square

    def swaps(self, *columns: str) -> dict[Pair, tuple[float, ...]]:
        """Pair -> its values in `columns`, for the pairs that were measured and all of whose values are finite."""
        rows = self.pair_table
        for column in columns:
            rows = self._measured(rows, column, "removal.method")
        values = [tuple(row) for row in rows[list(columns)].to_numpy(float).tolist()]
        return dict(zip(zip(rows.i.tolist(), rows.j.tolist(), strict=True), values, strict=True))

    def deletions(self, needed: bool = True) -> dict[int, float]:
        """Block -> KL of its deletion; nothing if it was not measured and is not `needed`."""
        if not needed and not _finite(self.block_table, "deletion").any():
            return {}
        rows = self._measured(self.block_table, "deletion", "removal.method")
        return dict(zip(rows.block.tolist(), rows.deletion.tolist(), strict=True))

    @staticmethod
    def _measured(table: pd.DataFrame, column: str, key: str) -> pd.DataFrame:
        rows = table.loc[_finite(table, column)]
        if not len(rows):
            raise PalimpsestError(
                f"params.yaml: {key} needs '{column}', which was not measured, or is not finite anywhere; set redundancy.swaps: "
                "true (or compute.dtype: float32), then dvc repro"
            )
        return rows


def _finite(table: pd.DataFrame, column: str) -> np.ndarray:
    """Which rows have a finite number in `column`."""
    return np.isfinite(table[column].astype(float).to_numpy()) if column in table else np.zeros(len(table), dtype=bool)


def read_scores(blocks: Path, pairs: Path, steps: Path, windows: Path) -> Scores:
    """Read the four tables. Raises ArtifactError naming the file if one is not whole, or not of the same model."""
    block_table = read_table(blocks, numbers=("block", "influence"))
    pair_table = read_table(pairs, numbers=("i", "j", "cosine"))
    if len(pair_table) != len(block_table) * (len(block_table) + 1) // 2:
        raise ArtifactError(
            f"{pairs}: {len(pair_table)} pairs are not those of the {len(block_table)} blocks in "
            "redundancy_blocks.csv; run: dvc repro --force --single-item redundancy"
        )
    step_table = read_table(steps, ("step", "block", "divergence", "removed"))
    window_table = read_table(windows, ("start", "stop", "divergence"))
    return Scores(block_table, pair_table, step_table, window_table)
