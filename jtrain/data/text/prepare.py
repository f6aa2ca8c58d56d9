"""Text to token files: a stream of pieces in, shards of numbers out, resumable after any kill.

A folder of token files has
    header.json      its contents; written last, so that a folder with a header is complete
    tokenizer.json   the tokenizer
    tokens-00000.bin and on: little-endian uint16 or uint32, `shard` of them a file
    documents.bin    int64, the tokens up to the end of each document
and, while it is written, progress.json: the progress and the arguments of the call.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from jtrain.data.sources.files import find_files
from jtrain.data.text.documents import By, DocumentCursor, TextPiece, read_pieces
from jtrain.data.text.token_files import FORMAT, read_header
from jtrain.data.text.tokenizer_file import read_tokenizer
from jtrain.data.text.tokenizers import Tokenizer, fingerprint
from jtrain.data.text.tokenizing import Tokenizing
from jtrain.errors import DataError
from jtrain.io.disk_errors import disk_advice
from jtrain.io.object_store import check_local_path
from jtrain.io.regular_files import atomic_write, open_regular, read_json, resolve_inside

SHARD = 1 << 28  # tokens a file: 512 MiB of uint16
BATCH = 1 << 20  # characters tokenized at once: few calls, and little memory


class PrepareProgress(NamedTuple):
    """Progress of a call of `prepare`."""

    phase: str
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
    report: Callable[[PrepareProgress], None] = lambda _: None,
) -> dict[str, Any]:
    """Write the token files of `out`, unless the same call has written them; return the header.

    After a kill at any time the same call resumes, and writes the same bytes as an unbroken call.

    Args:
        paths: files or patterns; see `documents.pieces`, also for `by` and `field`.
        out: a folder, created if it does not exist.
        tokenizing: the config of the tokenizer, which may be trained on the files.
        shard: tokens a file.
        every: seconds between two writes of progress.json.

    Raises:
        DataError: a file that is not text, a folder with other files, or no token at all.
    """
    check_local_path(str(out), "out")
    files, out = find_files(paths), Path(out)
    request = _request(files, tokenizing, by, field, shard)
    if (out / "header.json").exists():
        header = read_header(out)
        _check_request(out, header["asked"], request, "holds")
        return header
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"--out {out} should be a folder and cannot be created ({error.strerror}). "
            f"{disk_advice(error, out).words}, or set --out {out}-2"
        ) from None
    progress = _open_progress(out, request)
    start_bytes = [0, *itertools.accumulate(path.stat().st_size for path in files)]
    total = start_bytes[-1]

    def read(start: DocumentCursor) -> Iterator[TextPiece]:
        return read_pieces(files, by=by, field=field, start=start)

    def bytes_before(cursor: DocumentCursor) -> int:
        return start_bytes[cursor.file] + cursor.offset

    def read_texts(phase: str) -> Iterator[str]:
        for piece in read(DocumentCursor()):
            report(PrepareProgress(phase, bytes_before(piece.next), total, 0))
            yield piece.text

    tokenizer = _load_tokenizer(out, tokenizing, read_texts("learning the tokenizer"))
    if by == "file":
        _check_pieces(tokenizer)
    saved = time.monotonic()
    with contextlib.closing(_Writer(out, tokenizer, shard, progress)) as writer:
        for batch in _batched(read(writer.cursor)):
            writer.write(batch)
            done = bytes_before(batch[-1].next)
            report(PrepareProgress("tokenizing", done, total, writer.tokens.count))
            if time.monotonic() - saved >= every:
                writer.save(request)
                saved = time.monotonic()
        header = writer.finish(request)
        report(PrepareProgress("tokenizing", total, total, writer.tokens.count))
        return header


class _Writer:
    """The writer of a folder: the files so far, and the open document."""

    def __init__(self, out: Path, tokenizer: Tokenizer, shard: int, progress: dict[str, Any]):
        self.out, self.tokenizer = out, tokenizer
        self._dtype = np.dtype("<u2" if len(tokenizer) <= 1 << 16 else "<u4")
        self._ending = [] if tokenizer.end is None else [tokenizer.end]
        self.cursor = DocumentCursor(*progress.get("place", ()))
        self._in_document = progress.get("open", False)
        self.tokens = AppendLog(out, "tokens-{:05}.bin", self._dtype, shard, progress.get("tokens"))
        ends = np.dtype("<i8")
        self.documents = AppendLog(out, "documents.bin", ends, None, progress.get("documents"))

    def write(self, batch: Sequence[TextPiece]) -> None:
        ends, count, parts = [], self.tokens.count, []
        numbers = self.tokenizer.encode_all([piece.text for piece in batch])
        for piece, part in zip(batch, numbers, strict=True):
            parts.append(part)
            count += len(part)
            self._in_document |= len(part) > 0
            if piece.ends and self._in_document:  # a document without a token does not count
                parts.append(np.array(self._ending, self._dtype))
                count += len(self._ending)
                ends.append(count)
                self._in_document = False
        self.tokens.append(np.concatenate(parts).astype(self._dtype))
        self.documents.append(np.array(ends, "<i8"))
        self.cursor = batch[-1].next

    def save(self, request: dict[str, Any]) -> None:
        progress = {"place": self.cursor, "open": self._in_document, "asked": request}
        progress |= {"tokens": self.tokens.sync(), "documents": self.documents.sync()}
        atomic_write(self.out / "progress.json", json.dumps(progress).encode())

    def close(self) -> None:
        self.tokens.close()
        self.documents.close()

    def finish(self, request: dict[str, Any]) -> dict[str, Any]:
        tokens, documents = self.tokens.sync(), self.documents.sync()
        if not self.tokens.count:
            raise DataError(
                f"{', '.join(name for name, *_ in request['files'][:3])} gave no token: the files "
                "have no text. Give a file with text in it."
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
            "asked": request,
        }
        atomic_write(self.out / "header.json", json.dumps(header, indent=1).encode())
        (self.out / "progress.json").unlink(missing_ok=True)
        return header


def _batched(found: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    """Yield pieces in lists of about `BATCH` characters."""
    batch, size = [], 0
    for piece in found:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _load_tokenizer(out: Path, tokenizing: Tokenizing, texts: Iterator[str]) -> Tokenizer:
    """Read the tokenizer of the folder; build and write it if there is none."""
    path = out / "tokenizer.json"
    if not path.exists():
        atomic_write(path, json.dumps(tokenizing.build(texts).description()).encode())
    return read_tokenizer(path)


def _check_pieces(tokenizer: Tokenizer) -> None:
    """Raise DataError if the tokenizer marks the start of a text, as pieces would do so too."""
    if tokenizer.kind != "bpe":
        return
    parts = np.concatenate([tokenizer.encode("and"), tokenizer.encode(" so")])
    if not np.array_equal(parts, tokenizer.encode("and so")):
        raise DataError(
            "Files are tokenized piece by piece, and this tokenizer encodes 'and' + ' so' "
            "differently from 'and so' (it marks where a text begins). Take a line as a document: "
            "--by line"
        )


def _request(
    files: Sequence[Path], tokenizing: Tokenizing, by: By, field: str, shard: int
) -> dict[str, Any]:
    """Return the arguments as JSON: two calls with equal arguments write the same files."""
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


def _open_progress(out: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Return progress.json of an unfinished folder; write it in a new folder."""
    path = out / "progress.json"
    if path.exists():
        progress = _read_progress(path)
        if progress["asked"] == request or "place" in progress:
            _check_request(out, progress["asked"], request, "was started with")
            return progress
        (out / "tokenizer.json").unlink(missing_ok=True)  # left by a call that wrote no tokens
    elif others := sorted(entry.name for entry in out.iterdir() if entry != path):
        raise DataError(
            f"--out {out} should be a new folder, or one that jtrain data prepare started, and "
            f"holds {', '.join(others[:3])}. Set --out {out / 'tokens'}"
        )
    atomic_write(path, json.dumps({"asked": request}).encode())
    return {}


