"""Measuring a command from outside. Imports nothing large: a child's peak memory counts its parent's at its birth."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def run_apart(arguments: list[str], folder: Path) -> tuple[float, int]:
    """Run Python in a process of its own; (seconds, peak resident bytes) by the operating system's account."""
    start = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen([sys.executable, *arguments], cwd=folder, stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(arguments)} failed")
    return time.monotonic() - start, usage.ru_maxrss * 1024


def make_apart(root: Path, width: int, blocks: int, windows: int, length: int) -> int:
    """Make a project around a random model in a process of its own (`tests.bench.project`); bytes of a block in float32."""
    command = [sys.executable, "-m", "tests.bench.project", *map(str, (root, width, blocks, windows, length))]
    return int(subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])
