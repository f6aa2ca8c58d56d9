"""Lines of text files as streams, shuffled by a buffer."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from jtrain.data.batches.fingerprint import fingerprint_files
from jtrain.data.sources.files import find_files
from jtrain.data.text.documents import DocumentCursor, read_pieces
from jtrain.data.text.tokenizers import Tokenizer
from jtrain.errors import DataError
from jtrain.errors.plain_numbers import plain_numbers

_Line: TypeAlias = tuple[DocumentCursor, str]  # where it begins, and its text


class Lines:
    """An endless stream of the lines of files (or the `field` of JSON lines), without blank lines.

    Each line is drawn from a buffer of `buffer` lines, and the next line of the files replaces it.
    So a line occurs once an epoch, except for the lines in the buffer when an epoch ends; with
    `buffer=1` lines come in order. The state has the position of each line in the buffer, not its
    text.

    Raises:
        DataError: no such file, a file that is not text, no line at all, or a state of other files.
    """

    @plain_numbers
    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        *,
        field: str = "text",
        buffer: int = 1000,
        seed: int = 0,
    ):
        if buffer < 1:
            raise DataError(f"A buffer of {buffer} lines holds none. Set buffer=1 or more.")
        self._files, self._field, self._buffer = find_files(paths), field, buffer
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._place, self._pool = DocumentCursor(), list[_Line]()
        self._lines = self._read()

    def next(self) -> str:
        """Return the next line."""
        while len(self._pool) < self._buffer:
            self._pool.append(next(self._lines))
        chosen = int(self._random.integers(len(self._pool)))
        _, text = self._pool[chosen]
        self._pool[chosen] = next(self._lines)
        return text

    def state(self) -> dict[str, Any]:
        """Return the position as JSON."""
        return {
            "files": self._sizes(),
            "place": self._place,
            "held": [start for start, _ in self._pool],
            "random": self._random.bit_generator.state,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go to the position that a stream of the same files had when it returned `state`."""
        if [list(file) for file in state["files"]] != self._sizes():
            raise DataError(
                f"A stream should resume over the files {json.dumps(state['files'])}, and finds "
                f"{json.dumps(self._sizes())}. Put them back, or start a new run: name=NAME-2"
            )
        self._place = DocumentCursor(*state["place"])
        self._pool = [self._line(DocumentCursor(*start)) for start in state["held"]]
        self._random.bit_generator.state = state["random"]
        self._lines = self._read()

    def fingerprint(self) -> str:
        """Return the fingerprint of the files and the field."""
        return fingerprint_files(self._files, self._field)

    def _read(self) -> Iterator[_Line]:
        while True:
            start = self._place
            for piece in self._from(start):
                line = self._place, piece.text
                self._place = piece.next
                yield line
            if start == DocumentCursor() == self._place:
                raise DataError(
                    f"{', '.join(map(str, self._files[:3]))} has no line with text in it. "
                    f"Give a file with text in it."
                )
            self._place = DocumentCursor()

    def _from(self, place: DocumentCursor) -> Any:
        return read_pieces(self._files, by="line", field=self._field, start=place)

    def _line(self, start: DocumentCursor) -> _Line:
        return start, next(iter(self._from(start))).text

    def _sizes(self) -> list[list[Any]]:
        return [[str(path), path.stat().st_size] for path in self._files]


def make_line_rows(tokenizer: Tokenizer, context: int) -> Callable[[str], dict[str, np.ndarray]]:
    """Return a function that makes rows of lines: `tokens` (int32, t+1) and `length` (int32).

    `length` counts the targets that are not padding. The end-of-document token follows the line, if
    the tokenizer has one; a line of more than `context` targets is cut off.
    """

    def row(text: str) -> dict[str, np.ndarray]:
        numbers = tokenizer.encode(text).tolist()
        numbers = [*numbers, *([] if tokenizer.end is None else [tokenizer.end])][: context + 1]
        tokens = np.zeros(context + 1, np.int32)
        tokens[: len(numbers)] = numbers
        return {"tokens": tokens, "length": np.array(max(len(numbers) - 1, 0), np.int32)}

    return row
