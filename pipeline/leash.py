"""`python leash.py COMMAND …` runs a command that ends when the process that started it does, even by kill -9.

Standard input is a pipe that the starter holds open and never writes to: when it closes, the starter is gone, and the
command and all under it are interrupted as by Ctrl-C. So a Dask worker that dies leaves no stage behind that would go on
beside the worker that takes over.
"""

import os
import signal
import subprocess
import sys
import threading


def main(command: list[str]) -> int:
    """Run `command` and return its exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # they reach the command too, and this process ends with it
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_watch, daemon=True).start()
    status = process.wait()
    return status if status >= 0 else 128 - status


def _watch() -> None:
    os.read(0, 1)
    os.killpg(os.getpgrp(), signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
