"""What is done already: fits kept while the stage runs, outside of its outputs, so that a killed run goes on where it was."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.artifacts import write_text
from pipeline.tensors import TensorFile, write_tensors
from stages.decoder.checkpoint import Checkpoint

MARK = "made-from"


def fingerprint(checkpoints: Sequence[Checkpoint], tokens: Path, tape: Path, params: dict[str, Any], device: str) -> str:
    """Everything the fits depend on: parameters, tokens, tape (its size; the others determine the rest), this code, and the
    checkpoints: the model, and what blocks start from."""
    digest = hashlib.sha256(json.dumps([params, device], sort_keys=True, default=str).encode())
    for checkpoint in checkpoints:
        digest.update(json.dumps(checkpoint.manifest, sort_keys=True).encode())
        if not checkpoint.manifest.get("files"):  # else the manifest has their checksums
            for path in [checkpoint.folder / "config.json", *sorted(set(checkpoint.shards.values()))]:
                digest.update(path.name.encode())
                _add(digest, path)
    _add(digest, tokens)
    digest.update(str(tape.stat().st_size).encode())
    for file in sorted([*Path(__file__).parent.glob("*.py"), *(Path(__file__).parents[1] / "decoder").glob("*.py")]):
        _add(digest, file)
    return digest.hexdigest()


def _add(digest: Any, path: Path) -> None:
    with path.open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())


class Kept:
    """Tensors by name in a folder that is emptied if it belongs to other parameters, and removed by `clear`."""

    def __init__(self, folder: Path, made_from: str):
        self._folder = folder
        mark = folder / MARK
        if not mark.exists() or mark.read_text(encoding="utf-8") != made_from:
            shutil.rmtree(folder, ignore_errors=True)
            write_text(mark, made_from)

    def read(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The tensors and what was noted with them; None if there are none."""
        path = self._path(name)
        if not path.exists():
            return None
        file = TensorFile(path)
        return {one: file.read(one) for one in file.names()}, file.metadata

    def write(self, name: str, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
        """Keep tensors under a name; whole or not at all."""
        write_tensors(self._path(name), tensors, notes)

    def clear(self) -> None:
        """Remove all of it."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()[:20]}.safetensors"
