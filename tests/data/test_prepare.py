"""Text to token files: the same bytes after any interruption."""

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jtrain.data.sources.content import HEAD
from jtrain.data.text.documents import PIECE, DocumentCursor, read_pieces
from jtrain.data.text.prepare import PrepareProgress, prepare
from jtrain.data.text.token_files import TokenFiles
from jtrain.data.text.tokenizing import BytePairTokens, ByteTokens, CharacterTokens
from jtrain.errors import DataError

WORDS = ["love", "thee", "summer's", "day?", "été", "rose 🌹", "1234", "!!", "\n\n", "\r\n", "\t"]


def text(words: int, seed: int = 0) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, words).tolist())


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Write a long file, a short one, one without text, and JSON lines."""
    found = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt", "d.jsonl")]
    found[0].write_text(text(60_000), encoding="utf-8", newline="")
    found[1].write_text("Exeunt.", encoding="utf-8")
    found[2].write_text("", encoding="utf-8")
    rows = [json.dumps({"id": i, "text": text(7, i)}) for i in range(300)]
    found[3].write_text("\n".join([*rows, "", ""]), encoding="utf-8")
    assert found[0].stat().st_size > 4 * PIECE
    return found


def documents(files: list[Path]) -> list[str]:
    whole = [path.read_bytes().decode() for path in files[:3]]
    lines = files[3].read_text(encoding="utf-8").splitlines()
    return [*filter(None, whole), *(json.loads(line)["text"] for line in lines if line)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "tokenizing", [ByteTokens(), CharacterTokens(), BytePairTokens(vocab=300)], ids=lambda t: t.kind
)
def test_what_is_written_is_the_text(files: list[Path], tmp_path: Path, tokenizing):
    header = prepare(files, tmp_path / "out", tokenizing=tokenizing, shard=20_000)
    read = TokenFiles(tmp_path / "out")
    read.verify()
    expected = documents(files)
    assert header["documents"] == len(expected) == len(read.ends) == 302
    assert len(header["shards"]) > 3
    begins = [0, *read.ends.tolist()]
    for i, document in enumerate(expected):
        numbers = read[begins[i] : begins[i + 1]]
        end = [] if read.tokenizer.end is None else [read.tokenizer.end]
        # A file that is read in pieces has the same tokens as the complete text.
        assert numbers.tolist() == [*read.tokenizer.encode(document).tolist(), *end]
        assert read.tokenizer.decode(numbers) == document
    assert begins[-1] == len(read)


def test_pieces_are_short_and_depend_on_their_start_only(files: list[Path]):
    found = list(read_pieces(files))
    assert "".join(piece.text for piece in found) == "".join(documents(files))
    assert max(len(piece.text.encode()) for piece in found) <= PIECE
    for number in range(0, len(found), 7):
        rest = list(read_pieces(files, start=found[number].next))
        assert rest == found[number + 1 :]


KILLED = """
import os, signal, sys
from jtrain.data.text.prepare import prepare
from jtrain.data.text.tokenizing import BytePairTokens
calls = iter(range(10**9))
def tell(progress):
    if next(calls) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
