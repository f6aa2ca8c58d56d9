"""Paths stay inside their directory: names, links and file references; 40 that try to escape."""
# ruff: noqa: E501  (a case reads best on a line)

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from quick_study import at_home, config_of, trained, write_study

from jtrain.config.resolve import resolve
from jtrain.data import TokenFiles
from jtrain.data.text.append_log import AppendLog
from jtrain.data.text.prepare import prepare
from jtrain.data.text.tokenizing import ByteTokens
from jtrain.errors import CheckpointError, ConfigError, DataError, UserError
from jtrain.io.safetensors import read_tensors
from jtrain.train.restore_run import evaluate_run

CONFIG = "configs/quick.yaml"
NAMES = ["..", ".", "../x", "a/../../x", "/x", "/tmp/x", "a/b/c", "~", "~/x", "a\\..\\x", "a\nb", "a\0b", ".hidden", "-rf", "x" * 300, "$HOME", "a;b", "a*", "runs/x"]  # fmt: skip
LINKS = ["config.yaml", "run.json", "metrics.jsonl", "speed.jsonl", "log.txt", "samples.txt", "checkpoints", "pictures", "checkpoints/1", "checkpoints/.writer"]  # fmt: skip
MEMBERS = ["../secret", "/etc/passwd", "..", "", "a/../../secret", "sub/../secret", "link", 3, None, "x\0y", "..\\secret"]  # fmt: skip


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path):
    home = tmp_path / "home"
    home.mkdir()
    write_study(home)
    at_home(home, monkeypatch, compiled)
    (tmp_path / "secret").write_bytes(b"\x00" * 64)


def test_hostile_paths_are_40():
    assert len(NAMES) + len(LINKS) + len(MEMBERS) >= 40


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_hostile_paths_in_the_name_of_a_run(name: str, tmp_path: Path):
    with pytest.raises(ConfigError, match="must be the name of a directory in runs/"):
        resolve(CONFIG, [f"name={json.dumps(name)}"])


@pytest.mark.thorough
@pytest.mark.parametrize("name", LINKS)
def test_hostile_paths_by_a_link_in_a_run(name: str, tmp_path: Path):
    """Refuse the run before training, and read or write nothing through the link."""
    outside, link = tmp_path / "outside", Path("runs/quick") / name
    outside.mkdir()
    target = outside / "file" if "." in name else outside
    if target != outside:
        target.write_text("{}")
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    before = {p: p.stat().st_mtime_ns for p in (outside, *outside.iterdir())}
    with pytest.raises(ConfigError, match=r"is a link to .*Remove the link \(rm "):
        trained(CONFIG)
    with pytest.raises(UserError):
        evaluate_run(config_of(CONFIG), Path("runs/quick"))
    assert {p: p.stat().st_mtime_ns for p in (outside, *outside.iterdir())} == before
    link.unlink()
    assert trained(CONFIG, "steps=1", "log.every=1", "checkpoint.every=0").status == "done", (
        "as it says"
    )


def index(folder: Path, name: object) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=r"which is not in the same folder|names no files"):
        read_tensors(path)


def token_folder(folder: Path, name: object) -> None:
    (folder / "text.txt").write_text("a text\n" * 9)
    prepare(folder / "text.txt", folder / "tokens", tokenizing=ByteTokens(), by="line", shard=23)
    header = json.loads((folder / "tokens" / "header.json").read_text())
    header["shards"][0]["name"] = name
    (folder / "tokens" / "header.json").write_text(json.dumps(header))
    if name == "link":
        (folder / "tokens" / "link").symlink_to(folder.parent / "secret")
    with pytest.raises(DataError, match=r"which is not in the same folder|should be the header of"):
        TokenFiles(folder / "tokens")


def unfinished(folder: Path, name: object) -> None:
    known = [{"name": name, "count": 4, "crc32": 0}]
    with pytest.raises(DataError, match="which is not in the same folder"):
        AppendLog(folder, "tokens-{:05}.bin", np.dtype("<u2"), 9, known)


@pytest.mark.parametrize("reads", [index, token_folder, unfinished])
@pytest.mark.parametrize("name", MEMBERS, ids=ascii)
def test_hostile_paths_in_a_file(
    name: object, reads: Callable[[Path, object], None], tmp_path: Path
):
    if name == "link":
        Path("link").symlink_to(tmp_path / "secret")
    before = (tmp_path / "secret").stat()
    reads(Path.cwd(), name)
    after = (tmp_path / "secret").stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_a_run_in_a_linked_folder_is_resumed(tmp_path: Path):
    """Accept a separate disk for runs/, which is no attack."""
    (tmp_path / "disk").mkdir()
    Path("runs").symlink_to(tmp_path / "disk")
    assert trained(CONFIG, "steps=1", "log.every=1", "checkpoint.every=0").status == "done"
    assert os.listdir(tmp_path / "disk") == ["quick"]


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 1 << 62]},
        {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": ["0", "8"]},
        {"dtype": "O", "shape": [2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [2]},
        [],
        None,
    ],
    ids=repr,
)
def test_a_header_that_lies_about_its_tensors_is_refused(entry: object, tmp_path: Path):
    text = json.dumps({"x": entry}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(CheckpointError, match=r"no complete file of tensors|has the dtype"):
        read_tensors(path)


@pytest.mark.parametrize(
    "places",
    [[(0, 8), (4, 12)], [(0, 16), (4, 8)], [(8, 16), (0, 12)], [(0, 8), (0, 8)]],
    ids=str,
)
def test_tensors_that_share_bytes_are_refused(places: list[tuple[int, int]], tmp_path: Path):
    """1,000 tensors that each span a file would take a thousand times its size in memory."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors(places))
    with pytest.raises(CheckpointError, match=r"at \d+ to \d+ overlaps [ab]"):
        read_tensors(path)


def test_adjacent_and_empty_tensors_do_not_overlap(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors([(8, 16), (8, 8), (0, 8), (16, 16), (0, 0)]))
    assert {name: array.size for name, array in read_tensors(path).items()} == {
        "a": 2,
        "b": 0,
        "c": 2,
        "d": 0,
        "e": 0,
    }


def safetensors(places: list[tuple[int, int]]) -> bytes:
    """Return a file of 16 bytes with tensors a, b ... at these offsets."""
    entry = lambda first, last: {
        "dtype": "F32",
        "shape": [(last - first) // 4],
        "data_offsets": [first, last],
    }
    header = {name: entry(*place) for name, place in zip("abcde", places, strict=False)}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(16)
