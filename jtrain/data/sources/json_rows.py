"""Rows of JSON lines and Parquet files one after the other, each with where it stands."""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jtrain.data.sources.content import HEAD, decode, format_error, read_content, read_line
from jtrain.data.sources.files import find_files
from jtrain.data.sources.parquet import ParquetRows
from jtrain.errors import DataError
from jtrain.io.regular_files import open_regular


def read_rows(
    paths: str | list[str], columns: Sequence[str] = (), *, noun: str, form: str
) -> Iterator[tuple[str, Any]]:
    """Yield where each row stands, `FILE:LINE`, and its values.

    Args:
        columns: of Parquet files; none: all. Null fields are left out: each row of such a file has
            the fields of every other.
        noun: name of a row, for errors: `conversation`.
        form: what a row is, for errors: `a list of messages`.

    Raises:
        DataError: if a file is missing, or a line is not UTF-8 or not JSON.
    """
    for file in find_files(paths):
        with open_regular(file) as stream:
            head = stream.read(HEAD)
        if file.suffix == ".parquet" or head.startswith(b"PAR1"):
            rows = ParquetRows([file], columns=list(columns))
            yield from ((f"{file}:{i + 1}", _without_nulls(rows[i])) for i in range(len(rows)))
        else:
            yield from _lines(file, head, noun, form)


def _without_nulls(value: Any) -> Any:
    match value:
        case dict(fields):
            return {k: _without_nulls(one) for k, one in fields.items() if one is not None}
        case list(entries):
            return [_without_nulls(one) for one in entries]
    return value


def _lines(file: Path, head: bytes, noun: str, form: str) -> Iterator[tuple[str, Any]]:
    encoding, found = read_content(file, head)
    if found in {"CSV", "a JSON array"}:
        raise format_error(file, head, noun)
    with open_regular(file) as stream:
        for number in itertools.count(1):
            first = stream.tell()
            if not (line := read_line(stream, encoding)):
                return
            text = decode(line, file, encoding, first=first, line=number)[0].strip("\ufeff \t\r\n")
            if text:
                where = f"{file}:{number}"
                yield where, _parsed(where, text, noun, form)


def _parsed(where: str, line: str, noun: str, form: str) -> Any:
    try:
        return json.loads(line)
    except RecursionError:
        raise DataError(
            f"{where} has JSON that is nested too deeply. A {noun} is {form}: remove the line, or "
            f"what is nested in it."
        ) from None
    except ValueError as error:
        raise DataError(
            f"{where} is no JSON: {error}. Write each {noun} as one line of JSON, or remove the "
            f"line."
        ) from None
