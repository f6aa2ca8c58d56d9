"""What a file is, by its content: encoding, packed and binary formats, JSON and CSV."""

import codecs
import csv
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from jtrain.errors import DataError
from jtrain.io.regular_files import parse_json

HEAD = 1 << 14  # bytes that are looked at
MARKS = ",\t;|"  # between the cells of a table

_BINARY = re.compile(
    rb"(?P<gzip>\x1f\x8b)|(?P<xz>\xfd7zXZ)|(?P<bzip2>BZh\d)|(?P<zstd>\x28\xb5\x2f\xfd)"
    rb"|(?P<Parquet>PAR1)|(?P<Arrow>ARROW1)|(?P<zip>PK\x03\x04)|(?P<tar>.{257}ustar)|(?P<PDF>%PDF-)"
    rb"|(?P<PNG>\x89PNG)|(?P<JPEG>\xff\xd8\xff)|(?P<HDF5>\x89HDF)|(?P<SQLite>SQLite format 3\0)"
    rb"|(?P<GGUF>GGUF\S\0)|(?P<numpy>\x93NUMPY)|(?P<pickle>\x80[\2-\5])|(?P<UTF_32>\xff\xfe\0\0)"
    rb"|(?P<lz4>\x04\x22M\x18)|(?P<RTF>\{\\rtf)",
    re.DOTALL,
)


class Content(NamedTuple):
    """Encoding and format of a text."""

    encoding: str  # utf-8, utf-16-le or utf-16-be
    format: Literal["text", "JSON lines", "a JSON object", "a JSON array", "CSV"]


@functools.lru_cache(8)  # a stream that resumes reads a file again for each line it holds
def read_content(path: Path, head: bytes) -> Content:
    """Return what a text is by its first bytes; its name counts for a table of two lines only.

    Raises:
        DataError: if the file is packed or binary.
    """
    if (found := _BINARY.match(head)) and (name := found.lastgroup):
        advice = "Give a file of text."
        if name in {"gzip", "xz", "bzip2", "zstd", "lz4"}:
            advice = f"Unpack it: {name} -dc {path} > {path}.txt"
        elif name == "UTF_32":
            advice = f"Convert it: iconv -f UTF-32 -t UTF-8 {path} > {path}.txt"
        raise DataError(
            f"{path} is {name.replace('_', '-')} by its first bytes, and text is needed. {advice}"
        )
    encoding = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}.get(head[:2], "utf-8")
    text = head.decode(encoding, "ignore").lstrip("\ufeff\x1e \t\r\n")
    lines = text.splitlines()[: None if len(head) < HEAD else -1]  # the last may be cut off
    objects = sum(map(_is_object, lines[:4]))  # after a comment too
    if objects > 1 or re.match(r'\{\s*"[^"]*"\s*:', text):
        return Content(encoding, "JSON lines" if objects or not lines else "a JSON object")
    if re.match(r'\[\s*\{\s*"', text):
        return Content(encoding, "a JSON array")
    rows = 2 if path.suffix in {".csv", ".tsv"} else 3
    return Content(encoding, "CSV" if any(_is_table(lines, m, rows) for m in MARKS) else "text")


def format_error(path: Path, head: bytes, noun: str = "") -> DataError:
    """Return the error for JSON or CSV in place of text, or of a `noun` a line."""
    found = read_content(path, head).format
    advice = "Write its rows as JSON lines, an object a line"
    if found == "JSON lines":
        advice = f"Prepare a field of it: jtrain data prepare {path} --field NAME --out DIR"
    why = f"a {noun} a line is needed" if noun else "a model would learn the syntax"
    if not noun:
        advice += f"; or, to learn the syntax: jtrain data prepare {path} --field '' --out DIR"
    return DataError(f"{path} is {found}, and {why}. {advice}")


def iterate_lines(stream: BinaryIO, path: Path, encoding: str) -> Iterator[tuple[int, int, str]]:
    """Yield the number (0: unknown), the first byte and the text of each line that is not blank.

    Raises:
        DataError: see `decode`.
    """
    numbers = itertools.repeat(0) if stream.tell() else itertools.count(1)
    for number in numbers:
        first = stream.tell()
        if not (line := _read_line(stream, encoding)):
            return
        text = decode(line, path, encoding, first=first, line=number)[0].rstrip("\r\n")
        text = text if first else text.removeprefix("\ufeff")
        if text.strip():
            yield number, first, text


def _read_line(stream: BinaryIO, encoding: str) -> bytes:
    """Return the bytes of a line with its end; none at the end of the file."""
    if encoding == "utf-8":
        return stream.readline()
    line, end = b"", "\n".encode(encoding)
    while not line.endswith(end) and (part := stream.readline()):
        line += part  # up to a byte 0x0a, which may be half of a character
        line += stream.read(len(line) % 2)
    return line


def decode(
    data: bytes, path: Path, encoding: str, *, first: int = 0, line: int = 0, final: bool = True
) -> tuple[str, int]:
    """Decode bytes from byte `first` and `line` (0: unknown) on; return text, number of bytes.

    A character that is cut off at the end is an error if `final`.

    Raises:
        DataError: if they are not of the encoding, or have a byte 0; the message has its place.
    """
    place = data.find(0) if encoding == "utf-8" else -1
    if place < 0:
        try:
            decoder = codecs.getincrementaldecoder(encoding)()
            return decoder.decode(data, final), len(data) - len(decoder.getstate()[0])
        except UnicodeDecodeError as error:
            place = error.start
    where = f"{path}:{line + data.count(10, 0, place)}" if line else f"{path}"
    source = "latin1"
    if not data[place]:
        source = "UTF-16LE" if (first + place) % 2 else "UTF-16BE"
    new = path.with_suffix(".utf8.txt")
    advice = f"If it is text, convert it: iconv -f {source} -t utf-8 {path} > {new}"
    if encoding != "utf-8":
        advice = "It is cut off or damaged: get it again."
    raise DataError(
        f"{where} is not {encoding.upper()}: byte 0x{data[place]:02x} at {first + place}. {advice}"
    )


def _is_object(line: str) -> bool:
    try:
        return line.strip("\x1e")[:1] == "{" and bool(parse_json(line.strip("\x1e")))
    except ValueError:
        return False


def _is_table(lines: Sequence[str], mark: str, needed: int) -> bool:
    """Return whether the first `needed` rows are a header of names and rows of as many cells."""
    rows = list(
        itertools.islice(csv.reader(lines, delimiter=mark, skipinitialspace=needed < 3), needed)
    )
    named = rows and all(re.fullmatch(r"[^\W\d][\w \-/()]*", cell) for cell in rows[0])
    same = len(rows) == needed and len({len(row) for row in rows}) == 1
    return bool(named and same and len(set(rows[0])) == len(rows[0]) > 1)
