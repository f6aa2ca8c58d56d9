"""A file of data or of a model that is no file, no JSON or of other types is told, and waited for
by nobody."""

import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from permissions import permissions_hold

from jtrain.checkpoint.weights_source import open_source
from jtrain.data.images.decode import ImageSize, decode_image
from jtrain.data.sources import json_rows
from jtrain.data.sources.idx import read_idx
from jtrain.data.sources.parquet import ParquetRows
from jtrain.data.sources.read_rows import SUFFIXES, read_rows
from jtrain.data.sources.tfrecord import TFRecords
from jtrain.data.text.characters import read_text
from jtrain.data.text.prepare import prepare
from jtrain.data.text.template_file import read_template
from jtrain.data.text.token_files import TokenFiles, read_tokens
from jtrain.data.text.tokenizer_file import read_tokenizer
from jtrain.data.text.tokenizing import ByteTokens
from jtrain.errors import CheckpointError, DataError, UserError
from jtrain.io.safetensors import read_tensors
from jtrain.models.pretrained.gguf_file import read_gguf

DEEP = "[" * 100_000 + "]" * 100_000
SHALLOW = "[" * 100 + "]" * 100


def header(text: str) -> bytes:
    """Return a file of tensors with this header."""
    return struct.pack("<Q", len(text)) + text.encode()


WANTED = {"x": np.zeros(2, np.float32)}
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "tensors": ("a.safetensors", read_tensors),
    "an index of tensors": ("a.safetensors.index.json", read_tensors),
    "parameters to start from": ("a.safetensors", lambda path: open_source(str(path))),
    "a tokenizer": ("tokenizer.json", read_tokenizer),
    "text": ("a.txt", read_text),
    "tokens": ("a.bin", read_tokens),
    "numpy tokens": ("a.npy", read_tokens),
    "records": ("a.tfrecord", TFRecords),
    "images": ("a-idx3-ubyte", read_idx),
    "packed images": ("a-idx3-ubyte.gz", read_idx),
    "an image": ("a.png", lambda path: decode_image(path, ImageSize(height=8, width=8))),
    "a chat template": ("a.jinja", lambda path: read_template(str(path))),
    "a tokenizer's config": ("tokenizer_config.json", lambda path: read_template(str(path))),
    "conversations": (
        "a.jsonl",
        lambda path: list(json_rows.read_rows(str(path), [], noun="row", form="a row")),
    ),
    "a table": ("a.parquet", lambda path: ParquetRows(path)),
    "a model of GGUF": ("a.gguf", read_gguf),
    **{f"rows of {s}": (f"a{s}", lambda path: read_rows(path, WANTED)) for s in SUFFIXES},
}


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "unreadable"])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_told_and_not_waited_for(reader, kind, tmp_path: Path):
    name, read = READERS[reader]
    path = tmp_path / name
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        path.write_bytes(bytes(100))
        path.chmod(0)
    with permissions_hold(), pytest.raises((DataError, CheckpointError)) as refusal:
        read(path)
    message = str(refusal.value)
    assert str(path) in message
    words = {"a pipe": "a named pipe", "a folder": ("a folder", "a directory")}.get(kind, "")
    assert any(word in message for word in ([words] if isinstance(words, str) else words))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.safetensors", header('{"w": ' + DEEP + "}")),
        ("a.safetensors", header('{"w": ' + SHALLOW + "}")),
        ("a.safetensors", header("null")),
        ("a.safetensors", header("[1, 2]")),
        ("a.safetensors", header('{"w": null}')),
        ("a.safetensors", header('{"w": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}')),
        ("a.safetensors", struct.pack("<Q", 200_000_000) + bytes(10)),
        ("a.safetensors.index.json", ('{"weight_map": ' + DEEP + "}").encode()),
        ("a.safetensors.index.json", b'{"weight_map": {"w": ["b.safetensors"]}}'),
        ("a.safetensors.index.json", b'{"weight_map": [1]}'),
        ("a.safetensors.index.json", b'{"weight_map": null}'),
        ("a.safetensors.index.json", b"\xff\xfe"),
        ("tokenizer.json", ('{"kind": ' + DEEP + "}").encode()),
        ("tokenizer.json", ('{"model": ' + SHALLOW + "}").encode()),
        ("tokenizer.json", b'{"kind": "characters", "characters": 3}'),
        ("tokenizer.json", b'{"kind": ["bytes"]}'),
        ("tokenizer.json", b"null"),
    ],
)
def test_json_that_no_model_folder_holds_is_told(name: str, content: bytes, tmp_path: Path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError):
        read_tokenizer(path) if name == "tokenizer.json" else read_tensors(path)


