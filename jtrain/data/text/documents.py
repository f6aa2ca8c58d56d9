"""Documents of text files, read piece by piece; of JSONL a line at a time is held in memory."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, TypeAlias

from jtrain.data.sources.content import HEAD, decode, format_error, iterate_lines, read_content
from jtrain.data.sources.files import find_files
from jtrain.data.text.tokenizers import HALF_PAIR, SURROGATE
from jtrain.errors import DataError
from jtrain.io.regular_files import TooLargeError, open_regular, parse_json, read_bytes

By: TypeAlias = Literal["file", "line"]
PIECE = 1 << 16  # bytes
LINES = {".jsonl", ".ndjson"}  # a file of such a name is JSON lines, even if its first is damaged


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
        files: text in UTF-8 or UTF-16, or JSON lines, each with a `field`.
        by: the unit of a document: a file, or a line that is not blank.
        field: the field of a JSON line that has the text; empty: JSON is text like any other. Any
            but `text` is an error for a file without fields.
        start: the position to resume from.

    Raises:
        DataError: a file that is not text, by file and byte; JSON or CSV that is not JSON lines.
    """
    for number in range(start.file, len(files)):
        path = files[number]
        with open_regular(path) as stream:
            head = stream.read(HEAD)
            named = has_field(path, head, field)
            encoding = read_content(path, head).encoding
            stream.seek(start.offset if number == start.file else 0)
            if named or by == "line":
                lines = iterate_lines(stream, path, encoding)
                parts = ((_field(x, path, at, field) if named else x, True) for _, at, x in lines)
            else:
                parts = _windows(stream, path, encoding)
            for text, ends in parts:
                yield TextPiece(text, ends, DocumentCursor(number, stream.tell()))


def has_field(path: Path, head: bytes, field: str, *, needed: bool = False) -> bool:
    """Return whether a file is JSON lines, whose `field` is the text, by its first bytes.

    Args:
        needed: whether `text` is not a guess either.

    Raises:
        DataError: if the file is packed, binary, CSV or other JSON; or text, for a field.
    """
    found = read_content(path, head).format
    if not field or not head:
        return False
    if found == "JSON lines" or (path.suffix in LINES and found in ("text", "a JSON object")):
        return True
    if found != "text":
        raise format_error(path, head)
    if needed or field != "text":
        raise DataError(
            f"The field {field!r} was requested, and {path} is text, not JSON lines. Leave the "
            f"field out: jtrain data prepare {path} --out DIR"
        )
    return False


def _windows(stream: BinaryIO, path: Path, encoding: str) -> Iterator[tuple[str, bool]]:
    while True:
        first = stream.tell()
        data = stream.read(PIECE)
        ends = len(data) < PIECE
        text, used = decode(data, path, encoding, first=first, line=not first, final=ends)
        if not ends:
            cut = _cut(text)
            used = len(text[:cut].encode(encoding)) if cut < len(text) else used
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


def _field(text: str, path: Path, first: int, field: str) -> str:
    """Return the text of a JSON line."""
    try:
        row = parse_json(text)
    except ValueError as error:
        raise DataError(
            f"{path} should hold a JSON object a line; the line at byte {first} is none ({error}). "
            f"Leave it out, or learn the lines as they are: --by line --field ''"
        ) from error
    if isinstance(row, dict) and isinstance(found := row.get(field), str):
        if SURROGATE.search(found):
            raise DataError(
                f"{path}: the line at byte {first} {HALF_PAIR}. Leave the line out, or remove it."
            )
        return found
    row = row if isinstance(row, dict) else {}
    texts = [key for key, value in row.items() if isinstance(value, str)]
    raise DataError(
        f"{path}: the line at byte {first} has no text under {field!r}. "
        + (f"Set --field {texts[0]}." if texts else "Leave the line out: it has no text at all.")
    )


MOST = 1 << 32  # bytes of a file


def read_text(paths: str | Path | Sequence[str | Path]) -> str:
    """Return the text of a file, of a list of files or of a pattern (`plays/*.txt`), joined.

    Raises:
        DataError: a file that does not exist or is not UTF-8, or a text without a character.
    """
    text = "".join(_read(path) for path in find_files(paths))
    if not text:
        raise DataError(f"{paths} holds no character. Give a file with text in it.")
    return text


def _read(path: Path) -> str:
    try:
        data = read_bytes(path, most=MOST)
    except TooLargeError:
        raise DataError(
            f"{path} has more than {MOST >> 30} GiB, and a text of characters is held in memory. "
            f"Write it as tokens, which are read as they are needed: jtrain data prepare {path}"
        ) from None
    encoding, found = read_content(path, data[:HEAD])
    if found != "text":
        raise format_error(path, data[:HEAD])
    return decode(data, path, encoding, line=1)[0].removeprefix("\ufeff")
