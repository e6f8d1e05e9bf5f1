"""Files that stages hand to each other: JSON, CSV and (in `pipeline.tensors`) safetensors.

Every file is written under a temporary name in its own folder, flushed to disk and renamed, so that a name
never stands for half a file. Equal content gives equal bytes: keys are sorted, floats are written in their
shortest exact form, and nothing of the time, the host or the path goes in.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import PalimpsestError

if TYPE_CHECKING:
    import pandas as pd


class ArtifactError(PalimpsestError):
    """An artifact is missing, truncated, foreign, or holds what it should not."""


def producer(path: Path) -> str:
    """How to get a whole `path` again, for error messages."""
    return f"to make {path.name} anew run: python -m pipeline verify, then dvc repro"


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success flush it and rename it to `path`, else remove it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise ArtifactError(
            f"{path}: cannot be written ({error.strerror}); check the folder's owner and the free space"
        ) from None
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON with sorted keys. Raises ValueError on NaN or infinity: they are not JSON."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises ArtifactError naming the file if it is missing or broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(f"{path}: not there; {producer(path)}") from None
    except ValueError as error:
        raise ArtifactError(f"{path}: not JSON ({error}); {producer(path)}") from None


def write_table(path: Path, table: pd.DataFrame) -> None:
    """Write a table as CSV; floats in their shortest exact form, missing values empty."""
    with atomic(path) as temporary:
        table.to_csv(temporary, index=False, lineterminator="\n")


def read_table(path: Path, columns: tuple[str, ...] = (), numbers: tuple[str, ...] = ()) -> pd.DataFrame:
    """Read a CSV and check that it has `columns` and `numbers`, the latter finite in every row, of which there is one at least.

    Raises ArtifactError naming file and column otherwise.
    """
    import numpy as np
    import pandas as pd

    try:
        table = pd.read_csv(path)
    except FileNotFoundError:
        raise ArtifactError(f"{path}: not there; {producer(path)}") from None
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: not a CSV table ({error}); {producer(path)}") from None
    for column in (*columns, *numbers):
        if column not in table:
            raise ArtifactError(f"{path}: no column '{column}' (it has {', '.join(table)}); {producer(path)}")
    for column in numbers:
        values = np.asarray(pd.to_numeric(table[column], errors="coerce"), dtype=np.float64)
        if table.empty or not np.isfinite(values).all():
            raise ArtifactError(f"{path}: column '{column}' should hold a finite number in every row; {producer(path)}")
    return table


def human_bytes(count: float) -> str:
    """`1.5 GB` rather than `1500000000`."""
    if count < 1000:
        return f"{count:.0f} B"
    power = min(int(math.log10(count) // 3), 5)
    return f"{count / 1000**power:.3g} {' kMGTP'[power]}B"
