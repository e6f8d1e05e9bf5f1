"""The line to a Prefect server: finding one that is running, talking to it, and doing without when it is lost.

Nothing here imports Prefect, so that asking costs milliseconds.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

INSIDE_FLOW = "PALIMPSEST_INSIDE_FLOW"  # set for stages whose run is already a task of the flow
HOME = Path(".prefect")
NO_SERVER = "No Prefect server is running, so this run is shown here alone (python -m pipeline ui starts one)."
LOST = threading.Event()  # set for good when a server that did answer no longer does
SECONDS_BETWEEN_LOOKS = 2.0
LOOKS_BEFORE_LOST = 3  # a busy machine may miss one


def find_server(root: Path = Path()) -> tuple[str | None, str]:
    """(address of a server that answers, "") or (None, one sentence that says why there is none)."""
    asked = os.environ.get("PREFECT_API_URL")
    if asked:
        down = f"Warning: the Prefect server at {asked} (PREFECT_API_URL) does not answer; going on without it."
        return (asked, "") if is_alive(asked) else (None, down)
    try:
        own = json.loads((root / HOME / "server.json").read_text())["url"]
    except (OSError, ValueError, KeyError):
        return None, NO_SERVER
    return (own, "") if is_alive(own) else (None, NO_SERVER)


def is_alive(url: str, seconds: float = 5.0) -> bool:
    """Whether anything answers at `url`; a refusal for want of a key is an answer too."""
    try:
        urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=seconds).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True


def is_loopback(address: str) -> bool:
    """Whether `address` (scheme://host:port) means this machine to whoever asks."""
    host = urllib.parse.urlsplit(address if "://" in address else f"//{address}").hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def open_link(url: str, root: Path = Path()) -> None:
    """Set Prefect up for this process and watch the server. Call before Prefect is imported; the user's settings stay."""
    os.environ["PREFECT_API_URL"] = url
    for name, value in quiet_settings(root).items():
        os.environ.setdefault(name, value)
    threading.Thread(target=_watch, args=(url,), daemon=True).start()


def quiet_settings(root: Path) -> dict[str, str]:
    """No telemetry, no server started behind the user's back, all files under the project, one copy of each line."""
    return {
        "PREFECT_HOME": str((root / HOME).resolve()),
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "PREFECT_CLIENT_MAX_RETRIES": "2",  # each doubles the wait; the default of 5 adds a minute to every call to a dead server
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",
    }


def talk(action: Callable[[], Any]) -> str:
    """Do what needs the server, unless it is lost. Returns in a few words what was wrong instead of failing."""
    if LOST.is_set():
        return "the server is gone"
    try:
        action()
    except Exception as error:  # a lost server shows itself as many kinds of error, and none may cost the run
        return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
    return ""


def leave(status: int) -> None:
    """End the process. If the server was lost, at once: Prefect would try for minutes to tell it what happened."""
    sys.stdout.flush()
    sys.stderr.flush()
    if LOST.is_set():
        os._exit(status)
    sys.exit(status)


def _watch(url: str) -> None:
    missed = 0
    while missed < LOOKS_BEFORE_LOST:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        missed = 0 if is_alive(url, 10) else missed + 1
    LOST.set()
    logging.raiseExceptions = False  # Prefect's log handler complains on stderr for each line it cannot send
    print(f"Warning: the Prefect server at {url} no longer answers; the run goes on without it.", flush=True)
