"""Examples out of files: .jsonl (one a line, .gz too), .parquet and .arrow (one a row)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import PalimpsestError

KINDS = (".jsonl", ".jsonl.gz", ".parquet", ".arrow")


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """All rows of a file in its order, each by its place there: "line 3", of a table "row 3".

    Raises PalimpsestError naming the file, and the line, for what is no table of examples.
    """
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        rows = dict(_lines(path))
    elif path.suffix in (".parquet", ".arrow"):
        rows = {f"row {number}": row for number, row in enumerate(_table(path), 1)}
    else:
        raise PalimpsestError(f"{path}: only {', '.join(KINDS)} are read; convert it to one of them")
    if not rows:
        raise PalimpsestError(f"{path}: no examples in it")
    return rows


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"line {number}", _row(line, f"{path}, line {number}")
    except (OSError, EOFError) as error:
        raise PalimpsestError(f"{path}: cannot be read ({error})") from None


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise PalimpsestError(f"{where}: not JSON ({error}); mend or remove it") from None
    if not isinstance(row, dict):
        found = f"expected an object with the task's fields, found {type(row).__name__}"
        raise PalimpsestError(f"{where}: {found}; mend or remove it")
    return row


def _table(path: Path) -> list[dict[str, Any]]:
    import pyarrow
    from pyarrow import ipc, parquet

    try:
        if path.suffix == ".parquet":
            return parquet.read_table(path).to_pylist()
        with path.open("rb") as stream:  # as `datasets` writes it
            return ipc.open_stream(stream).read_all().to_pylist()
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise PalimpsestError(f"{path}: not a whole {path.suffix[1:]} file ({str(error)[:200]})") from None
