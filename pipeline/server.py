"""`python -m pipeline ui`: a Prefect server for this project, on loopback, with its home under the project."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from pipeline.errors import PalimpsestError
from pipeline.link import HOME, is_alive, quiet_settings

STARTUP_SECONDS = 120


def serve(port: int, root: Path = Path()) -> None:
    """Run a server for this project on loopback until it is interrupted.

    Raises PalimpsestError if the port is taken or the server does not come up.
    """
    if _is_taken(port):
        raise PalimpsestError(f"port {port} on 127.0.0.1 is taken; choose another: python -m pipeline ui --port {port + 1}")
    home = (root / HOME).resolve()
    home.mkdir(exist_ok=True)
    address, log = f"http://127.0.0.1:{port}", home / "server.log"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
            env={**os.environ, **quiet_settings(root), **_server_settings(address)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    note = home / "server.json"
    try:
        print("Starting the Prefect server ...", flush=True)
        _wait_until_up(process, f"{address}/api", log)
        note.write_text(json.dumps({"url": f"{address}/api"}))
        print(
            f"\n  {address}\n\nLeave this running (Ctrl-C ends it) and, in another terminal: python -m pipeline run\n"
            "Or, for a button to start runs with: python -m pipeline serve",
            flush=True,
        )
        if process.wait():
            raise PalimpsestError(f"the Prefect server ended with status {process.returncode}; its log: {log}")
    except KeyboardInterrupt:
        print("\nServer ended.")
    finally:
        note.unlink(missing_ok=True)
        process.terminate()
        process.wait(timeout=30)


def _server_settings(address: str) -> dict[str, str]:
    """The UI asks port 4200 unless it is told otherwise, whatever port the server has."""
    return {
        "PREFECT_API_URL": f"{address}/api",
        "PREFECT_SERVER_UI_API_URL": f"{address}/api",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    }


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def _wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + STARTUP_SECONDS
    while not is_alive(url):
        if process.poll() is not None or time.monotonic() > end:
            last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
            raise PalimpsestError(f"the Prefect server did not start: {''.join(last) or 'no message'}; its log: {log}")
        time.sleep(0.2)
