"""A Hub on this machine: the endpoints that huggingface_hub downloads from and uploads to."""

import base64
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

from jtrain.io import hub


class FakeHub(ThreadingHTTPServer):
    """Models by name, each a folder for every commit, and what it was asked."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models: dict[str, dict[str, Path]] = {}
        """The folder of each commit, and of `main`."""
        self.gated: set[str] = set()
        self.asked: list[str] = []
        self.pushed: dict[str, bytes] = {}
        self.created: dict[str, Any] = {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def put(self, name: str, folder: Path) -> str:
        """Let `main` of a model be a folder; return the commit."""
        commit = hashlib.sha1(f"{name} {folder}".encode()).hexdigest()
        self.models.setdefault(name, {}).update({commit: folder, "main": folder})
        return commit


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        api = re.fullmatch(r"/api/models/(\w+/[\w-]+)/(revision|tree)/([^/]+)", path)
        file = re.fullmatch(r"/(\w+/[\w-]+)/resolve/([^/]+)/(.+)", path)
        self.server.asked.append(f"{self.command} {path}")
        if (match := api or file) is None:
            return self._fail(404, "EntryNotFound")
        name, revision = match[1], match[3] if api else match[2]
        if name in self.server.gated and "authorization" not in self.headers:
            return self._fail(403, "GatedRepo")
        if name not in self.server.models:
            return self._fail(401, "RepoNotFound")
        folders = self.server.models[name]
        if (folder := folders.get(revision)) is None:
            return self._fail(404, "RevisionNotFound")
        commit = next(sha for sha, x in folders.items() if x == folder and sha != "main")
        if file:
            return self._send(commit, (folder / file[3]).read_bytes())
        listing = [
            {"type": "file", "path": x.name, "size": x.stat().st_size, "oid": _oid(x)}
            for x in sorted(folder.iterdir())
        ]
        info = {"id": name, "sha": commit, "siblings": [{"rfilename": x["path"]} for x in listing]}
        return self._send(commit, json.dumps(info if api[2] == "revision" else listing).encode())

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.append(f"POST {self.path}")
        if self.path == "/api/repos/create":
            if "authorization" not in self.headers:
                return self._fail(401, "")
            made = self.server.created = json.loads(body)
            found: Any = {"url": f"{self.server.url}/{made['organization']}/{made['name']}"}
        elif "/preupload/" in self.path:
            names = [x["path"] for x in json.loads(body)["files"]]
            found = {"files": [
                {"path": x, "uploadMode": "regular", "shouldIgnore": False} for x in names
            ]}  # fmt: skip
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.server.pushed[line["value"]["path"]] = content
            found = {
                "commitUrl": f"{self.server.url}/me/mine/commit/a",
                "commitOid": "a" * 40,
                "success": True,
            }
        return self._send("a" * 40, json.dumps(found).encode())

    def _send(self, commit: str, content: bytes) -> None:
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


def _oid(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def serve_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Serve a Hub, empty and reachable, with an empty cache."""
    from huggingface_hub import constants

    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in {
        "HF_HUB_OFFLINE": False, "ENDPOINT": server.url, "HF_HUB_CACHE": str(cache),
        "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_TOKEN_PATH": str(cache / "token"),
    }.items():  # fmt: skip
        monkeypatch.setattr(constants, name, value)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    forget_commits(monkeypatch)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def forget_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process resolve names anew."""
    monkeypatch.setattr(hub, "_commits", {})
    monkeypatch.setattr(hub, "_folders", {})
