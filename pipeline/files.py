"""The files a stage may touch: what dvc.yaml declares for it, and no others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeline.errors import PalimpsestError

DATA = "data/"


class Files(Mapping[str, Path]):
    """The inputs or the outputs of a stage: name below data/ -> path. Asking for an undeclared one is an error."""

    def __init__(self, stage: str, kind: str, names: tuple[str, ...], root: Path):
        self._stage, self._kind = stage, kind
        self._paths = {name: root / DATA / name for name in names}

    def __getitem__(self, name: str) -> Path:
        if name not in self._paths:
            raise PalimpsestError(
                f"stage '{self._stage}' uses '{name}', which dvc.yaml does not declare among its {self._kind} "
                f"({', '.join(self._paths) or 'none'}); declare it there, or the cache will not see it"
            )
        return self._paths[name]

    def __contains__(self, name: object) -> bool:
        """Whether dvc.yaml declares `name`: stages that serve several variants ask this."""
        return name in self._paths

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)
