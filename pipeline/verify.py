"""Find files of the cache that are not what DVC takes them for, and drop them, so that the next `dvc repro` makes them anew.

DVC links large files from its cache into data/, which saves half the disk. Something that writes into such a file in
place changes the cached one too, and DVC, which trusts its cache, would hand the damaged file out for ever.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from pipeline.files import DATA

CACHE = Path(".dvc/cache/files/md5")


def verify(root: Path = Path()) -> list[str]:
    """Remove every cached file whose content does not match its name, and its links below data/. Returns what was removed."""
    removed: list[str] = []
    for cached in sorted((root / CACHE).glob("??/*")):
        if not cached.is_file() or _md5(cached) == cached.parent.name + cached.name.removesuffix(".dir"):
            continue
        for path in (root / DATA).rglob("*"):
            if path.is_file() and path.samefile(cached):
                path.unlink()
                removed.append(str(path))
        cached.unlink()
        removed.append(str(cached))
    return removed


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()