def _read_progress(path: Path) -> dict[str, Any]:
    """Return the content of progress.json; raise DataError if the file was changed."""
    try:
        progress = read_json(path)
        return {**progress, "asked": dict(progress["asked"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} holds the progress of the token files beside it, and is not what was written "
            f"({error}). Start again: rm -r {path.parent}"
        ) from None


def _check_request(out: Path, previous: dict[str, Any], request: dict[str, Any], verb: str) -> None:
    """Raise DataError if a folder was written with other arguments; name the first difference."""
    for name, wanted in request.items():
        if previous.get(name) != wanted:
            raise DataError(
                f"--out {out} {verb} other token files: {name} "
                f"{json.dumps(previous.get(name))[:200]}, and now {name} "
                f"{json.dumps(wanted)[:200]} was requested. Set --out {out}-2, or remove it: "
                f"rm -r {out}"
            )


class AppendLog:
    """Numbers in files of `size` each (None: one file), resumed from the last `sync`.

    Args:
        name: the pattern of the file names, `tokens-{:05}.bin`.
        size: numbers a file.
        synced_files: the result of the last `sync`; everything written after it is cut off.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        dtype: np.dtype,
        size: int | None,
        synced_files: list[dict[str, Any]] | None,
    ):
        self._folder, self._name, self._dtype, self._size = folder, name, dtype, size
        self._files = list(synced_files or [])
        self.count = sum(file["count"] for file in self._files)
        """Numbers written, in all files."""
        self._stream = self._reopen()

    def append(self, numbers: np.ndarray) -> None:
        """Write more numbers, over as many files as they need."""
        while len(numbers):
            last = self._files[-1]
            room = len(numbers) if self._size is None else self._size - last["count"]
            if not room:
                self.sync()
                self.close()
                self._stream = self._next_file()
                continue
            part, numbers = numbers[:room].astype(self._dtype), numbers[room:]
            self._stream.write(part.tobytes())
            last["crc32"] = zlib.crc32(part.tobytes(), last["crc32"])
            last["count"] += len(part)
            self.count += len(part)

    def sync(self) -> list[dict[str, Any]]:
        """Flush to the disk; return each file's name, count and checksum."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return [dict(file) for file in self._files]

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def _next_file(self) -> BinaryIO:
        name = self._name.format(len(self._files))
        self._files.append({"name": name, "count": 0, "crc32": 0})
        return (self._folder / name).open("wb")

    def _reopen(self) -> BinaryIO:
        """Reopen the last file at its synced length."""
        if not self._files:
            return self._next_file()
        name, source = self._files[-1]["name"], self._folder / "progress.json"
        path = resolve_inside(self._folder, name, DataError, source)
        wanted = self._files[-1]["count"] * self._dtype.itemsize
        found = path.stat().st_size if path.exists() else 0
        if found < wanted:
            raise DataError(
                f"{path} was written up to byte {wanted} and ends at {found}: it was cut since. "
                f"Start again: rm -r {self._folder}"
            )
        stream = open_regular(path, "r+b")
        stream.truncate(wanted)
        stream.seek(wanted)
        return stream