import jtrain.data.text.documents, jtrain.data.text.prepare
jtrain.data.text.documents.PIECE = jtrain.data.text.prepare.BATCH = 8192
asked = {"tokenizing": BytePairTokens(vocab=300), "shard": 20_000}
prepare(sys.argv[3:], sys.argv[2], **asked, every=0.0, report=tell)
"""


@pytest.mark.thorough
def test_a_killed_call_resumes_and_writes_the_same_bytes(files: list[Path], tmp_path, monkeypatch):
    monkeypatch.setattr("jtrain.data.text.documents.PIECE", 8192)
    asked = {"tokenizing": BytePairTokens(vocab=300), "shard": 20_000}
    learning = len(list(read_pieces(files)))  # calls
    prepare(files, tmp_path / "whole", **asked)
    again, names, left = tmp_path / "again", [str(path) for path in files], []
    for calls in (3, learning + 2, 5, 1):  # during training of the tokenizer, and afterwards
        process = subprocess.run([sys.executable, "-c", KILLED, str(calls), str(again), *names])
        assert process.returncode == -signal.SIGKILL
        left.append(json.loads((again / "progress.json").read_bytes()).get("place"))
        assert not (again / "header.json").exists()
    assert left[0] is None, "the first call died while training the tokenizer"
    places = [DocumentCursor(*place) for place in left[1:]]
    assert places == sorted(set(places)), "each call resumed where the previous one died"
    seen: list[PrepareProgress] = []
    prepare(files, again, **asked, report=seen.append)
    assert seen[0].phase == "tokenizing"
    assert seen[0].tokens > 30_000, "the last call resumed where the others died"
    assert written(again) == written(tmp_path / "whole")


def test_data_after_the_last_progress_note_is_written_again(files: list[Path], tmp_path: Path):
    asked = {"tokenizing": ByteTokens(), "shard": 50_000}
    prepare(files, tmp_path / "whole", **asked)
    out = tmp_path / "again"

    def interrupt(progress: PrepareProgress) -> None:
        if progress.read > 100_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(files, out, **asked, report=interrupt)
    for name in ("tokens-00000.bin", "documents.bin"):
        with (out / name).open("ab") as stream:
            stream.write(os.urandom(999))
    prepare(files, out, **asked)
    assert written(out) == written(tmp_path / "whole")


def test_tokens_are_read_from_any_place_over_any_files(files: list[Path], tmp_path: Path):
    prepare(files[3:], tmp_path / "one", tokenizing=ByteTokens())
    prepare(files[3:], tmp_path / "many", tokenizing=ByteTokens(), shard=371)
    whole, parts = TokenFiles(tmp_path / "one"), TokenFiles(tmp_path / "many")
    flat = np.fromfile(tmp_path / "one" / "tokens-00000.bin", "<u2")
    assert len(parts.header["shards"]) == -(-len(flat) // 371)
    starts = np.random.default_rng(0).integers(0, len(flat) - 1000, 50)
    for count in (1, 50, 371, 1000):
        expected = [flat[start : start + count].tolist() for start in starts]
        assert whole.gather(starts, count).tolist() == expected
        assert parts.gather(starts, count).tolist() == expected
    assert parts[5:2000].tolist() == flat[5:2000].tolist()


def test_a_split_has_every_token_once_and_falls_between_documents(files: list[Path], tmp_path):
    share = 0.3
    prepare(files[3:], tmp_path / "out", tokenizing=ByteTokens())
    read = TokenFiles(tmp_path / "out")
    train, valid = read.split(share)
    assert abs(len(valid) / len(read) - share) < 0.02
    together = [*train[0 : len(train)].tolist(), *valid[0 : len(valid)].tolist()]
    assert together == read[0 : len(read)].tolist()
    assert len(train) in read.ends
    for part in (train, valid):
        edges = part.documents()
        assert (edges[0], edges[-1]) == (0, len(part))
        assert all(part[end - 1 : end] == [256] for end in edges[1:].tolist())
    assert len(train.documents()) + len(valid.documents()) == len(read.ends) + 2


ROWS = [{"id": str(i), "text": f'He said "{word}", é ਅ Ċ'} for i, word in enumerate(WORDS[:6])]
LINES = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in ROWS)


def read_all(path: Path | str, **options) -> list[str]:
    return [piece.text for piece in read_pieces([Path(path)], **options)]


@pytest.mark.parametrize(("name", "encoding"), [("c4.txt", "utf-8-sig"), ("c4.csv", "utf-16")])
def test_json_lines_are_known_by_their_content(tmp_path: Path, name: str, encoding: str):
    path = tmp_path / name
    path.write_text(LINES, encoding=encoding)
    assert read_all(path) == [row["text"] for row in ROWS]
    first = next(read_pieces([path]))
    assert [piece.text for piece in read_pieces([path], start=first.next)] == read_all(path)[1:]
    path.write_text(json.dumps({"text": "x" * HEAD}) + "\n" + LINES, encoding=encoding)
    assert read_all(path)[1:] == [row["text"] for row in ROWS]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.jsonl", gzip.compress(LINES.encode()), "is gzip"),
        ("a.json", LINES.encode("utf-16-le"), "byte 0x00 at 1"),
    ],
)
def test_what_is_no_plain_text_is_refused_by_its_content(tmp_path, name, data, says):
    (tmp_path / name).write_bytes(data)
    for options in ({}, {"by": "line"}):
        with pytest.raises(DataError, match=says):
            read_all(tmp_path / name, **options)
