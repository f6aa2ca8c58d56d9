"""Irregular and oversized files are refused at once: nothing waits, no memory is filled."""

import os
import resource
import socket
from pathlib import Path

import pytest

from jtrain.io.regular_files import TooLargeError, open_regular, parse_json, read_bytes, read_json


def test_a_regular_file_is_read_and_written_as_by_open(tmp_path: Path):
    path = tmp_path / "a"
    with open_regular(path, "wb") as file:
        file.write(b"one")
    with open_regular(path, "ab", buffering=0) as file:
        file.write(b" two")
    with open_regular(path, "r+b") as file:
        file.write(b"O")
    assert read_bytes(path, most=7) == b"One two"
    (tmp_path / "link").symlink_to(path)
    assert read_bytes(tmp_path / "link", most=7) == b"One two"
    path.write_text('{"a": [1]}')
    assert read_json(path) == {"a": [1]}


@pytest.mark.parametrize("mode", ["rb", "ab", "wb", "r+b"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "device"])
def test_an_irregular_file_is_refused_at_once_by_its_kind(kind, mode, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    path = Path("/dev/zero") if kind == "device" else Path("x")
    with socket.socket(socket.AF_UNIX) as listener:
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "socket":
            listener.bind("x")
        words = {"pipe": "a named pipe", "folder": "a directory"}.get(kind, f"a {kind}")
        with pytest.raises(OSError, match=f"is {words}, and should be a file"):
            open_regular(path, mode)


def test_a_missing_file_is_missing(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none", most=1)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none", "r+b")


def test_a_file_longer_than_the_limit_is_not_read(tmp_path: Path):
    path = tmp_path / "long"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TooLargeError, match="is longer than 1,000,000 bytes"):
        read_bytes(path, most=1_000_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000, "kB"


@pytest.mark.parametrize(
    "deep", ["[" * 65 + "]" * 65, '{"a":' * 3000 + "1" + "}" * 3000, "[" * 10**6]
)
def test_json_nested_without_end_is_refused(deep: str, tmp_path: Path):
    with pytest.raises(ValueError, match="nested deeper than 64 levels"):
        parse_json(deep)
    (tmp_path / "deep.json").write_text(deep)
    with pytest.raises(ValueError, match="nested deeper than 64 levels"):
        read_json(tmp_path / "deep.json")


def test_json_as_deep_as_allowed_is_read():
    assert parse_json("[" * 64 + "]" * 64)
    assert parse_json('"' + "[" * 100 + '"') == "[" * 100
