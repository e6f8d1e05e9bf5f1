"""The two splits of whatever source is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stages.corpus.demo import read_demo
from stages.corpus.files import read_files
from stages.corpus.hub import read_hub
from stages.corpus.section import Text
from stages.corpus.splits import Corpus

SOURCES: dict[str, Callable[[Text, Path], Corpus]] = {"demo": read_demo, "files": read_files, "hub": read_hub}


def read_corpus(text: Text, data: Path) -> Corpus:
    """The splits that `text` names; `data` is the project's data folder. Documents are read when they are asked for.

    Raises PalimpsestError naming the key, file, row, data set or package that is not as it should be.
    """
    return SOURCES[text.source](text, data)
