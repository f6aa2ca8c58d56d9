"""Documents of text files, read piece by piece; of JSONL a line at a time is held in memory."""

import codecs
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, TypeAlias

from jtrain.data.text.tokenizer import HALF_PAIR, SURROGATE
from jtrain.errors import DataError
from jtrain.io.regular_files import open_regular, parse_json

By: TypeAlias = Literal["file", "line"]
PIECE = 1 << 16  # bytes
LINES = {".jsonl", ".ndjson"}  # a line of these is always a document
PACKED = {".gz": "gunzip -k", ".xz": "unxz -k", ".bz2": "bunzip2 -k", ".zst": "unzstd"}


class DocumentCursor(NamedTuple):
    """A position between two pieces."""

    file: int = 0
    offset: int = 0  # bytes


class TextPiece(NamedTuple):
    """Text of a document, and the position of the next piece."""

    text: str
    ends: bool  # True if the document ends with this piece
    next: DocumentCursor


def read_pieces(
    files: Sequence[Path],
    *,
    by: By = "file",
    field: str = "text",
    start: DocumentCursor = DocumentCursor(),
) -> Iterator[TextPiece]:
    """Yield the pieces of all documents from `start` on; a piece depends on its position only.

    A long file is split before a space behind a letter or a digit, where the usual tokenizers split
    words too: the pieces then have the tokens of the complete file.

    Args:
        files: UTF-8 text; each line of a JSON lines file (.jsonl) has a `field`.
        by: the unit of a document: a file, or a line that is not blank.
        field: the field of a JSON line that has the text.
        start: the position to resume from.

    Raises:
        DataError: a file that is not text, by file and byte.
    """
    for number in range(start.file, len(files)):
        path = files[number]
        _check_unpacked(path)
        lines = path.suffix in LINES
        with open_regular(path) as stream:
            stream.seek(start.offset if number == start.file else 0)
            parts = _lines(stream, path, field if lines else "") if lines or by == "line" else None
            for text, ends in parts if parts is not None else _windows(stream, path):
                yield TextPiece(text, ends, DocumentCursor(number, stream.tell()))


def _windows(stream: BinaryIO, path: Path) -> Iterator[tuple[str, bool]]:
    while True:
        first = stream.tell()
        data = stream.read(PIECE)
        ends = len(data) < PIECE
        text, used = _decode(data, path, first, final=ends)
        if not ends:
            cut = _cut(text)
            used = len(text[:cut].encode()) if cut < len(text) else used
            text = text[:cut]
            stream.seek(first + used)
        yield text if first else text.removeprefix("\ufeff"), ends
        if ends:
            return


def _cut(text: str) -> int:
    """Return the last place where a space follows a letter or a digit; else the end."""
    for place in range(len(text) - 1, 0, -1):
        if text[place].isspace() and text[place - 1].isalnum():
            return place
    return len(text)


def _lines(stream: BinaryIO, path: Path, field: str) -> Iterator[tuple[str, bool]]:
    while True:
        first = stream.tell()
        data = stream.readline()
        if not data:
            return
        text = _decode(data, path, first, final=True)[0].rstrip("\r\n")
        text = text if first else text.removeprefix("\ufeff")
        if text.strip():
            yield (_field(text, path, first, field) if field else text), True


def _field(text: str, path: Path, first: int, field: str) -> str:
    """Return the text of a JSON line."""
    try:
        row = parse_json(text)
    except ValueError as error:
        raise DataError(
            f"{path} should hold a JSON object a line; the line at byte {first} is none ({error}). "
            f"Leave it out, or name the file .txt and prepare it with --by line."
        ) from error
    if isinstance(row, dict) and isinstance(found := row.get(field), str):
        if SURROGATE.search(found):
            raise DataError(
                f"{path}: the line at byte {first} {HALF_PAIR}. Leave the line out, or remove it."
            )
        return found
    texts = (
        [key for key, value in row.items() if isinstance(value, str)]
        if isinstance(row, dict)
        else []
    )
    raise DataError(
        f"{path}: the line at byte {first} has no text under {field!r}. "
        + (f"Set --field {texts[0]}." if texts else "Leave the line out: it has no text at all.")
    )


def _decode(data: bytes, path: Path, first: int, *, final: bool) -> tuple[str, int]:
    """Decode these bytes; return the text and the number of bytes that it takes."""
    try:
        return codecs.utf_8_decode(data, "strict", final)
    except UnicodeDecodeError as error:
        place = first + error.start
        raise DataError(
            f"{path} is not UTF-8: byte 0x{data[error.start]:02x} at {place}. "
            f"Convert it: iconv -f latin1 -t utf-8 {path} > {path.with_suffix('.utf8.txt')}"
        ) from error


def _check_unpacked(path: Path) -> None:
    if unpack := PACKED.get(path.suffix):
        raise DataError(
            f"{path} should be text and is packed ({path.suffix}). Unpack it: {unpack} {path}"
        )
