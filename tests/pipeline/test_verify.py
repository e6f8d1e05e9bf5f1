"""Damage to a linked artifact is found, dropped from the cache too, and made anew by DVC."""

from __future__ import annotations

from pathlib import Path

from pipeline.reproduce import reproduce
from pipeline.verify import verify
from tests.toy import make_toy


def test_a_file_damaged_in_place_is_made_anew(tmp_path: Path) -> None:
    root = make_toy(tmp_path)
    reproduce(root=root)
    path = root / "data/removal.json"
    good = path.read_bytes()
    assert verify(root) == []
    path.chmod(0o644)
    with path.open("r+b") as file:  # in place: the cache's copy is the same file
        file.write(b"X")
    assert path.stat().st_nlink > 1 and path.read_bytes() != good
    removed = verify(root)
    assert any(name.endswith("removal.json") for name in removed) and len(removed) == 2
    assert not path.exists()
    answers = reproduce(root=root)
    assert answers["removal"] == "ran" and path.read_bytes() == good
