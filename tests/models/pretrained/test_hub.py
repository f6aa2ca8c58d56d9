"""Names on the Hugging Face Hub, of which one is on this machine: downloads, pins, uploads."""

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

import numpy as np
import published_models as published
import pytest
from safetensors.numpy import save_file

from jtrain.cli import main
from jtrain.errors import CheckpointError
from jtrain.io import hub
from jtrain.io.hub import local_folder, pin_commits, push_folder, resolved_commits
from jtrain.models.pretrained.source import PretrainedWeights
from jtrain.models.pretrained.values import read_hf_config
from jtrain.models.transformer import Transformer


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


pytest.importorskip("huggingface_hub")


@pytest.fixture(name="hub")
def _hub(tmp_path, monkeypatch):
    with serve_hub(tmp_path / "cache", monkeypatch) as hub:
        monkeypatch.chdir(tmp_path)
        yield hub


def put_llama(hub: FakeHub, folder: Path, name: str = "org/small") -> str:
    """Serve a small Llama in two files, with a pickle and a program that nobody asks for."""
    golden = published.golden("llama")
    published.write_model(folder, golden)
    (folder / "model.safetensors").unlink()
    tensors = published.tensors_of(golden)
    weight_map = {x: f"model-{i % 2 + 1:05}-of-00002.safetensors" for i, x in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file(
            {x: tensors[x] for x, other in weight_map.items() if other == file}, folder / file
        )
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "pytorch_model.bin").write_text("a pickle")
    (folder / "modeling.py").write_text("a program")
    return hub.put(name, folder)


def test_a_name_is_a_model_and_stands_for_one_commit(hub, tmp_path):
    first = put_llama(hub, tmp_path / "one")
    model = Transformer(pretrained="org/small", dropout=0.1)
    assert (model.layers, model.width) == (2, 16)
    asked = " ".join(hub.asked)
    assert "/config.json" in asked
    assert "/model-0" not in asked, "values need no weights"
    put_llama(hub, tmp_path / "two")  # the branch moves
    source = PretrainedWeights("org/small")
    assert first in source.where
    want = PretrainedWeights(tmp_path / "one")
    for name, array in source.read(source.found).items():
        np.testing.assert_array_equal(array, want.read(want.found)[name])
    asked = " ".join(hub.asked)
    assert "pytorch_model.bin" not in asked
    assert "modeling.py" not in asked
    assert resolved_commits() == {"org/small": first}


def test_what_is_in_the_cache_needs_no_network(hub, tmp_path, monkeypatch):
    old, new = put_llama(hub, tmp_path / "one"), put_llama(hub, tmp_path / "two")
    assert local_folder("org/small").name == new
    assert local_folder(f"org/small@{old}").name == old
    pin_commits({"org/small": old, "org/other": "../../etc"})  # as a resumed run does
    assert local_folder("org/small").name == old
    assert set(resolved_commits()) == {"org/small", f"org/small@{old}"}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    pin_commits({"org/small": new})
    assert read_hf_config("org/small")["model_type"] == "llama"
    with pytest.raises(CheckpointError, match=r"HF_HUB_OFFLINE is set.*hf download org/other "):
        local_folder("org/other")
    Path("org/other").mkdir(parents=True)
    assert local_folder("org/other") == Path("org/other"), "a local folder comes first"
    for path in ("a/b/c", "./org/x", "org/model.safetensors", "/etc/x", "~/x"):
        assert local_folder(path) == Path(path)


def test_what_the_hub_refuses_says_what_to_type(hub, tmp_path, monkeypatch):
    put_llama(hub, tmp_path / "one")
    with pytest.raises(CheckpointError, match=r"org/small@v9 has no revision v9. Name a branch"):
        local_folder("org/small@v9")
    with pytest.raises(CheckpointError, match=r"neither a local path nor a model.*set HF_TOKEN"):
        local_folder("org/smal")
    hub.gated.add("org/small")
    with pytest.raises(CheckpointError, match=r"is gated. Accept its terms at http.*set HF_TOKEN"):
        local_folder("org/small")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert local_folder("org/small").is_dir()
    hub.shutdown()
    hub.server_close()
    with pytest.raises(CheckpointError, match=r"the Hub is not asked \(ConnectError") as caught:
        local_folder("org/never")
    assert "hf_secret" not in str(caught.value)


def test_a_folder_is_pushed_as_it_is(hub, tmp_path, monkeypatch):
    folder = published.write_model(tmp_path / "out", published.golden("llama"))
    with pytest.raises(
        CheckpointError, match=r"upload to me/mine failed .*Give a token that may w"
    ):
        push_folder(folder, "me/mine", private=True)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert push_folder(folder, "me/mine", private=True) == f"{hub.url}/me/mine"
    assert "private" in (hub.created.get("visibility"), *hub.created)
    assert hub.pushed == {x.name: x.read_bytes() for x in folder.iterdir()}
    with pytest.raises(CheckpointError, match="upload to mine/a/b failed"):
        push_folder(folder, "mine/a/b", private=False)


RUN = """
experiment: language
name: tuned
steps: 1
batch: 8
data: {kind: random, vocab: 31, context: 8}
model: {from: org/small}
optimizer: {kind: sgd, lr: 1.0e-30}
evaluate: {every: 0}
"""


@pytest.mark.thorough
def test_a_run_keeps_its_commit_and_is_pushed(hub, tmp_path, monkeypatch, capsys):
    first = put_llama(hub, tmp_path / "one")
    (tmp_path / "tuned.yaml").write_text(RUN)
    assert main(["run", "tuned.yaml"]) == 0
    assert f"starts from org/small at commit {first}" in capsys.readouterr().out
    put_llama(hub, tmp_path / "two")
    forget_commits(monkeypatch)  # as another process does
    assert main(["run", "tuned.yaml", "steps=2"]) == 0
    assert json.loads(Path("runs/tuned/run.json").read_text())["hub"] == {"org/small": first}

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert main(["export", "tuned", "--to", "hf", "--push", "me/mine"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{hub.url}/me/mine"
    (tmp_path / "back").mkdir()
    for name, content in hub.pushed.items():
        (tmp_path / "back" / name).write_bytes(content)
    sent, back = PretrainedWeights(tmp_path / "one"), PretrainedWeights(tmp_path / "back")
    for name, array in sent.read(sent.found).items():
        np.testing.assert_array_equal(array, back.read(back.found)[name])
