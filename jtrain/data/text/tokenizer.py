"""Tokenizers: the interface, fingerprints, and the tokenizer of bytes."""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jtrain.errors import DataError

SURROGATE = re.compile("[\ud800-\udfff]")
HALF_PAIR = "has half of a surrogate pair, such as \\ud800, which is no character"


@runtime_checkable
class Tokenizer(Protocol):
    """A tokenizer; `len` is its vocabulary, including the end-of-document token."""

    kind: str  # as in a config
    end: int | None  # the end-of-document token, or None

    def __len__(self) -> int: ...

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:
        """Return the numbers of a text, n: unsigned, in 0 .. len - 1, without an end token.

        A special token that is spelled out in the text is plain text, or with `special` that token.
        """
        ...

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the numbers of each text; on many cores, if that is faster."""
        ...

    def decode(self, numbers: Sequence[int] | np.ndarray, /) -> str:
        """Return the text of these numbers; invalid bytes become U+FFFD."""
        ...

    def description(self) -> dict[str, Any]:
        """Return all of its content as JSON, from which `tokenizer_file.tokenizer_of` builds it."""
        ...


def decode_known(tokenizer: Tokenizer, tokens: np.ndarray) -> str:
    """Return the text of tokens n, without those beyond the vocabulary: a model may have more."""
    return tokenizer.decode(tokens[tokens < len(tokenizer)])


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return 12 hex digits that identify the tokenizer on any machine, for any library."""
    text = json.dumps(tokenizer.description(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def describe_tokenizer(tokenizer: Tokenizer) -> str:
    """Describe a tokenizer: `bpe 91c3a0b2d4e5 of 4,096 tokens`."""
    return f"{tokenizer.kind} {fingerprint(tokenizer)} of {len(tokenizer):,} tokens"


def check_same_tokenizer(tokenizers: Mapping[str, Tokenizer]) -> None:
    """Raise DataError unless all tokenizers, each under the name of its data, are the same.

    Raises:
        DataError: two tokenizers differ; the message has both fingerprints.
    """
    (first, expected), *others = tokenizers.items()
    for name, other in others:
        if fingerprint(other) != fingerprint(expected):
            raise DataError(
                f"All texts need one tokenizer, and {first} was written by "
                f"{describe_tokenizer(expected)}, "
                f"{name} by {describe_tokenizer(other)}. Write {name} again: "
                f"jtrain data prepare FILES --tokenizer {first}/tokenizer.json --out {name}-again"
            )


@contextlib.contextmanager
def check_characters(*texts: str) -> Iterator[None]:
    """Raise DataError where texts cannot be encoded because one has a surrogate."""
    try:
        yield
    except (UnicodeEncodeError, TypeError):  # the package `tokenizers` raises either
        if not (found := next(filter(None, map(SURROGATE.search, texts)), None)):
            raise
        place = found.start() + 1
        raise DataError(f"Character {place} of a text {HALF_PAIR}. Remove it.") from None


class ByteTokenizer:
    """One token a byte, and 256 for the end of a document."""

    kind = "bytes"
    end: int | None = 256

    def __len__(self) -> int:
        return 257

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:  # n
        """Return the bytes of `text`, as uint16."""
        del special  # there are none
        with check_characters(text):
            return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the bytes of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, numbers: Sequence[int] | np.ndarray) -> str:
        """Return the text of these bytes without the ends of documents."""
        numbers = np.asarray(numbers)
        return bytes(numbers[numbers < 256].astype(np.uint8)).decode(errors="replace")

    def description(self) -> dict[str, Any]:
        """Return the kind, which is the complete description."""
        return {"kind": self.kind}
