"""The row of a table of examples that is unlike the others. Pure, but for what a definition's own function does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import datasets

Rows = Sequence[dict[str, Any]]
Process = Callable[[datasets.Dataset], datasets.Dataset]


def only_read(rows: Rows, config: Mapping[str, Any]) -> Rows:
    """The columns that a definition's templates name, so that a fault in another is none; all where a function may read any."""
    asked = {key: value for key, value in config.items() if key.startswith(("doc_to", "process_"))}
    if any(callable(value) for value in asked.values()):
        return rows
    texts = [text for value in asked.values() for text in ([value] if isinstance(value, str) else value or [])]
    columns = dict.fromkeys(key for row in rows for key in row)
    named = {one for one in columns if any(re.search(rf"(?<!\w){re.escape(one)}(?!\w)", str(text)) for text in texts)}
    return [{key: value for key, value in row.items() if key in named} for row in rows] if named else rows


def find_absent(rows: Rows) -> tuple[int, str] | None:
    """(place from 0, "no 'answers'") of the first row that lacks what the first row has, or the first what all others have."""
    first, *others = [{key for key, value in row.items() if value is not None} for row in rows]
    shared = set.intersection(*others) if others else set[str]()
    for index, (has, wanted) in enumerate([(first, shared), *((one, first) for one in others)]):
        absent = [key for key in rows[1 if index == 0 else 0] if key in wanted - has] if others else []
        if absent:
            return index, f"no '{absent[0]}'"
    return None


def find_odd(rows: Rows, process: Process | None) -> tuple[int, str] | None:
    """(place from 0, what is wrong) of the first row that has another type than most, or that alone cannot be prepared."""
    for key in rows[0]:
        kinds = [_kind(row.get(key)) for row in rows]
        usual = Counter(filter(None, kinds)).most_common(1)[0][0] if any(kinds) else ""
        odd = next((index for index, kind in enumerate(kinds) if kind not in ("", usual)), None)
        if odd is not None:
            return odd, f"'{key}' is {kinds[odd]}, elsewhere {usual}"
    for index, row in enumerate(rows):
        try:
            alone = datasets.Dataset.from_list([row])
            if process is not None:
                process(alone)
        except Exception as error:  # pyarrow's, and whatever the definition's function raises
            return index, reason(error)
    return None


def reason(error: Exception) -> str:
    """An error of others in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _kind(value: Any) -> str:
    """The type of a value of JSON in words, empty for none."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, list):
        return f"a list of {', '.join(sorted({_kind(one) for one in value} - {''}))}".removesuffix(" of ")
    return f"an object of {', '.join(f'{key}: {_kind(inner)}' for key, inner in sorted(value.items()))}"
