"""A stand-in for the Hugging Face hub on this machine: serves folders as model or data set repositories, as the hub answers."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CLOSED = "http://127.0.0.1:9"  # nothing listens there


@contextmanager
def serve(folders: dict[str, Path]) -> Iterator[str]:
    """Serve `name -> folder`, and `name@revision -> folder`, until the context ends; yields the address.

    A name that begins with `gated/` is refused.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            self._answer(body=True, posted=self.rfile.read(length))

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def _answer(self, body: bool, posted: bytes = b"") -> None:
            path = self.path.split("?")[0]
            api = re.fullmatch(r"/api/(?:models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+))?(?:/(.*))?", path)
            file = re.fullmatch(r"/(?:datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            match = api or file
            if not match or match[1] not in folders:
                return self._send(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}, body)
            if match[1].startswith("gated/"):
                return self._send(403, b'{"error": "Access is restricted"}', {"X-Error-Code": "GatedRepo"}, body)
            found = _find(folders, match[1], match[2] if file else match[3])
            if found is None:
                return self._send(404, b'{"error": "Invalid rev id"}', {"X-Error-Code": "RevisionNotFound"}, body)
            folder, commit = found
            if api:
                described = json.dumps(_describe(api, folder, commit, posted)).encode()
                return self._send(200, described, {"Content-Type": "application/json"}, body)
            content = (folder / match[3]).read_bytes() if (folder / match[3]).is_file() else None
            if content is None:
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, body)
            return self._send(200, content, {"ETag": f'"{_blob(folder / match[3])}"', "X-Repo-Commit": commit}, body)

        def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def use_hub(monkeypatch: pytest.MonkeyPatch, address: str, cache: Path) -> None:
    """Point the hub's clients at `address` and at a cache of their own."""
    import datasets.config
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", address)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)


def _blob(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()


def commit_of(revision: str | None) -> str:
    """The commit that a revision means: COMMIT is that of main."""
    return COMMIT if revision in (None, "main") else hashlib.sha1(str(revision).encode(), usedforsecurity=False).hexdigest()


def _find(folders: dict[str, Path], name: str, revision: str | None) -> tuple[Path, str] | None:
    """The folder that a revision, by name or by commit, stands for, and its commit."""
    known = {one.partition("@")[2] or "main": folder for one, folder in folders.items() if one.partition("@")[0] == name}
    for one, folder in known.items():
        if (revision or "main") in (one, commit_of(one)):
            return folder, commit_of(one)
    return None


def _describe(api: re.Match[str], folder: Path, commit: str, posted: bytes) -> Any:
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    entries = [
        {"type": "file", "path": name, "size": (folder / name).stat().st_size, "oid": _blob(folder / name)} for name in files
    ]
    if api[2] == "tree":
        return entries
    if api[2] == "paths-info":
        asked = json.loads(posted or b"{}").get("paths", [])
        return [entry for entry in entries if entry["path"] in asked]
    siblings = [{"rfilename": entry["path"], "size": entry["size"], "blobId": entry["oid"]} for entry in entries]
    return {"id": api[1], "sha": commit, "private": False, "gated": False, "tags": [], "siblings": siblings, "downloads": 0}