def test_a_packed_file_that_expands_to_gigabytes_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch
):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.zeros((2_000_000, 2), np.float32))
    monkeypatch.setattr("jtrain.data.sources.read_rows.MOST_UNPACKED", 1 << 20)
    with pytest.raises(DataError, match=r"would unpack to 16,000,128 bytes.*np\.savez"):
        read_rows(path, WANTED)
    np.savez(path, x=np.zeros((2_000_000, 2), np.float32))
    assert len(read_rows(path, WANTED)["x"]) == 2_000_000


@pytest.mark.parametrize("shape", ["(1099511627776, 2)", "(9223372036854775807,)"])
def test_an_array_of_more_numbers_than_its_file_is_refused(shape: str, tmp_path: Path):
    head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
    npy = b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + head.encode() + bytes(8)
    (tmp_path / "a.npy").write_bytes(npy)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", npy)
    for name in ("a.npy", "a.npz"):
        with pytest.raises(DataError, match="cannot be read"):
            read_rows(tmp_path / name, WANTED)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of token files."""
    place = tmp_path_factory.mktemp("written")
    (place / "a.txt").write_text("All the world's a stage.")
    prepare(place / "a.txt", place / "out", tokenizing=ByteTokens())
    return place


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokens", None),
        ("tokens", "many"),
        ("vocab", -1),
        ("dtype", "object"),
        ("dtype", 3),
        ("shards", None),
        ("shards", [{"name": "tokens-00000.bin"}]),
        ("shards", [{"name": 3, "count": 1, "crc32": 0}]),
        ("ends", []),
        ("asked", None),
        ("tokenizer", None),
    ],
)
def test_a_header_of_other_types_is_told(key, value, written: Path, tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    for file in (written / "out").iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    head = json.loads((out / "header.json").read_text())
    (out / "header.json").write_text(json.dumps({**head, key: value}))
    with pytest.raises(DataError, match=f"its {key} is .* Write it: jtrain data prep"):
        TokenFiles(out)


@pytest.mark.parametrize(
    "note",
    [
        "",
        "{",
        "null",
        "[1]",
        '{"asked": ' + DEEP + "}",
        '{"asked": {}, "place": 3}',
        '{"asked": {}, "place": [0, 0]}',
        '{"asked": {}, "place": [0, 0], "open": false, "tokens": null, "documents": []}',
    ],
)
def test_a_note_of_how_far_token_files_are_that_is_damaged_is_told(note, tmp_path: Path):
    (tmp_path / "a.txt").write_text("Exeunt.")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "progress.json").write_text(note)
    with pytest.raises(DataError, match=r"holds the progress .* Start again: rm -r "):
        prepare(tmp_path / "a.txt", tmp_path / "out", tokenizing=ByteTokens())


def test_token_files_that_are_to_lie_in_a_file_are_told(tmp_path: Path):
    (tmp_path / "a.txt").write_text("Exeunt.")
    with pytest.raises(DataError, match=r"cannot be created \(File exists\).* set --out "):
        prepare(tmp_path / "a.txt", tmp_path / "a.txt", tokenizing=ByteTokens())
