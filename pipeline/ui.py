"""Tables and pictures of a stage's tracked outputs, shown in the Prefect UI.

They are read from the files, so that a stage whose outputs came from the cache shows them like one that ran.
"""

from __future__ import annotations

import base64
import csv
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact

LARGEST_BYTES = 2_000_000
MOST_ROWS = 1000
LONGEST_CELL = 200
PICTURES = {".svg": "image/svg+xml", ".png": "image/png"}
SHOWN = {".csv", ".json", *PICTURES}


def publish(paths: list[Path], root: Path = Path()) -> None:
    """Make an artifact of each small .csv, .json, .svg and .png among `paths`, and of each picture in a folder there.

    `paths` are below `root`, which is shown to nobody.
    """
    for file in _files([root / path for path in paths]):
        path = file.relative_to(root)
        key = re.sub(r"[^a-z0-9]+", "-", "-".join([*path.parts[-2:-1], path.stem]).lower()).strip("-")
        if path.suffix in PICTURES:
            create_markdown_artifact(picture(path.name, file.read_bytes()), key=key, description=str(path))
            continue
        rows = read_rows(file)
        note = f"{path}, first {MOST_ROWS} of {len(rows)} rows" if len(rows) > MOST_ROWS else str(path)
        create_table_artifact(rows[:MOST_ROWS], key=key, description=note)


def picture(name: str, content: bytes) -> str:
    """Markdown that holds the picture itself; `name` ends in .svg or .png."""
    return f"![{name}](data:{PICTURES[Path(name).suffix]};base64,{base64.b64encode(content).decode()})"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """A CSV or JSON file as rows of a table. A JSON object of objects has one row each, another one row per key."""
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            return [{name: _number(value) for name, value in row.items()} for row in csv.DictReader(file)]
    content = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(content, dict) and content and all(isinstance(value, dict) for value in content.values()):
        return [{"": name, **{key: _cell(inner) for key, inner in value.items()}} for name, value in content.items()]
    if isinstance(content, dict):
        return [{"key": key, "value": _cell(value)} for key, value in content.items()]
    return [{"value": _cell(value)} for value in (content if isinstance(content, list) else [content])]


def _files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        inside = sorted(path.iterdir()) if path.is_dir() else []
        for file in [one for one in inside if one.suffix in PICTURES] if path.is_dir() else [path]:
            if file.suffix in SHOWN and file.is_file() and file.stat().st_size <= LARGEST_BYTES:
                yield file


def _number(text: str | None) -> Any:
    try:
        number = float(text or "")
    except ValueError:
        return text
    if not math.isfinite(number):  # JSON has no word for it
        return text
    return int(number) if re.fullmatch(r"-?\d{1,15}", text or "") else number


def _cell(value: Any) -> Any:
    if not isinstance(value, (dict, list)):
        return value
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_CELL else f"{text[:LONGEST_CELL]} …"
