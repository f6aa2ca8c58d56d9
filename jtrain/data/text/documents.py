"""The documents of text files, piece by piece: memory stays flat however long one is."""

import codecs
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, TypeAlias

from jtrain.errors import DataError
from jtrain.io.regular_files import parse_json

By: TypeAlias = Literal["file", "line"]
PIECE = 1 << 16  # bytes
LINES = {".jsonl", ".ndjson"}  # of these a line is a document, whatever is said
PACKED = {".gz": "gunzip -k", ".xz": "unxz -k", ".bz2": "bunzip2 -k", ".zst": "unzstd"}


class DocumentCursor(NamedTuple):
    """Between two pieces."""

    file: int = 0
    offset: int = 0  # bytes


class TextPiece(NamedTuple):
    """Some text of a document, and where the next piece begins."""

    text: str
    ends: bool  # whether the document does, with it
    next: DocumentCursor


def pieces(
    files: Sequence[Path],
    *,
    by: By = "file",
    field: str = "text",
    start: DocumentCursor = DocumentCursor(),
) -> Iterator[TextPiece]:
    """The pieces of all documents from `start` on; each follows from where it begins alone.

    A long file is parted before a space behind a letter or a digit, where the usual tokenizers
    part words too: the pieces then have the tokens of the whole.

    Args:
        files: UTF-8 text; of a JSON lines file (.jsonl) each line has a `field`.
        by: what a document is: a file, or a line that is not blank.
        field: where the text of a JSON line stands.
        start: where to go on.

    Raises:
        DataError: what is no text, by file and byte.
    """
    for number in range(start.file, len(files)):
        path = files[number]
        _refuse_packed(path)
        lines = path.suffix in LINES
        with path.open("rb") as stream:
            stream.seek(start.offset if number == start.file else 0)
            parts = _lines(stream, path, field if lines else "") if lines or by == "line" else None
            for text, ends in parts if parts is not None else _windows(stream, path):
                yield TextPiece(text, ends, DocumentCursor(number, stream.tell()))


def _windows(stream: BinaryIO, path: Path) -> Iterator[tuple[str, bool]]:
    while True:
        first = stream.tell()
        data = stream.read(PIECE)
        ends = len(data) < PIECE
        text, used = _decoded(data, path, first, final=ends)
        if not ends:
            cut = _cut(text)
            used = len(text[:cut].encode()) if cut < len(text) else used
            text = text[:cut]
            stream.seek(first + used)
        yield text if first else text.removeprefix("\ufeff"), ends
        if ends:
            return


def _cut(text: str) -> int:
    """The last place where a space follows a letter or a digit; the end where there is none."""
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
        text = _decoded(data, path, first, final=True)[0].rstrip("\r\n")
        text = text if first else text.removeprefix("\ufeff")
        if text.strip():
            yield (_field(text, path, first, field) if field else text), True


def _field(text: str, path: Path, first: int, field: str) -> str:
    """The text of a JSON line."""
    try:
        row = parse_json(text)
    except ValueError as error:
        raise DataError(
            f"{path} was to hold a JSON object a line; the line at byte {first} is none ({error}). "
            f"Leave it out, or name the file .txt and prepare it with --by line."
        ) from error
    if isinstance(row, dict) and isinstance(row.get(field), str):
        return row[field]
    texts = (
        [key for key, value in row.items() if isinstance(value, str)]
        if isinstance(row, dict)
        else []
    )
    raise DataError(
        f"{path}: the line at byte {first} has no text under {field!r}. "
        + (f"Set --field {texts[0]}." if texts else "Leave the line out: it has no text at all.")
    )


def _decoded(data: bytes, path: Path, first: int, *, final: bool) -> tuple[str, int]:
    """The text of these bytes, and how many of them it takes."""
    try:
        return codecs.utf_8_decode(data, "strict", final)
    except UnicodeDecodeError as error:
        place = first + error.start
        raise DataError(
            f"{path} is not UTF-8: byte 0x{data[error.start]:02x} at {place}. "
            f"Convert it: iconv -f latin1 -t utf-8 {path} > {path.with_suffix('.utf8.txt')}"
        ) from error


def _refuse_packed(path: Path) -> None:
    if unpack := PACKED.get(path.suffix):
        raise DataError(
            f"{path} was to be text and is packed ({path.suffix}). Unpack it: {unpack} {path}"
        )
