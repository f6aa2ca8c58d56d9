"""Lines of text files as a stream, shuffled by a buffer."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jtrain.data.batches.fingerprint import of_files
from jtrain.data.sources.files import found
from jtrain.data.text.documents import DocumentCursor, pieces
from jtrain.data.text.tokenizer import Tokenizer
from jtrain.errors import DataError


class _Line(NamedTuple):
    begins: DocumentCursor
    text: str


class Lines:
    """The lines of files (of JSON lines the `field`), again and again; blank ones are left out.

    Of `buffer` lines that are held one is drawn, and the next that is read takes its place. So a
    line comes once an epoch, but for those that are held when another begins; with `buffer=1` they
    come in order. The state has where each held line begins, not its text.

    Raises:
        DataError: no such file, what is no text, no line at all, or a state of other files.
    """

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
        self._files, self._field, self._buffer = found(paths), field, buffer
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._place, self._held = DocumentCursor(), list[_Line]()
        self._reading = self._read()

    def next(self) -> str:
        """The next line."""
        while len(self._held) < self._buffer:
            self._held.append(next(self._reading))
        chosen = int(self._random.integers(len(self._held)))
        line = self._held[chosen]
        self._held[chosen] = next(self._reading)
        return line.text

    def state(self) -> dict[str, Any]:
        """Where it is, as JSON."""
        return {
            "files": self._sizes(),
            "place": self._place,
            "held": [line.begins for line in self._held],
            "random": self._random.bit_generator.state,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to where the stream of the same files was that gave `state`."""
        if [list(file) for file in state["files"]] != self._sizes():
            raise DataError(
                f"A stream was to go on over the files {json.dumps(state['files'])}, and there is "
                f"{json.dumps(self._sizes())}. Put them back, or start a new run: name=NAME-2"
            )
        self._place = DocumentCursor(*state["place"])
        self._held = [self._line(DocumentCursor(*begins)) for begins in state["held"]]
        self._random.bit_generator.state = state["random"]
        self._reading = self._read()

    def fingerprint(self) -> str:
        """What the data is, in a line."""
        return of_files(self._files, self._field)

    def _read(self) -> Iterator[_Line]:
        while True:
            begins = self._place
            for piece in self._from(begins):
                line = _Line(self._place, piece.text)
                self._place = piece.next
                yield line
            if begins == DocumentCursor() == self._place:
                raise DataError(
                    f"{', '.join(map(str, self._files[:3]))} has no line with text in it. "
                    f"Give a file that has some."
                )
            self._place = DocumentCursor()

    def _from(self, place: DocumentCursor) -> Any:
        return pieces(self._files, by="line", field=self._field, start=place)

    def _line(self, begins: DocumentCursor) -> _Line:
        return _Line(begins, next(iter(self._from(begins))).text)

    def _sizes(self) -> list[list[Any]]:
        return [[str(path), path.stat().st_size] for path in self._files]


def line_rows(tokenizer: Tokenizer, context: int) -> Callable[[str], dict[str, np.ndarray]]:
    """Makes rows of lines: `tokens` (int32, t+1) and `length` (int32): how many targets are real.

    A line has the end of a document behind it where the tokenizer has one; what is longer than
    `context` targets is cut off.
    """

    def row(text: str) -> dict[str, np.ndarray]:
        numbers = tokenizer.encode(text).tolist()
        numbers = [*numbers, *([] if tokenizer.end is None else [tokenizer.end])][: context + 1]
        tokens = np.zeros(context + 1, np.int32)
        tokens[: len(numbers)] = numbers
        return {"tokens": tokens, "length": np.array(len(numbers) - 1, np.int32)}

    return row
