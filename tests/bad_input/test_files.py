"""Mistakes in files of data and of models: what each is told, and that doing what it says works.

A row is what was done, the parts of the answer, and what was typed then.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from faulty_disks import permissions_hold

from jtrain.checkpoint.init_from import open_source
from jtrain.data.images.decode import ImageSize, decode_image
from jtrain.data.images.image_dataset import read_idx
from jtrain.data.sources.parquet import ParquetRows, iterate_rows
from jtrain.data.sources.records import TFRecords
from jtrain.data.sources.row_files import SUFFIXES, read_rows
from jtrain.data.text.chat_template import read_template
from jtrain.data.text.documents import read_text
from jtrain.data.text.prepare import prepare
from jtrain.data.text.token_files import TokenFiles
from jtrain.data.text.token_rows import Windows
from jtrain.data.text.tokenizer_file import read_tokenizer
from jtrain.data.text.tokenizing import ByteTokens, PretrainedTokenizer
from jtrain.errors import CheckpointError, DataError, UserError
from jtrain.io.safetensors import read_tensors
from jtrain.models.pretrained.gguf import read_gguf

VERSE = "Shall I compare thee to a summer's day?\nThou art more lovely and more temperate:\n"


class Case(NamedTuple):
    name: str
    wrong: Callable[[Path], Any]
    says: tuple[str, ...]
    right: Callable[[Path], Any]


def written(folder: Path) -> Path:
    (folder / "a.txt").write_text(VERSE, encoding="utf-8")
    prepare(folder / "a.txt", folder / "out", tokenizing=ByteTokens(), shard=50)
    return folder / "out"


def hurt(folder: Path, change: Callable[[bytes], bytes]) -> Path:
    """Write tokens, and change those of the second file."""
    path = written(folder) / "tokens-00001.bin"
    path.write_bytes(change(path.read_bytes()))
    return path.parent


def eighth(token: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data[:14] + token + data[16:]


def other_ends(folder: Path, *ends: int) -> TokenFiles:
    (folder / "lines.txt").write_text("one\ntwo\nthree\n", encoding="utf-8")
    out = folder / "out"
    prepare(folder / "lines.txt", out, tokenizing=ByteTokens(), by="line")
    assert (out / "documents.bin").stat().st_size == 8 * len(ends)
    np.array(ends, "<i8").tofile(out / "documents.bin")
    return TokenFiles(out)


def again(folder: Path) -> TokenFiles:
    shutil.rmtree(folder / "out", ignore_errors=True)
    return TokenFiles(written(folder))


def unfinished(folder: Path) -> Path:
    out = written(folder)
    asked = json.loads((out / "header.json").read_bytes())["asked"]
    (out / "header.json").unlink()
    (out / "progress.json").write_text(json.dumps({"asked": asked}))
    return out


def lines(folder: Path, *rows: str) -> Path:
    (folder / "a.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return folder / "a.jsonl"


def begun(folder: Path, data: bytes = VERSE.encode(), name: str = "a.txt", **asked: Any) -> Any:
    (folder / name).write_bytes(data)
    return prepare(folder / name, folder / "out", **{"tokenizing": ByteTokens()} | asked)


def marking(folder: Path) -> Path:
    """Return a tokenizer that marks the beginning of a text."""
    import tokenizers

    model = tokenizers.models.BPE({"▁": 0, "a": 1, "n": 2, "d": 3, "s": 4, "o": 5}, [])
    theirs = tokenizers.Tokenizer(model)
    marks = [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    theirs.normalizer = tokenizers.normalizers.Sequence(marks)
    theirs.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


CASES = [
    Case("another tokenizer than was asked for", lambda f: TokenFiles(written(f),
        tokenizer="0123456789ab"), ("0123456789ab was requested", "bytes 1b5ec18e7563",
        "data.tokenizer=1b5ec18e7563"), lambda f: TokenFiles(f / "out", tokenizer="1b5ec18e7563")),
    Case("a tokenizer that was put there later", lambda f: TokenFiles(swapped(f)),
        ("written by tokenizer 1b5ec18e7563", "now characters", "jtrain data prepare FILES"),
        again),
    Case("a file of tokens that was cut", lambda f: TokenFiles(hurt(f, lambda data: data[:-3])),
        ("tokens-00001.bin", "end at byte 64", "ends at 61", "jtrain data prepare"), again),
    Case("tokens of something else", lambda f: Windows(TokenFiles(hurt(f, eighth(b"\x40\x9c"))),
        context=8)[np.arange(70)], ("tokens-00001.bin", "below 257", "40000 at byte 14",
        "jtrain data prepare"), lambda f: Windows(again(f), context=8)[np.arange(70)]),
    Case("ends of documents that are none", lambda f: other_ends(f, 4, 3, 14), ("documents.bin",
        "up to 14", "has 3 at byte 8", "jtrain data prepare"), again),
    Case("a token that changed", lambda f: TokenFiles(hurt(f, eighth(b"\x01\x00"))).verify(),
        ("tokens-00001.bin", "checksum", "jtrain data prepare"), lambda f: again(f).verify()),
    Case("a folder that is not finished", lambda f: TokenFiles(unfinished(f)), ("is not finished",
        "jtrain data prepare FILES --out"), again),
    Case("what is not UTF-8", lambda f: begun(f, b"to be\nor n\xf6t"), ("a.txt:2 is not UTF-8",
        "0xf6 at 10", "iconv -f latin1 -t utf-8"), lambda f: begun(f,
        b"to be\nor n\xf6t".decode("latin1").encode())),
    Case("a folder of another text", lambda f: (begun(f), begun(f, b"More text.")),
        ("holds other token files", "files", "out-2"), lambda f: prepare(f / "a.txt", f / "out-2",
        tokenizing=ByteTokens())),
    Case("a line that is not JSON", lambda f: prepare(lines(f, '{"text": "a"}', "b"), f / "out",
        tokenizing=ByteTokens()), ("a.jsonl", "the line at byte 14", "--by line --field ''"),
        lambda f: prepare(f / "a.jsonl", f / "out-2", tokenizing=ByteTokens(), by="line",
        field="")),
    Case("a tokenizer that marks beginnings", lambda f: begun(f, b"and so",
        tokenizing=PretrainedTokenizer(path=str(marking(f)))), ("marks where a text begins",
        "--by line"), lambda f: prepare(f / "a.txt", f / "out-2",
        tokenizing=PretrainedTokenizer(path=str(f / "tokenizer.json")), by="line",)),
]  # fmt: skip


def swapped(folder: Path) -> Path:
    out = written(folder)
    description = {"kind": "characters", "characters": "abc"}
    (out / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")
    return out


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_said_is_what_to_do(case: Case, tmp_path: Path):
    with pytest.raises(UserError) as refused:
        case.wrong(tmp_path)
    assert isinstance(refused.value, DataError)
    for part in case.says:
        assert part in str(refused.value), f"{part!r} is not in: {refused.value}"
    case.right(tmp_path)


WANTED = {"x": np.zeros(2, np.float32)}
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "tensors": ("a.safetensors", read_tensors),
    "an index of tensors": ("a.safetensors.index.json", read_tensors),
    "parameters to start from": ("a.safetensors", lambda path: open_source(str(path))),
    "a tokenizer": ("tokenizer.json", read_tokenizer),
    "text": ("a.txt", read_text),
    "records": ("a.tfrecord", TFRecords),
    "images": ("a-idx3-ubyte", read_idx),
    "packed images": ("a-idx3-ubyte.gz", read_idx),
    "an image": ("a.png", lambda path: decode_image(path, ImageSize(height=8, width=8))),
    "a chat template": ("a.jinja", lambda path: read_template(str(path))),
    "a tokenizer's config": ("tokenizer_config.json", lambda path: read_template(str(path))),
    "conversations": ("a.jsonl", lambda path: list(iterate_rows(str(path), [], noun="row"))),
    "a table": ("a.parquet", lambda path: ParquetRows(path)),
    "a model of GGUF": ("a.gguf", read_gguf),
    **{f"rows of {s}": (f"a{s}", lambda path: read_rows(path, WANTED)) for s in SUFFIXES},
}


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "unreadable"])
def test_what_is_no_file_is_told_and_not_waited_for(kind, tmp_path: Path):
    words = {"a pipe": ("a named pipe",), "a folder": ("a folder", "a directory")}.get(kind, ("",))
    for number, (name, read) in enumerate(READERS.values()):
        path = tmp_path / f"{number}" / name
        path.parent.mkdir()
        if kind == "a pipe":
            os.mkfifo(path)
        elif kind == "a folder":
            path.mkdir()
        else:
            path.write_bytes(bytes(100))
            path.chmod(0)
        with permissions_hold(), pytest.raises((DataError, CheckpointError)) as refusal:
            read(path)
        assert str(path) in str(refusal.value)
        assert any(word in str(refusal.value) for word in words)
