"""Character tokenizer: text as numbers, one a character."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.data.sources.content import HEAD, decode, format_error, read_content
from jtrain.data.sources.files import find_files
from jtrain.errors import DataError
from jtrain.io.regular_files import TooLargeError, read_bytes

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


class Vocabulary:
    """A vocabulary of characters; the number of a character is its rank by code point."""

    kind = "characters"
    end: int | None = None

    def __init__(self, characters: str):
        self.characters = "".join(sorted(set(characters)))
        if not characters:
            raise DataError(
                "A vocabulary of no characters was requested. Give the text to be encoded."
            )
        codes = _codes(self.characters)
        self._numbers = np.full(codes[-1] + 1, -1, np.int32)  # by code point; -1 is unknown
        self._numbers[codes] = np.arange(len(codes))
        self._smallest = np.min_scalar_type(len(codes) - 1)

    def __len__(self) -> int:
        return len(self.characters)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.characters == other.characters

    def __hash__(self) -> int:
        return hash(self.characters)

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:  # n
        """Return the numbers of the characters of `text`, in the smallest unsigned type.

        Raises:
            DataError: a character that is not in the vocabulary, by its line and column.
        """
        del special  # there are none
        codes = _codes(text)
        numbers = self._numbers[np.minimum(codes, len(self._numbers) - 1)]
        unknown = (numbers < 0) | (codes >= len(self._numbers))
        if unknown.any():
            place = int(unknown.argmax())
            line = text.count("\n", 0, place) + 1
            column = place - text.rfind("\n", 0, place)
            raise DataError(
                f"Character {text[place]!r} at line {line}, column {column} is not among the "
                f"{len(self)} of the vocabulary. Leave it out, or build the vocabulary from a text "
                f"that has it: Vocabulary(train + validation)."
            )
        return numbers.astype(self._smallest)

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the numbers of each text."""
        return [self.encode(text) for text in texts]

    def description(self) -> dict[str, Any]:
        """Return the kind and the characters."""
        return {"kind": self.kind, "characters": self.characters}

    def decode(self, numbers: Sequence[int] | np.ndarray) -> str:
        """Return the text of these numbers."""
        return "".join(self.characters[number] for number in np.asarray(numbers).tolist())


def _codes(text: str) -> np.ndarray:
    """Return the code point of each character."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
