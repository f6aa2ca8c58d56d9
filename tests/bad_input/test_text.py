"""Mistakes in text and token files: what each is told, and that doing what it says works.

A row is what was done, the parts of the answer, and what was typed then.
"""

import json
import lzma
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jtrain.data.text.prepare import prepare
from jtrain.data.text.token_files import TokenFiles
from jtrain.data.text.tokenizing import (
    BytePairTokens,
    ByteTokens,
    CharacterTokens,
    PretrainedTokenizer,
)
from jtrain.data.text.windows import Windows
from jtrain.errors import DataError, UserError

VERSE = "Shall I compare thee to a summer's day?\nThou art more lovely and more temperate:\n"


class Case(NamedTuple):
    name: str
    wrong: Callable[[Path], Any]
    says: tuple[str, ...]
    right: Callable[[Path], Any]


def written(
    folder: Path, *, tokenizing: Any = ByteTokens(), text: str = VERSE, shard: int = 50
) -> Path:
    (folder / "a.txt").write_text(text, encoding="utf-8")
    prepare(folder / "a.txt", folder / "out", tokenizing=tokenizing, shard=shard)
    return folder / "out"


def cut(folder: Path) -> Path:
    out = written(folder)
    path = out / "tokens-00001.bin"
    path.write_bytes(path.read_bytes()[:-3])
    return out


def foreign(folder: Path) -> Path:
    out = written(folder)
    tokens = np.fromfile(out / "tokens-00001.bin", "<u2")
    tokens[7] = 40_000
    tokens.tofile(out / "tokens-00001.bin")
    return out


def changed(folder: Path) -> Path:
    out = written(folder)
    tokens = np.fromfile(out / "tokens-00001.bin", "<u2")
    tokens[7] ^= 1
    tokens.tofile(out / "tokens-00001.bin")
    return out


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


