"""What sparsity is shared out over, and what was measured of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from pipeline.errors import PalimpsestError


@dataclass(frozen=True)
class Layers:
    """Blocks, or all prunable matrices, in the order of the model; with the tables of the stages that measured them."""

    block: np.ndarray  # index of the block, [layer]
    matrix: list[str]  # empty: the whole block, [layer]
    parameters: np.ndarray  # prunable weights, [layer]
    statistics: pd.DataFrame  # row per block and place
    importance: pd.DataFrame  # row per block and matrix
    sensitivity: pd.DataFrame  # row per block

    def __len__(self) -> int:
        return len(self.block)

    def important(self, column: str, unmeasured: str) -> np.ndarray:
        """A column of importance.csv, [layer]; NaN for an expert no token reached.

        Raises PalimpsestError with the text `unmeasured` if it is not there or empty.
        """
        if column not in self.importance or not np.isfinite(self.importance[column].astype(float)).any():
            raise PalimpsestError(f"params.yaml: {unmeasured}")
        return self._matched(self.importance, "matrix", column)

    def seen(self, place: str, column: str) -> np.ndarray:
        """A column of statistics.csv, [layer]: at one place of each block, or, where `place` is empty, at each layer's matrix."""
        if not place:
            return self._matched(self.statistics.rename(columns={"place": "matrix"}), "matrix", column)
        return self.per_block(self.statistics.loc[self.statistics["place"] == place], column)

    def per_block(self, rows: pd.DataFrame, column: str) -> np.ndarray:
        """A column of a table with one row per block, [layer]: every matrix has its block's value."""
        return rows.set_index("block")[column].reindex(self.block).to_numpy(dtype=np.float64)

    def _matched(self, table: pd.DataFrame, name: str, column: str) -> np.ndarray:
        values = table.assign(**{name: table[name].fillna("")}).set_index(["block", name])[column]
        return values.reindex(pd.MultiIndex.from_arrays([self.block, self.matrix])).to_numpy(dtype=np.float64)


def make_layers(granularity: str, statistics: pd.DataFrame, importance: pd.DataFrame, sensitivity: pd.DataFrame) -> Layers:
    """Layers of one granularity, "block" or "linear"."""
    whole = importance["matrix"].isna() | (importance["matrix"] == "")
    rows = importance.loc[whole if granularity == "block" else ~whole]
    names = ["" if pd.isna(name) else str(name) for name in rows["matrix"]]
    block, parameters = np.asarray(rows["block"], dtype=np.int64), np.asarray(rows["parameters"], dtype=np.float64)
    return Layers(block, names, parameters, statistics, importance, sensitivity)
