"""What a stage tells the person watching: its plan, its progress, its result. Plain lines, so that logs read well."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import TypeVar

from pipeline.artifacts import human_bytes
from pipeline.errors import PalimpsestError

Item = TypeVar("Item")
SECONDS_BETWEEN_LINES = 5.0


def say(text: str) -> None:
    """Print one line at once, also into a pipe."""
    print(f"  {text}", flush=True)


def progress(items: Iterable[Item], what: str, total: int | None = None) -> Iterator[Item]:
    """Yield `items`, printing `what 12/30, 40 s left` every few seconds."""
    count = total if total is not None else len(items) if isinstance(items, Sized) else 0
    start = last = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if done and now - last >= SECONDS_BETWEEN_LINES:
            left = f", about {(now - start) / done * (count - done):.0f} s left" if count else ""
            say(f"{what} {done}/{count or '?'}{left}")
            last = now
        yield item


def available_memory() -> int:
    """Bytes of memory that can still be taken without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        return kib["MemAvailable"] * 1024
    except (OSError, KeyError, ValueError):
        import os

        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def plan(memory: int, disk: int, folder: Path, memory_key: str, disk_key: str) -> None:
    """Print what a heavy stage is about to take, and refuse what cannot fit.

    Args:
        memory: peak bytes of memory the stage expects to hold.
        disk: bytes it will write below `folder`.
        memory_key, disk_key: the keys of params.yaml to lower when it does not fit; empty if none would help.
    """
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    have = available_memory()
    say(f"plan: memory {human_bytes(memory)} of {human_bytes(have)}, disk {human_bytes(disk)} of {human_bytes(free)} free")
    if disk > free:
        hint = f"lower {disk_key} in params.yaml or free space" if disk_key else "free space"
        raise PalimpsestError(f"{folder}: {human_bytes(disk)} to write but {human_bytes(free)} free; {hint}")
    if memory > have:
        hint = f"lower {memory_key} in params.yaml" if memory_key else "close other programs or take a larger machine"
        raise PalimpsestError(f"{human_bytes(memory)} of memory needed but {human_bytes(have)} available; {hint}")
