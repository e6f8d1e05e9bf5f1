"""What a source of text hands over, for calibration and for evaluation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Split:
    """One split of a corpus: its documents, read once, and what to say of it in the artifact."""

    name: str  # of the split
    documents: Iterable[str]
    files: list[dict[str, str]] = field(default_factory=list)  # {"name", "sha256"}: no folders, they differ between machines


@dataclass(frozen=True)
class Corpus:
    """Text for calibration and text for evaluation."""

    name: str
    calibration: Split
    evaluation: Split
    revision: str = ""  # of a data set of the hub: the commit
