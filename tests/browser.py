"""A page in headless Chromium, as much of it as tests look at, through its DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import connect
from websockets.sync.connection import Connection

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)


class Page:
    """One tab."""

    def __init__(self, socket: Connection):
        self._socket, self._numbers = socket, itertools.count(1)

    def size(self, width: int, height: int) -> None:
        """Show pages as a telephone of this many pixels would; windows themselves are never that narrow."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=True)

    def open(self, url: str) -> None:
        """Go to `url`; what it shows comes later."""
        self._call("Page.navigate", url=url)

    def text(self) -> str:
        """What can be read on the page now."""
        return self.ask("document.body ? document.body.innerText : ''")

    def ask(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        return answer.get("result", {}).get("value")

    def wait_for(self, script: str, seconds: float = 40) -> Any:
        """The value of the expression once it is truthy. Raises AssertionError with the page's text if it never is."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(KeyError):
                if value := self.ask(script):
                    return value
            time.sleep(0.3)
        raise AssertionError(f"never true: {script}\n{self.text()}")

    def click(self, text: str) -> None:
        """Click the last button or menu entry that reads `text`, once it is there."""
        found = f"[...document.querySelectorAll('button,a,li,[role=tab]')].filter(e => e.innerText.trim() == {json.dumps(text)})"
        self.wait_for(f"{found}.length")
        self.ask(f"{found}.at(-1).click()")

    def picture(self, path: Path) -> None:
        """Save a screenshot as PNG."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": arguments}))
        while True:
            answer = json.loads(self._socket.recv(timeout=60))
            if answer.get("id") == number:
                return answer.get("result", {})


@contextlib.contextmanager
def open_page(width: int = 1400, height: int = 1200) -> Iterator[Page]:
    """A tab of a Chromium that is started for it, on loopback, with a profile that is thrown away."""
    assert CHROMIUM, "no Chromium here"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-port=0",
            f"--window-size={width},{height}",
        ]
        process = subprocess.Popen(
            [CHROMIUM, *options, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            with connect(_address(Path(profile)), max_size=2**26, proxy=None) as socket:
                yield Page(socket)
        finally:
            process.terminate()
            process.wait(timeout=30)


def _address(profile: Path) -> str:
    """The tab's websocket; Chromium writes its port into the profile."""
    import urllib.request

    note, end = profile / "DevToolsActivePort", time.monotonic() + 60
    while not (note.exists() and note.read_text().count("\n")):
        assert time.monotonic() < end, "Chromium did not start"
        time.sleep(0.1)
    port = note.read_text().splitlines()[0]
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
            tabs = [one for one in json.load(answer) if one["type"] == "page"]
        if tabs:
            return tabs[0]["webSocketDebuggerUrl"]
        time.sleep(0.1)
