"""allocation.csv as masking reads it: the budget of each matrix."""

from __future__ import annotations

import pandas as pd

from pipeline.errors import PalimpsestError
from stages.masking import Masking
from stages.masking.budget import Budget, round_to_groups

Key = tuple[int, str]
OF_HEAD: Key = (-1, "head")  # the output head lies in no block
TOLERANCE = 1e-6  # of the sparsity that a pattern realises


class Shares:
    """The sparsity of each matrix, given for its block or for itself."""

    def __init__(self, table: pd.DataFrame, blocks: int):
        """Raises PalimpsestError if the table is that of another number of blocks, or has a share outside 0 to 1."""
        if set(table.block) != set(range(blocks)):
            raise PalimpsestError(
                f"allocation.csv has blocks {sorted(set(table.block))}, the model has {blocks}; run: dvc repro allocation"
            )
        outside = table[~table.sparsity.between(0, 1)]
        if len(outside):
            row = outside.iloc[0]
            raise PalimpsestError(
                f"allocation.csv gives block {row.block} a sparsity of {row.sparsity}; allowed: 0 to 1; run: dvc repro allocation"
            )
        names = ["" if pd.isna(name) else str(name) for name in table.matrix]
        self._shares = dict(zip(zip(table.block, names, strict=True), table.sparsity.astype(float), strict=True))

    def unit(self, block: int, matrix: str) -> Key:
        """The row that a matrix's share comes from. Raises PalimpsestError if there is none."""
        for key in ((block, matrix), (block, "")):
            if key in self._shares:
                return key
        raise PalimpsestError(f"allocation.csv has no sparsity for {matrix} of block {block}; run: dvc repro allocation")

    def of(self, block: int, matrix: str) -> float:
        """The share of `matrix`'s weights to remove."""
        return self._shares[self.unit(block, matrix)]


def budgets(shares: Shares, sizes: dict[Key, tuple[int, int]], wanted: Masking) -> dict[Key, Budget]:
    """The budget of every matrix; with a pattern n:m the allocation is rounded to whole n per unit.

    Args:
        sizes: (block, matrix) -> (out, in).

    Raises PalimpsestError before any work if the pattern does not fit a matrix, or removes another share than the allocation.
    """
    asked = {key: shares.of(*key) for key in sizes}
    if wanted.group is None:
        return {key: Budget(share, None, wanted.compared, wanted.rounding == "exact") for key, share in asked.items()}
    n, m = wanted.group
    for (block, name), (_, columns) in sizes.items():
        if columns % m:
            narrow = f"narrower than {m}" if columns < m else f"no multiple of {m}"
            raise PalimpsestError(
                f"params.yaml: masking.pattern = {wanted.pattern!r}: {name} of block {block} has {columns} inputs, {narrow}; "
                "allowed: unstructured, or n:m with an m that divides the inputs of every matrix"
            )
    total = sum(rows * columns for rows, columns in sizes.values())
    mean = sum(asked[key] * rows * columns for key, (rows, columns) in sizes.items()) / total
    if mean > 0 and abs(mean - n / m) > TOLERANCE:
        raise PalimpsestError(
            f"params.yaml: masking.pattern = {wanted.pattern!r} removes {n / m:g} of the weights, but the allocation's mean is "
            f"{mean:g}; set allocation.sparsity: {n / m:g} with allocation.projection: projected (a faithful one misses its "
            "target), or another pattern"
        )
    weights: dict[Key, int] = {}
    wished: dict[Key, float] = {}
    for key, (rows, columns) in sizes.items():
        unit = shares.unit(*key)
        weights[unit] = weights.get(unit, 0) + rows * columns
        wished[unit] = asked[key]
    counts = round_to_groups(wished, weights, m)
    off = sum(counts[unit] * weights[unit] for unit in counts) / m - mean * total
    if abs(off) * m > max(weights.values()) / 2 * (1 + 1e-9):
        raise PalimpsestError(
            f"params.yaml: masking.pattern = {wanted.pattern!r}: with {m - 1} of {m} inputs removed at most, the allocation's "
            f"shares of up to {max(wished.values()):g} come to {mean + off / total:g} of the weights instead of {mean:g}; "
            "allowed: an allocation with narrower bounds, or unstructured"
        )
    return {key: Budget(counts[shares.unit(*key)] / m, (counts[shares.unit(*key)], m), wanted.compared, True) for key in sizes}


def rounding_note(shares: Shares, wishes: dict[Key, Budget], wanted: Masking) -> str | None:
    """What a pattern made of the allocation, in words; None if it is as asked."""
    if wanted.group is None or all(abs(shares.of(*key) - one.share) <= TOLERANCE for key, one in wishes.items()):
        return None
    _, m = wanted.group
    asked = [shares.of(*key) for key in wishes]
    counts = sorted({one.group[0] for one in wishes.values() if one.group is not None})
    became = f"{counts[0]} to {counts[-1]} of {m}" if len(counts) > 1 else f"{counts[0]} of {m} everywhere, which is uniform"
    return (
        f"pattern {wanted.pattern}: whole n of {m} are coarser than the allocation, so that {min(asked):.4f} to {max(asked):.4f} "
        f"became {became}; masks.csv has both (sparsity_asked, sparsity)"
    )
