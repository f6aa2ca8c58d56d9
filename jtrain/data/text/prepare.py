"""Text to token files: a stream of pieces in, shards of numbers out, resumable after any kill.

A folder of token files has
    header.json      what is in it; written last, so that a folder with one is whole
    tokenizer.json   the tokenizer
    tokens-00000.bin and on: little-endian uint16 or uint32, `shard` of them a file
    documents.bin    int64, the tokens up to the end of each document
and, while it is written, progress.json: how far it is, and what was asked.
"""

import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jtrain.data.sources.files import found
from jtrain.data.text.append_log import AppendLog, replace
from jtrain.data.text.documents import By, DocumentCursor, TextPiece, pieces
from jtrain.data.text.token_header import FORMAT, are_files, read_header
from jtrain.data.text.tokenizer import Tokenizer, fingerprint
from jtrain.data.text.tokenizer_file import read_tokenizer
from jtrain.data.text.tokenizing import Tokenizing
from jtrain.errors import DataError
from jtrain.io.disk_errors import disk_advice
from jtrain.io.object_store import check_local_path
from jtrain.io.regular_files import read_json

SHARD = 1 << 28  # tokens a file
TOGETHER = 1 << 20  # characters tokenized at once


class PrepareProgress(NamedTuple):
    """How far it is."""

    doing: str
    read: int  # bytes of text, of `total`
    total: int
    tokens: int


def prepare(
    paths: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    tokenizing: Tokenizing,
    by: By = "file",
    field: str = "text",
    shard: int = SHARD,
    every: float = 1.0,
    tell: Callable[[PrepareProgress], None] = lambda _: None,
) -> dict[str, Any]:
    """The header of the token files in `out`, written now, or before by the same call.

    Killed at any time, the same call goes on, and writes the bytes that it would have written.

    Args:
        paths: files or patterns; see `documents.pieces`, also for `by` and `field`.
        out: a folder, made where there is none.
        tokenizing: the tokenizer, learned from the files if it is to be learned.
        shard: tokens a file.
        every: seconds between two notes of how far it is.
        tell: is told how far it is.

    Raises:
        DataError: what is no text, a folder of something else, or no token at all.
    """
    check_local_path(str(out), "out")
    files, out = found(paths), Path(out)
    asked = _asked(files, tokenizing, by, field, shard)
    if (header := _done(out, asked)) is not None:
        return header
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"--out {out} was to be a folder, and cannot be made ({error.strerror}). "
            f"{disk_advice(error, out).words}, or set --out {out}-2"
        ) from None
    note = _note(out, asked)
    sizes = [path.stat().st_size for path in files]
    before = [0, *itertools.accumulate(sizes)]
    read = lambda start: pieces(files, by=by, field=field, start=start)
    far = lambda place: before[place.file] + place.offset

    def reading(doing: str) -> Iterator[str]:
        for piece in read(DocumentCursor()):
            tell(PrepareProgress(doing, far(piece.next), before[-1], 0))
            yield piece.text

    tokenizer = _tokenizer(out, tokenizing, reading("learning the tokenizer"))
    if by == "file":
        _refuse_marked(tokenizer)
    saved = time.monotonic()
    with contextlib.closing(_Writer(out, tokenizer, shard, note)) as writer:
        for together in _together(read(writer.place)):
            writer.write(together)
            tell(
                PrepareProgress(
                    "tokenizing", far(together[-1].next), before[-1], writer.tokens.count
                )
            )
            if time.monotonic() - saved >= every:
                writer.save(asked)
                saved = time.monotonic()
        header = writer.finish(asked)
        tell(PrepareProgress("tokenizing", before[-1], before[-1], writer.tokens.count))
        return header


class _Writer:
    """What is written so far, and the document that is open."""

    def __init__(self, out: Path, tokenizer: Tokenizer, shard: int, note: dict[str, Any]):
        self.out, self.tokenizer = out, tokenizer
        self._dtype = np.dtype("<u2" if len(tokenizer) <= 1 << 16 else "<u4")
        self._ending = [] if tokenizer.end is None else [tokenizer.end]
        self.place, self._open = DocumentCursor(*note.get("place", ())), note.get("open", False)
        self.tokens = AppendLog(out, "tokens-{:05}.bin", self._dtype, shard, note.get("tokens"))
        ends = np.dtype("<i8")
        self.documents = AppendLog(out, "documents.bin", ends, None, note.get("documents"))

    def write(self, together: Sequence[TextPiece]) -> None:
        ends, count, parts = [], self.tokens.count, []
        numbers = self.tokenizer.encode_all([piece.text for piece in together])
        for piece, part in zip(together, numbers, strict=True):
            parts.append(part)
            count += len(part)
            self._open |= len(part) > 0
            if piece.ends and self._open:  # a document without a token is none
                parts.append(np.array(self._ending, self._dtype))
                count += len(self._ending)
                ends.append(count)
                self._open = False
        self.tokens.append(np.concatenate(parts).astype(self._dtype))
        self.documents.append(np.array(ends, "<i8"))
        self.place = together[-1].next

    def save(self, asked: dict[str, Any]) -> None:
        note = {"place": self.place, "open": self._open, "asked": asked}
        note |= {"tokens": self.tokens.sync(), "documents": self.documents.sync()}
        replace(self.out / "progress.json", json.dumps(note))

    def close(self) -> None:
        self.tokens.close()
        self.documents.close()

    def finish(self, asked: dict[str, Any]) -> dict[str, Any]:
        tokens, documents = self.tokens.sync(), self.documents.sync()
        if not self.tokens.count:
            raise DataError(
                f"{', '.join(name for name, *_ in asked['files'][:3])} gave no token: there is no "
                f"text in it. Give a file with text in it."
            )
        header = {
            "format": FORMAT,
            "tokens": self.tokens.count,
            "documents": self.documents.count,
            "dtype": self._dtype.name,
            "tokenizer": fingerprint(self.tokenizer),
            "kind": self.tokenizer.kind,
            "vocab": len(self.tokenizer),
            "end": self.tokenizer.end,
            "shards": tokens,
            "ends": documents,
            "asked": asked,
        }
        replace(self.out / "header.json", json.dumps(header, indent=1))
        (self.out / "progress.json").unlink(missing_ok=True)
        return header