def header(folder: Path, data: bytes) -> TokenFiles:
    out = written(folder)
    (out / "header.json").write_bytes(data)
    return TokenFiles(out)


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
    Case(
        "another tokenizer than was asked for",
        lambda f: TokenFiles(written(f), tokenizer="0123456789ab"),
        ("0123456789ab was requested", "bytes 1b5ec18e7563", "data.tokenizer=1b5ec18e7563"),
        lambda f: TokenFiles(f / "out", tokenizer="1b5ec18e7563"),
    ),
    Case(
        "a tokenizer that was put there later",
        lambda f: TokenFiles(swapped(f)),
        ("written by tokenizer 1b5ec18e7563", "now characters", "jtrain data prepare FILES"),
        again,
    ),
    Case(
        "a file of tokens that was cut",
        lambda f: TokenFiles(cut(f)),
        ("tokens-00001.bin", "end at byte 64", "ends at 61", "was cut", "jtrain data prepare"),
        again,
    ),
    Case(
        "a file of tokens that is not there",
        lambda f: ((written(f) / "tokens-00000.bin").unlink(), TokenFiles(f / "out")),
        ("tokens-00000.bin", "does not exist", "jtrain data prepare"),
        again,
    ),
    Case(
        "tokens of something else",
        lambda f: Windows(TokenFiles(foreign(f)), context=8)[np.arange(70)],
        ("tokens-00001.bin", "below 257", "40000 at byte 14", "jtrain data prepare"),
        lambda f: Windows(again(f), context=8)[np.arange(70)],
    ),
    Case(
        "ends of documents that are none",
        lambda f: other_ends(f, 4, 3, 14),
        ("documents.bin", "up to 14", "has 3 at byte 8", "jtrain data prepare"),
        again,
    ),
    Case(
        "documents that end before their tokens do",
        lambda f: other_ends(f, 4, 8, 13),
        ("documents.bin", "up to 14", "has 13 at byte 16", "jtrain data prepare"),
        again,
    ),
    Case(
        "a bit that fell over",
        lambda f: TokenFiles(changed(f)).verify(),
        ("tokens-00001.bin", "checksum", "was changed since", "jtrain data prepare"),
        lambda f: again(f).verify(),
    ),
    Case(
        "a header that was cut",
        lambda f: header(f, b'{"format": "jtrain tok'),
        ("header.json", "from byte 11 on", "jtrain data prepare"),
        again,
    ),
    Case(
        "a header of something else",
        lambda f: header(f, b'{"format": "parquet"}'),
        ("header.json", "has parquet", "jtrain data prepare"),
        again,
    ),
    Case(
        "a folder that is not finished",
        lambda f: TokenFiles(unfinished(f)),
        ("is not finished", "jtrain data prepare FILES --out"),
        again,
    ),
    Case(
        "no folder",
        lambda f: TokenFiles(f / "nothing"),
        ("no such folder", "jtrain data prepare FILES --out"),
        again,
    ),
    Case(
        "an empty split",
        lambda f: TokenFiles(written(f)).split(0.001),
        ("validation 0.001", "82 tokens", "parts empty", "Set data.validation=0.1"),
        lambda f: TokenFiles(f / "out").split(0.1),
    ),
    Case(
        "a split too short for the context",
        lambda f: Windows(TokenFiles(written(f)).split(0.1)[1], context=64),
        ("context 64 does not fit 8 tokens", "Set context=7"),
        lambda f: Windows(TokenFiles(f / "out").split(0.1)[1], context=7),
    ),
    Case(
        "what is not UTF-8",
        lambda f: begun(f, b"to be\nor n\xf6t"),
        ("a.txt:2 is not UTF-8", "0xf6 at 10", "iconv -f latin1 -t utf-8"),
        lambda f: begun(f, b"to be\nor n\xf6t".decode("latin1").encode()),
    ),
    Case(
        "what is packed",
        lambda f: begun(f, lzma.compress(VERSE.encode())),
        ("is xz by its first bytes", "xz -dc", "a.txt.txt"),
        begun,
    ),
    Case(
        "a folder of other things",
        lambda f: ((f / "out").mkdir(), (f / "out" / "x").touch(), begun(f)),
        ("holds x", "--out", "out/tokens"),
        lambda f: prepare(f / "a.txt", f / "out" / "tokens", tokenizing=ByteTokens()),
    ),
    Case(
        "a folder of another text",
        lambda f: (begun(f), begun(f, b"More text.")),
        ("holds other token files", "files", "out-2"),
        lambda f: prepare(f / "a.txt", f / "out-2", tokenizing=ByteTokens()),
    ),
    Case(
        "a folder of another tokenizer",
        lambda f: (begun(f), begun(f, tokenizing=CharacterTokens())),
        ('"kind": "bytes"', '"kind": "characters"', "out-2"),
        lambda f: prepare(f / "a.txt", f / "out-2", tokenizing=CharacterTokens()),
    ),
    Case(
        "a line that is no JSON",
        lambda f: prepare(lines(f, '{"text": "a"}', "b"), f / "out", tokenizing=ByteTokens()),
        ("a.jsonl", "the line at byte 14", "--by line --field ''"),
        lambda f: prepare(f / "a.jsonl", f / "out-2", tokenizing=ByteTokens(), by="line", field=""),
    ),
    Case(
        "a line without the field",
        lambda f: prepare(lines(f, '{"body": "a"}'), f / "out", tokenizing=ByteTokens()),
        ("no text under 'text'", "--field body"),
        lambda f: prepare(f / "a.jsonl", f / "out-2", tokenizing=ByteTokens(), field="body"),
    ),
    Case(
        "no text at all",
        lambda f: begun(f, b""),
        ("a.txt gave no token", "Give a file with text"),
        lambda f: prepare(text_of(f), f / "out-2", tokenizing=ByteTokens()),
    ),
    Case(
        "a tokenizer that marks beginnings",
        lambda f: begun(f, b"and so", tokenizing=PretrainedTokenizer(path=str(marking(f)))),
        ("marks where a text begins", "--by line"),
        lambda f: prepare(
            f / "a.txt",
            f / "out-2",
            tokenizing=PretrainedTokenizer(path=str(f / "tokenizer.json")),
            by="line",
        ),
    ),
    Case(
        "a word that the alphabet lacks",
        lambda f: begun(f, tokenizing=CharacterTokens(alphabet="Shal")),
        ("Character ' '", "not among the 4"),
        lambda f: prepare(f / "a.txt", f / "out-2", tokenizing=CharacterTokens()),
    ),
    Case(
        "more pairs than there are",
        lambda f: begun(f, tokenizing=BytePairTokens(vocab=9999)),
        ("of 9999 tokens", "or less"),
        lambda f: prepare(f / "a.txt", f / "out-2", tokenizing=BytePairTokens(vocab=260)),
    ),
]


def text_of(folder: Path) -> Path:
    (folder / "b.txt").write_text(VERSE, encoding="utf-8")
    return folder / "b.txt"


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
