"""A table as typed columns: numbers as float arrays with NaN for what is missing, words as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Columns:
    """Rows of a table, read by column. A column that is not there reads as missing values."""

    def __init__(self, columns: Mapping[str, Sequence[object] | NDArray[np.generic]], rows: int):
        self._columns = {name: np.asarray(values) for name, values in columns.items()}
        self._rows = rows

    @classmethod
    def of(cls, table: pd.DataFrame) -> Columns:
        """The columns of a data frame."""
        return cls({str(name): np.asarray(table[name]) for name in table.columns}, len(table))

    def __len__(self) -> int:
        return self._rows

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def numbers(self, name: str) -> Floats:
        """Column `name` as floats [row]; NaN where a cell is empty or no number."""
        if name not in self._columns:
            return np.full(self._rows, np.nan)
        return np.asarray(pd.to_numeric(pd.Series(self._columns[name]), errors="coerce"), dtype=np.float64)

    def whole(self, name: str) -> list[int]:
        """Column `name` as integers. Raises ValueError where a cell is none."""
        return [int(value) for value in self.numbers(name)]

    def words(self, name: str) -> list[str]:
        """Column `name` as text; empty where a cell is."""
        if name not in self._columns:
            return [""] * self._rows
        return ["" if value is None or value != value else str(value) for value in self._columns[name].tolist()]

    def pick(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> Columns:
        """The rows a mask or a list of indices says, in its order."""
        return Columns({name: values[rows] for name, values in self._columns.items()}, len(np.arange(self._rows)[rows]))

    def ordered(self, *names: str) -> Columns:
        """Rows in rising order of the named columns, the first one leading."""
        return self.pick(np.lexsort([self.numbers(name) for name in reversed(names)]))