def _together(found: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    """Pieces in lists of about `TOGETHER` characters."""
    together, size = [], 0
    for piece in found:
        together.append(piece)
        size += len(piece.text)
        if size >= TOGETHER:
            yield together
            together, size = [], 0
    if together:
        yield together


def _tokenizer(out: Path, tokenizing: Tokenizing, texts: Iterator[str]) -> Tokenizer:
    """The tokenizer that lies in the folder, or else a new one, which then does."""
    path = out / "tokenizer.json"
    if not path.exists():
        replace(path, json.dumps(tokenizing.build(texts).description()))
    return read_tokenizer(path)


def _refuse_marked(tokenizer: Tokenizer) -> None:
    """Raises for a tokenizer that marks where a text begins: pieces would not be the whole."""
    if tokenizer.kind != "bpe":
        return
    parts = np.concatenate([tokenizer.encode("and"), tokenizer.encode(" so")])
    if not np.array_equal(parts, tokenizer.encode("and so")):
        raise DataError(
            "Files were to be tokenized piece by piece, and this tokenizer reads 'and' + ' so' "
            "otherwise than 'and so' (it marks where a text begins). Take a line as a document: "
            "--by line"
        )


def _asked(
    files: Sequence[Path], tokenizing: Tokenizing, by: By, field: str, shard: int
) -> dict[str, Any]:
    """What is asked, as JSON: two calls that agree in it write the same files."""
    tokenizer = dataclasses.asdict(tokenizing)
    if tokenizing.kind == "file":
        tokenizer["fingerprint"] = fingerprint(tokenizing.build(()))
    return {
        "files": [[str(path), path.stat().st_size] for path in files],
        "tokenizer": tokenizer,
        "by": by,
        "field": field,
        "shard": shard,
    }


def _done(out: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """The header of a folder that is whole, and was asked for by the same words."""
    if not (out / "header.json").exists():
        return None
    header = read_header(out)
    _refuse_another(out, header["asked"], asked, "holds")
    return header


def _note(out: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """What a folder that is not whole says of itself; a new one says it from now on."""
    path = out / "progress.json"
    if path.exists():
        note = _read_note(path)
        if note["asked"] == asked or "place" in note:
            _refuse_another(out, note["asked"], asked, "was begun with")
            return note
        (out / "tokenizer.json").unlink(missing_ok=True)  # of a call that came to nothing
    elif strange := sorted(entry.name for entry in out.iterdir() if entry != path):
        raise DataError(
            f"--out {out} was to be a new folder, or one that jtrain data prepare began, and holds "
            f"{', '.join(strange[:3])}. Set --out {out / 'tokens'}"
        )
    replace(path, json.dumps({"asked": asked}))
    return {}


def _read_note(path: Path) -> dict[str, Any]:
    """What progress.json says.

    Raises:
        DataError: if it is not what was written.
    """
    try:
        note = read_json(path)
        begun = isinstance(note, dict) and isinstance(note.get("asked"), dict)
        whole = "place" not in note or (
            len(note["place"]) == 2
            and all(type(part) is int and part >= 0 for part in note["place"])
            and isinstance(note["open"], bool)
            and are_files(note["tokens"])
            and are_files(note["documents"])
        )
        if begun and whole:
            return note
        words = "is not what was written"
    except OSError as error:
        words = f"cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError) as error:
        words = f"is not what was written ({error})"
    raise DataError(
        f"{path} says how far the token files beside it are, and {words}. Start again: rm -r "
        f"{path.parent}"
    )


def _refuse_another(out: Path, had: dict[str, Any], asked: dict[str, Any], verb: str) -> None:
    """Raises where a folder was asked for by other words, with the first that differ."""
    for name, wanted in asked.items():
        if had.get(name) != wanted:
            raise DataError(
                f"--out {out} {verb} other token files: {name} {_short(had.get(name))}, and now "
                f"{name} {_short(wanted)} was asked for. Set --out {out}-2, or remove it: "
                f"rm -r {out}"
            )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."
