"""The parameters as the page shows them: every section, with what the chosen methods do not use set apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from pipeline.drawing.notation import plain


@dataclass(frozen=True)
class Setting:
    """One key and its value as text. `style` has `inner` for keys of a method and `idle` where another method is chosen."""

    key: str
    value: str
    style: str = ""


def settings(params: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Setting]]:
    """Section -> its settings, in the order of `params`."""
    return {section: _section(values) for section, values in params.items()}


def _section(values: Mapping[str, Any]) -> list[Setting]:
    rows = []
    for key, value in values.items():
        if not isinstance(value, Mapping):
            rows.append(Setting(key, _shown(value)))
            continue
        idle = "method" in values and values["method"] != key
        rows.append(Setting(key, "not used" if idle else "", "idle" if idle else ""))
        rows += [Setting(inner, _shown(one), "inner idle" if idle else "inner") for inner, one in value.items()]
    return rows


def _shown(value: Any) -> str:
    """A value as text; of a path of this machine only the last part."""
    if isinstance(value, list):
        return "[" + ", ".join(_shown(one) for one in value) + "]"
    if isinstance(value, str) and len(value) > 1 and PurePath(value).is_absolute():
        return f"…/{PurePath(value).name}"
    return plain(value)
