"""What a kept result was measured under: the files of the variant, the contract, and the code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.files import Files
from stages.decoder.checkpoint import Checkpoint

SMALL = 1 << 20  # files up to this size are read; larger ones are known by size and time of change


def fingerprint(inputs: Files, contract: Mapping[str, Any]) -> str:
    """Hexadecimal SHA-256. Only ever compared on the machine that made it."""
    digest = hashlib.sha256(json.dumps(dict(contract), sort_keys=True).encode())
    here = Path(__file__).parent
    for path in [*sorted(here.glob("*.py")), *sorted((here.parent / "decoder").glob("*.py")), *_read(inputs)]:
        stat = path.stat()
        content = path.read_bytes() if stat.st_size <= SMALL else f"{stat.st_size} {stat.st_mtime_ns}".encode()
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()


def _read(inputs: Files) -> Iterator[Path]:
    """The files that make the variant, those that a manifest points to among them."""
    for name, path in inputs.items():
        if name == "tasks":
            continue
        if path.is_dir():
            yield from sorted(one for one in path.iterdir() if one.is_file())
            yield from sorted(set(Checkpoint(path).shards.values()))
        else:
            yield path
